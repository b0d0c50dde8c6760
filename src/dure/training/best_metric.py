"""Best evaluation of a run."""

import math
import re
from collections.abc import Mapping

from dure.errors import SpecInvalid
from dure.records.step_record import Metric

# fmt: off
_LESS_IS_BETTER = frozenset((
    "loss", "error", "errors", "err", "mse", "rmse", "mae", "mape", "nll", "perplexity", "ppl", "bits", "bpc", "wer",
    "cer", "distance", "fid",
))
_MORE_IS_BETTER = frozenset((
    "accuracy", "acc", "top1", "top5", "f1", "auc", "auroc", "precision", "recall", "score", "iou", "miou", "map",
    "dice", "bleu", "rouge", "r2", "reward", "correct",
))
# fmt: on


class Best:
    """Comparison of evaluations by one metric."""

    def __init__(self, metric: str, mode: str) -> None:
        """Set the metric and whether lower or higher is better; `auto` decides by the words of its name.

        Raises:
            SpecInvalid: The mode is `auto` and the name is not conclusive.
        """
        self.metric = metric
        words = set(re.split(r"[^a-z0-9]+", metric.lower()))
        if mode == "auto":
            less, more = bool(words & _LESS_IS_BETTER), bool(words & _MORE_IS_BETTER)
            if less == more:
                raise SpecInvalid(
                    [f"best_metric is {metric}, whose name does not tell what is better: add --best-mode min or max"]
                )
            mode = "min" if less else "max"
        self.is_less_better = mode == "min"

    def value_of(self, metrics: Mapping[str, Metric]) -> float:
        """Return the metric's value.

        Raises:
            SpecInvalid: The evaluation does not contain the metric.
        """
        if self.metric not in metrics:
            raise SpecInvalid(
                [f"best_metric is {self.metric} but the evaluation measures {', '.join(metrics)}: choose one of these"]
            )
        return metrics[self.metric].value

    def is_better(self, value: float, best: float | None) -> bool:
        """Return whether a value beats the best so far; a value that is not finite never does."""
        if not math.isfinite(value):
            return False
        return best is None or (value < best if self.is_less_better else value > best)
