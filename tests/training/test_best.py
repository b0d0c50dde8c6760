"""Choice of the best evaluation."""

import math

import pytest

from dure.errors import SpecInvalid
from dure.records.step_record import Metric
from dure.training.best_metric import Best


@pytest.mark.parametrize(
    ("metric", "is_less_better"), [("loss", True), ("val_rmse", True), ("accuracy", False), ("macro-F1", False)]
)
def test_best_when_auto_then_the_name_tells(metric: str, is_less_better: bool) -> None:
    assert Best(metric, "auto").is_less_better is is_less_better


def test_best_when_the_name_does_not_tell_then_the_mode_is_asked_for() -> None:
    with pytest.raises(SpecInvalid, match=r"best_metric is quality, whose name does not tell.* --best-mode min or max"):
        Best("quality", "auto")
    assert Best("quality", "min").is_less_better


def test_best_when_compared_then_only_finite_improvements_count() -> None:
    best = Best("accuracy", "auto")
    assert best.is_better(0.5, None)
    assert best.is_better(0.6, 0.5)
    assert not best.is_better(0.5, 0.5)
    assert not best.is_better(math.nan, None)


def test_best_when_not_measured_then_says_what_is() -> None:
    with pytest.raises(SpecInvalid, match="best_metric is f1 but the evaluation measures loss, accuracy"):
        Best("f1", "auto").value_of({"loss": Metric(value=1.0, count=1), "accuracy": Metric(value=1.0, count=1)})
