"""Process that follows a run's records and hands them over: `python -m dure.tracking.follower`."""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dure.errors import DureError
from dure.own_files import open_own
from dure.records.run_dir import SPEC, RunDir
from dure.terminal import message
from dure.tracking.delivery import Delivered, Delivery
from dure.tracking.tracker import Subject

STATE = "tracking.json"
"""File in the run folder with the identities of the run at its trackers, and what they have of it."""
PATIENCE_SECONDS = 15.0
"""Seconds after the end of a run that its trackers have to take the rest."""

_NICENESS = 10
"""Priority below that of training, which must not wait for cores that clients of trackers use."""


def main(arguments: Sequence[str]) -> None:
    """Follow a run until the launcher, at the other end of stdin, says how it ended, or is gone.

    Args:
        arguments: Folder of the run, the names of its trackers separated by commas, and `elastic` if another host may
            go on with the run when this one is lost.
    """
    folder, names, *rest = arguments
    run = RunDir(Path(folder))
    os.nice(_NICENESS)
    say = _separate_output(run)
    deliveries = _deliveries(run, names.split(","), say)
    for delivery in deliveries:
        delivery.start()
    word = sys.stdin.readline().strip()
    status = word or ("left" if "elastic" in rest else "killed")
    for delivery in deliveries:
        delivery.end(status)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for delivery in deliveries:
        if not delivery.wait(deadline - time.monotonic()):
            say(_left_text(delivery, run))
    # a client that hangs in a thread, or in what it left to do at the exit, must not keep the process
    os._exit(0)


def _left_text(delivery: Delivery, run: RunDir) -> str:
    number = delivery.count_left()
    what = "has not been told how the run ended"
    if number:
        what = f"did not take the last {number:,} point{'s' * (number > 1)}, and {what}"
    why = f" ({delivery.fault})" if delivery.fault else " (it does not answer)"
    return f"{delivery.name} {what}{why}: the records are in {run.path}, and a resume hands over what is missing"


def _separate_output(run: RunDir) -> Any:
    """Send what clients print to a log, and return a function that prints a sentence where stderr was."""
    stderr = os.dup(2)
    with suppress(OSError):
        log = open_own(run.path / "logs" / "tracking.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    erase = "\r\x1b[2K" if os.isatty(stderr) else ""

    def say(text: str) -> None:
        with suppress(OSError):
            os.write(stderr, f"{erase}{message(text)}\n".encode(errors="replace"))

    return say


def _deliveries(run: RunDir, names: Sequence[str], say: Any) -> list[Delivery]:
    states = _states(run)
    spec = run.read_json(SPEC)["spec"]
    subject = Subject(folder=run.path, name=run.name, parameters=_flat(spec))
    lock = threading.Lock()

    def save() -> None:
        with lock, suppress(DureError):  # a disk that is full is the run's trouble already
            run.write_json(STATE, {**states, **{delivery.name: delivery.to_json() for delivery in deliveries}})

    batch = spec.get("global_batch_size", 0)
    deliveries = [
        Delivery(name, subject, _delivered(states.get(name)), global_batch_size=batch, warn=say, save=save)
        for name in names
    ]
    return deliveries


def _states(run: RunDir) -> dict[str, Any]:
    try:
        found = run.read_json(STATE)
    except DureError:
        return {}
    return found if isinstance(found, dict) else {}


def _delivered(found: Any) -> Delivered:
    """Return a state as it was saved; a damaged one means that nothing was delivered."""
    if not isinstance(found, dict):
        return Delivered()
    identity, times = found.get("identity"), found.get("times")
    is_valid = isinstance(times, list) and len(times) == 2 and all(isinstance(each, int | float) for each in times)
    return Delivered(
        identity=identity if isinstance(identity, str) else None,
        times=(float(times[0]), float(times[1])) if is_valid and times else (0.0, 0.0),
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings as texts, those of a table under `table.name`."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return flat


if __name__ == "__main__":
    main(sys.argv[1:])
