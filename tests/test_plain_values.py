"""Records from plain values: what fits comes back, and what does not is refused with the field and the reason."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from dure.documents import DocumentInvalid
from dure.plain_values import from_plain


@dataclass(frozen=True, kw_only=True)
class Point:
    """Record inside another."""

    x: float
    label: str | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Record with a field of each kind that there is."""

    number: int
    is_closed: bool = False
    points: tuple[Point, ...] = ()
    size: tuple[int, str] | None = None
    words: Sequence[str] = field(default_factory=list)
    of_rank: Mapping[int, Point] = field(default_factory=dict)
    more: Any = None


FIGURE = Figure(
    number=3,
    is_closed=True,
    points=(Point(x=1.5), Point(x=2.0, label="b")),
    size=(1, "m"),
    words=["a"],
    of_rank={7: Point(x=0.0)},
    more={"a": [None]},
)


def test_record_when_it_went_through_json_then_it_is_the_same():
    assert from_plain(Figure, json.loads(json.dumps(asdict(FIGURE)))) == FIGURE


def test_record_when_fields_have_defaults_then_they_need_not_be_there():
    assert from_plain(Figure, {"number": 1}) == Figure(number=1)


def test_number_when_it_is_whole_then_it_is_a_float_too():
    assert isinstance(from_plain(Point, {"x": 1}).x, float)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], r"^Figure is \[\] but must be an object$"),
        ({}, "^Figure has no field 'number'$"),
        ({"number": 1, "colour": 2}, "^Figure has a field 'colour', which is not known$"),
        ({"number": "1"}, "^Figure.number is '1' but must be of type int$"),
        ({"number": True}, "^Figure.number is True but must be of type int$"),
        ({"number": 1.0}, "^Figure.number is 1.0 but must be of type int$"),
        ({"number": None}, "^Figure.number is None but must be of type int$"),
        ({"number": 1, "is_closed": 1}, "^Figure.is_closed is 1 but must be of type bool$"),
        ({"number": 1, "points": {}}, "^Figure.points is {} but must be a list$"),
        ({"number": 1, "points": [{"x": "y"}]}, "^Figure.points.x is 'y' but must be of type float$"),
        ({"number": 1, "points": [{"x": 10**400}]}, "^Figure.points.x is 1000.*… but must be a number$"),
        ({"number": 1, "size": [1]}, r"^Figure.size is \[1\] but must be 2 values$"),
        ({"number": 1, "words": "abc"}, "^Figure.words is 'abc' but must be a list$"),
        ({"number": 1, "of_rank": {"a": {"x": 1}}}, "^Figure.of_rank is 'a' but must be of type int$"),
        ({"number": 1, "of_rank": []}, r"^Figure.of_rank is \[\] but must be an object$"),
    ],
)
def test_value_when_it_does_not_fit_then_the_field_and_the_reason_are_named(value, reason):
    with pytest.raises(DocumentInvalid, match=reason):
        from_plain(Figure, value)
