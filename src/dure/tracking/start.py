"""Start and end of the process that hands a run over, from the process that launches the run."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dure.errors import Interrupted
from dure.records.run_dir import RunDir
from dure.terminal import print_status
from dure.tracking.follower import PATIENCE_SECONDS

_MORE_SECONDS = 5.0
"""Seconds beyond its patience after which a follower counts as stuck."""
_OWN_FOLDER = str(Path(__file__).parents[2])
"""Folder from which this process has imported dure; with `-P` the follower would not look into the current one."""


@contextmanager
def followed(run: RunDir, names: Sequence[str], *, is_elastic: bool = False) -> Iterator[None]:
    """Hand a run's records over while the block runs, and its end when the block ends.

    Training is never waited for and never made to wait: it is another process that only reads files.

    Args:
        run: Run with its spec on disk.
        names: Names of the trackers; none starts nothing.
        is_elastic: Whether another host may go on with the run if this one is lost.
    """
    if not names:
        yield
        return
    arguments = [str(run.path.resolve()), ",".join(names), *(["elastic"] if is_elastic else [])]
    # neither Ctrl-C nor the closing of the terminal ends it before it has said how the run ended
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", "dure.tracking.follower", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _OWN_FOLDER]))},
    )
    try:
        yield
    except BaseException as error:
        _end(follower, "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed")
        raise
    _end(follower, "completed")


def _end(follower: "subprocess.Popen[str]", status: str) -> None:
    try:
        with suppress(OSError):  # it has died: its code says so
            follower.communicate(f"{status}\n", timeout=PATIENCE_SECONDS + _MORE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if follower.poll() is None:
            follower.kill()
            follower.wait()
    if follower.returncode:
        print_status(
            f"the process that hands the run over to its trackers ended early (exit code {follower.returncode}): "
            "logs/tracking.log in the run folder has what it wrote; the records are complete"
        )
