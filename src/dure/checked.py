"""Fields of records from a file or a peer: their types with limits, and the check of a record."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from dure.documents import DocumentInvalid

MOST_TEXT = 2**22
"""Maximum characters of a text field; longer ones are truncated."""
_MOST_FAULTS = 3

Record = TypeVar("Record")


def _limited(text: str) -> str:
    # the user's code decides how long a message is, and every written failure must be readable again
    return text[:MOST_TEXT]


_Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(strict=True), AfterValidator(_limited)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Step = Annotated[int, Field(strict=True, ge=-1, lt=2**63)]
"""Step that a rank was in; -1 before the first."""
Rank = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
ExitCode = Annotated[int, Field(strict=True, ge=0, lt=256)]
Number = _Whole | Annotated[float, Field(strict=True)]
"""Number of any kind: integers stay integers, and it may be infinite or NaN."""
Time = Annotated[float, Field(strict=True, ge=0, lt=2**63, allow_inf_nan=False)]
"""Seconds since the epoch."""


def record_from_json(kind: type[Record], found: object) -> Record:
    """Return a dataclass instance from the result of `dataclasses.asdict`, after a JSON round trip.

    Raises:
        DocumentInvalid: It is not such a record.
    """
    adapter: TypeAdapter[Record] = _adapter_of(kind)
    return checked(adapter, found, 1)


_adapter_of: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def checked(adapter: TypeAdapter[Record], found: object, version: int) -> Record:
    """Return a record from plain values, as parsed from a JSON document.

    Fields added by newer versions are ignored.

    Args:
        adapter: Adapter of the record's class.
        found: Parsed values. Without a `version` they are of the first.
        version: Version that this dure writes.

    Raises:
        DocumentInvalid: It is not such a record.
    """
    try:
        return adapter.validate_python(found)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:_MOST_FAULTS]]
    except ArithmeticError as error:
        faults = [str(error)]
    theirs = found.get("version") if isinstance(found, Mapping) else None
    newer = (
        f"is of version {theirs}, newer than {version}, and " if isinstance(theirs, int) and theirs > version else ""
    )
    raise DocumentInvalid(f"{newer}holds other fields than it should ({'; '.join(faults)})")
