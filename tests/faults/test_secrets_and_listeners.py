"""Secrets in the environment stay out of every record, and nobody outside this host can connect."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands import wait_until
from tests.strangers import listening

CANARY = "c4n4ry-e6b1f0"

pytestmark = pytest.mark.faults

SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    secret = os.environ["AWS_SECRET_ACCESS_KEY"]
    dist.all_reduce(torch.ones(1))
    open(f"ready{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0:
        dist.barrier()
    time.sleep(1000)
"""

FAILING_TASK = """
    import os, torch, dure
    from tests.conformance.tasks import Regression

    class Leaks(Regression):
        def loss(self, model, batch):
            secret = os.environ["AWS_SECRET_ACCESS_KEY"]
            raise ValueError("no luck")
"""


ATTENDED_SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    open(f"ready{dist.get_rank()}", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    dist.new_group()
    dist.barrier()
    dist.destroy_process_group()
"""

ATTENDED_TASK = """
    import os, time
    from tests.conformance.tasks import Regression

    class Waits(Regression):
        def build_optimizer(self, model):
            optimizer = super().build_optimizer(model)
            optimizer.register_step_pre_hook(wait)
            return optimizer

    def wait(*args):
        rank = os.environ["RANK"]
        open(f"ready{rank}", "w").close()
        while rank == "1" and not os.path.exists("go"):  # rank 0 takes the first steps alone before, and may not wait
            time.sleep(0.01)
"""

ATTACK = """
    import base64, os, pickle, time
    from datetime import timedelta
    from pathlib import Path
    from torch.distributed import TCPStore

    class Evil:
        def __reduce__(self):
            return os.mkdir, (trace,)

    trace = "control"
    pickle.loads(pickle.dumps(Evil()))
    trace = "trace"
    payload = pickle.dumps(Evil())
    # to import torch takes longer than the ranks wait
    Path("armed").touch()
    while not Path("ports").exists():
        time.sleep(0.01)
    for port in map(int, Path("ports").read_text().split()):
        if os.fork() == 0:  # where gloo listens, torch's client waits for an answer
            limit = timedelta(seconds=5)
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
            for number, key in enumerate(store.list_keys()):
                store.set(key, base64.b64encode(payload) if number % 2 else payload)
                print(key, flush=True)
            Path("overwritten").touch()
            os._exit(0)
    time.sleep(600)
"""


def start(folder: Path, *words: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "AWS_SECRET_ACCESS_KEY": CANARY, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-m", "dure", *words], cwd=folder, env=environ, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def files_with_secret(folder: Path) -> list[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [str(path) for path in files if CANARY.encode() in path.read_bytes()]


def test_script_when_it_hangs_then_listens_on_loopback_only_and_its_dump_has_no_secret(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    run = start(tmp_path, "run", "--nproc", "2", "--hang-after", "3", "--on-hang", "stop", "script.py")
    wait_until(lambda: (tmp_path / "ready1").exists() and (tmp_path / "ready0").exists(), "both ranks", seconds=60)
    addresses = {address for address, _ in listening(psutil.Process(run.pid))}
    said, _ = run.communicate(timeout=60)
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, addresses
    assert "has finished for" in said
    assert CANARY not in said
    assert files_with_secret(tmp_path / "runs") == []


def test_task_when_it_fails_then_its_records_have_no_secret(tmp_path):
    (tmp_path / "task.py").write_text(textwrap.dedent(FAILING_TASK))
    run = start(tmp_path, "train", "task.py:Leaks", "--nproc", "2", "--strategy", "ddp", "--name", "run")
    said, _ = run.communicate(timeout=60)
    assert (run.returncode, CANARY in said) == (1, False)
    assert "no luck" in json.loads((tmp_path / "runs/run/summary.json").read_text())["message"]
    assert files_with_secret(tmp_path / "runs") == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        (
            "task.py",
            ATTENDED_TASK,
            ("train", "task.py:Waits", "--strategy", "ddp", "--samples", "64", "--hang-after", "5"),
        ),
        ("script.py", ATTENDED_SCRIPT, ("run", "--hang-after", "5", "--on-hang", "stop", "script.py")),
    ],
    ids=["train", "run"],
)
def test_pickle_when_somebody_puts_it_into_the_store_then_nobody_unpickles_it(tmp_path, name, text, words):
    (tmp_path / name).write_text(textwrap.dedent(text))
    attacker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(ATTACK)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_until((tmp_path / "armed").exists, "the attacker")
    verb, *others = words
    run = start(tmp_path, verb, "--nproc", "2", *others)
    try:
        wait_until(lambda: (tmp_path / "ready1").exists() and (tmp_path / "ready0").exists(), "both ranks")
        ports = {str(port) for _, port in listening(psutil.Process(run.pid))}
        (tmp_path / "told").write_text(" ".join(ports))
        (tmp_path / "told").rename(tmp_path / "ports")
        wait_until((tmp_path / "overwritten").exists, "the store's keys to be overwritten")
    finally:
        os.killpg(attacker.pid, signal.SIGKILL)
        written = attacker.communicate()[0]
    for port in ports:
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
            connection.sendall(b"\x80\x04cposix\nmkdir\n(V" + bytes(tmp_path / "trace") + b"\ntR.")
    (tmp_path / "go").touch()
    run.communicate(timeout=60)  # however it ends: what its ranks had said to each other is overwritten
    assert written
    assert (tmp_path / "control").exists()
    assert not (tmp_path / "trace").exists()
