"""Jobs that the tests let Slurm run, and their comparison with an undisturbed run."""

import json
import socket
from pathlib import Path

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--global-batch-size", "8", "--epochs", "3", "--quiet", "--record-samples", "--threads", "1")
SAMPLES = 3 * 97
SLOWLY = ("--task.pause-seconds", "0.1")


def differences(slurm, dure, run, control) -> str:
    """Return where a run parts from the undisturbed one, bit by bit: in steps, samples, losses, weights at the end."""
    done = slurm.run(*dure, "diff", "--json", run, control, cwd=run)
    found = json.loads(done.stdout)
    is_whole = found["steps_of_one"] == [0, 0] and found["has_samples"] and not found["damaged"]
    has_same_end = bool(found["weights"]) and found["weights"][-1]["samples_seen"] == SAMPLES
    return "" if done.returncode == 0 and is_whole and has_same_end else done.stdout + done.stderr


def submitted(slurm, dure, folder, *words, **environment) -> str:
    """Submit a job and return its number."""
    done = slurm.run(*dure, "submit", "--json", "--to", "slurm", *words, cwd=folder, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["said"]


def own_address() -> str:
    """Return an address of this host beside the loopback one: nodes reach each other there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))  # of no host; nothing is sent
        return probe.getsockname()[0]
