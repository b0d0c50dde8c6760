"""Hand-over to Weights & Biases through its own client, offline unless the user's own `WANDB_MODE` says otherwise."""

import os
from collections.abc import Sequence

os.environ.setdefault("WANDB_MODE", "offline")
if os.environ["WANDB_MODE"] == "offline":
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # otherwise the client reports its own errors to its makers

import wandb

from dure.own_files import make_folder
from dure.tracking.tracker import Point, Subject

_PROJECT = "dure"
_EXIT_CODES = {"completed": 0, "failed": 1, "interrupted": 130, "killed": 137}


class _WandB:
    """Client of one run."""

    def begin(self, subject: Subject, identity: str | None) -> str | None:
        folder = subject.folder / "wandb"
        make_folder(folder, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=subject.name,
            id=identity,
            resume=None if identity is None else "allow",
            dir=os.environ.get("WANDB_DIR", str(subject.folder)),
            config=dict(subject.parameters),
            # the process has no code and no output of the run's, and its own load is not the run's
            settings=wandb.Settings(
                console="off", silent=True, save_code=False, disable_git=True, x_disable_stats=True, x_disable_meta=True
            ),
        )
        # W&B's own steps only grow, but steps after a resume may repeat earlier ones
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"step": point.step, "_timestamp": point.time, **point.values})

    def end(self, status: str) -> None:
        self._run.finish(exit_code=_EXIT_CODES[status])


def make() -> _WandB:
    """Return a client."""
    return _WandB()
