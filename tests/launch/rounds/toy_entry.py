"""A worker's entry that needs no torch: ranks that end as their job says.

Its arguments are the ranks' deeds, its script the folder for their notes; a module interrupts the launcher early.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from dure.failures.record import failure_to_json
from dure.process.context import Place
from dure.process.heartbeat import Heartbeats
from dure.process.jobs import ScriptJob
from tests.record_cases import failure_of


def before_fork(job: ScriptJob) -> None:
    if job.is_module:
        os.kill(os.getpid(), signal.SIGTERM)


def main(job: ScriptJob, place: Place) -> int:
    rank = place.rank.rank
    heard: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: heard.append(number))
    Path(job.script, f"started-{rank}").write_text(str(os.getpid()))
    is_default = signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
    told = {
        "argv": sys.argv,
        "store": place.store.host,
        "obeys_ctrl_z": is_default and signal.SIGTSTP not in signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    }
    Path(job.script, f"told-{rank}").write_text(json.dumps(told))
    deed = job.arguments[rank]
    if deed.startswith("signal"):
        while len(list(Path(job.script).glob("told-*"))) < place.rank.world_size:
            time.sleep(0.01)
    if deed == "raise":
        raise RuntimeError("planned")
    if deed == "report":
        os.pwrite(place.report_fd, json.dumps(failure_to_json(failure_of(rank, message="told"))).encode(), 0)
        return 1
    if deed == "report nonsense":
        os.pwrite(place.report_fd, b'{"message": "told", "time": [], "rank": -1}', 0)
        return 1
    if deed in ("kill", "train and be killed"):
        if deed != "kill":
            Heartbeats(place.heartbeat_fd, place.rank.world_size).beat(rank, 0)
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "linger":
        time.sleep(1.5)  # longer than ranks get after a failure
        return 0
    if deed == "signal_parent":
        os.kill(os.getppid(), signal.SIGINT)
    if deed in ("signal_parent_twice", "signal_parent_twice_and_wait"):
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(0.1)
    if deed in ("wait", "ignore", "signal_parent", "signal_parent_twice", "signal_parent_twice_and_wait"):
        while not heard or deed in ("ignore", "signal_parent_twice"):
            threading.Event().wait(0.01)
        return 128 + heard[0]
    return int(deed)
