"""A cell of the table: one feature under one strategy, run in one way, and the verdict on it."""

import json
import warnings
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import load_file
from torch import Tensor

import dure
from dure.errors import DureError
from dure.strategies.table import STRATEGIES
from tests.conformance.zoo.feature import NUM_SAMPLES, STEPS, Feature

Kind = Literal["exact", "declared", "refused", "wrong"]
WAYS = ("straight", "killed", "resumed")
"""Ways in which a cell is run: undisturbed; with a rank killed in its sixth step; stopped and taken up again."""

DIVIDED = "divided"
"""A further way: undisturbed, in microbatches. Its verdict need not be that of the others; it must not be wrong."""
_KILLED_STEP = 6
_numbers = count()
_references: dict[tuple[Any, str], dict[str, Tensor] | None] = {}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a cell."""

    kind: Kind
    detail: str = ""
    """The declaration, the sentence of the refusal, or the fault."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def run_cell(feature: Feature, strategy: str, way: str, reference: dict[str, Tensor] | None, folder: Path) -> Verdict:
    """Run a feature under a strategy on two ranks or devices, and compare with the one-process run.

    Args:
        feature: The row.
        strategy: The column.
        way: One of `WAYS`, or `DIVIDED`.
        reference: Weights at the end of the undisturbed one-process run; None if that was refused.
        folder: For runs.
    """
    try:
        run = _run(feature, strategy, way, folder)
    except DureError as error:
        return _refusal(error)
    except Exception as error:
        return Verdict(kind="wrong", detail=f"{type(error).__name__}: {error}")
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    if reference is None:
        return Verdict(kind="wrong", detail="taken, though one process refuses it")
    weights = weights_of(run)
    if weights.keys() != reference.keys():
        return Verdict(kind="wrong", detail=f"tensors differ: {sorted(weights.keys() ^ reference.keys())}")
    difference = max(_difference(weights[name], reference[name]) for name in weights)
    if difference < feature.tolerance:
        false = [text for text in declared if "differ from those of one process" in text]
        return Verdict(kind="wrong", detail=f"exact, and declared: {false}") if false else Verdict(kind="exact")
    if STRATEGIES[strategy].is_exact and not any(word in text for word in feature.declares for text in declared):
        return Verdict(kind="wrong", detail=f"off by {difference:.2g}, declared: {declared}")
    about = [text for text in declared if any(word in text for word in feature.declares)] or declared
    return Verdict(kind="declared", detail=about[0]) if about else Verdict(kind="wrong", detail=f"off by {difference}")


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max()) if one.shape == other.shape else float("inf")


def reference_of(feature: Feature, folder: Path) -> dict[str, Tensor] | None:
    """Return the weights of the undisturbed one-process run; None if it is refused.

    They are computed once for a task and its settings in this process.
    """
    key = feature.task, repr(sorted(feature.settings.items()))
    if key not in _references:
        try:
            _references[key] = weights_of(_run(feature, "single", "straight", folder))
        except DureError as error:
            if _refusal(error).kind != "refused":
                raise
            _references[key] = None
    return _references[key]


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the weights at the end of a run."""
    file = run / "weights.safetensors"
    dure.export(run, file)
    return load_file(file)


def _refusal(error: DureError) -> Verdict:
    said = str(error)
    if error.exit_code != 2:
        return Verdict(kind="wrong", detail=f"exit code {error.exit_code}: {said[-1500:]}")
    if "Traceback" in said or len(said) > 1200:
        return Verdict(kind="wrong", detail=f"no sentence: {said[:1500]}")
    return Verdict(kind="refused", detail=said)


def _run(feature: Feature, strategy: str, way: str, folder: Path) -> Path:
    settings: dict[str, Any] = {
        "strategy": strategy,
        "nproc": 2 if STRATEGIES[strategy].many_devices else 1,
        "runs_dir": folder,
        "name": f"{next(_numbers)}",
        "quiet": True,
        "start": "fork",
        "device": "cpu",
        "threads": 1,
        "eval_every_epochs": 1e6,
        # only where a run ends: before each checkpoint, a rank inspects the loss again
        "checkpoint": {"background": False, "every_samples": 10**9},
        "snapshot_every": 1,
        "max_restarts": 0,
        **STEPS,
        **feature.settings,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == DIVIDED:
            settings["microbatch_size"] = 2
        if way == "killed":
            faults = folder / f"{settings['name']}.toml"
            rank = settings["nproc"] - 1 if not STRATEGIES[strategy].one_process else 0
            faults.write_text(f'[[fault]]\nrank = {rank}\nstep = {_KILLED_STEP}\nkind = "kill"\n')
            settings |= {"faults": faults, "max_restarts": 3}
        if way == "resumed":
            run = Path(dure.train(feature.task(), **{**settings, "samples": _stopped_at(settings)}).run)
            settings = {key: value for key, value in settings.items() if key not in ("runs_dir", "name")}
            return Path(dure.train(feature.task(), resume=run, **settings).run)
        return Path(dure.train(feature.task(), **settings).run)


def _stopped_at(settings: dict[str, Any]) -> int:
    """Return the end of the second epoch's first batch, where the undisturbed run has a boundary too."""
    size = settings["global_batch_size"]
    return size + (NUM_SAMPLES - NUM_SAMPLES % size if settings.get("drop_last") else NUM_SAMPLES)
