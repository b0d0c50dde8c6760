"""What the environment keeps secret stays out of every record, and nobody outside this host can connect."""

import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.commands import wait_until

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


def listening(pids: set[int]) -> list[str]:
    """Return the addresses on which processes listen, as the kernel lists them."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if (target := os.readlink(descriptor)).startswith("socket:"):
                inodes.add(target[8:-1])
    found = []
    for table, size in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                raw = b"".join(struct.pack(">I", struct.unpack_from("<I", words, at)[0]) for at in range(0, size, 4))
                found.append(socket.inet_ntop(socket.AF_INET if size == 4 else socket.AF_INET6, raw))
    return found


def test_script_when_it_hangs_then_listens_on_loopback_only_and_its_dump_has_no_secret(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    run = start(tmp_path, "run", "--nproc", "2", "--hang-after", "3", "--on-hang", "stop", "script.py")
    wait_until(lambda: (tmp_path / "ready1").exists() and (tmp_path / "ready0").exists(), "both ranks", seconds=60)
    process = psutil.Process(run.pid)
    addresses = listening({run.pid, *(child.pid for child in process.children(recursive=True))})
    said, _ = run.communicate(timeout=60)
    assert addresses
    assert set(addresses) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, addresses
    assert "no step has finished" in said
    assert CANARY not in said
    assert files_with_secret(tmp_path / "runs") == []


def test_task_when_it_fails_then_its_records_have_no_secret(tmp_path):
    (tmp_path / "task.py").write_text(textwrap.dedent(FAILING_TASK))
    run = start(tmp_path, "train", "task.py:Leaks", "--nproc", "2", "--strategy", "ddp", "--name", "run")
    said, _ = run.communicate(timeout=60)
    assert (run.returncode, CANARY in said) == (1, False)
    assert "no luck" in json.loads((tmp_path / "runs/run/summary.json").read_text())["message"]
    assert files_with_secret(tmp_path / "runs") == []
