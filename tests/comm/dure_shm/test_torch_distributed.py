"""torch's own `DistributedTest` on the backend `dure_shm`, in gloo's place: what passes there passes here."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("torch_distributed_cases.py")

NOT_HERE = {
    "test_SyncBatchNorm_process_group": "needs a torchvision that fits torch",
    "test_all_to_all_cuda": "needs GPUs",
    "test_all_to_all_cuda_complex": "needs GPUs",
    "test_all_to_all_full_group_cuda": "needs GPUs",
    "test_barrier_timeout_global": "makes a second group, of gloo, at an address that the launcher gives",
    "test_batch_isend_irecv_mixed_backend_err": "needs NCCL",
    "test_batch_isend_irecv_op_err": "needs GPUs",
    "test_new_subgroups_with_group_param": "needs three ranks",
}
"""Cases that fail under gloo too, on a machine without GPUs or on a pair of ranks (seen with torch 2.13)."""

DIFFER = {
    "test_get_backend": "asks for gloo's name",
    "test_monitored_barrier_gloo": "up to 2.13 torch refuses monitored_barrier for all backends but gloo",
    "test_monitored_barrier_gloo_subgroup": "up to 2.13 torch refuses monitored_barrier for all backends but gloo",
}
"""Cases that the backend does not pass, and why."""


@pytest.mark.slow
def test_torchs_own_cases_on_two_ranks_then_all_but_those_said_here_pass(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CASES), str(rank), port],
            cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        came = [json.loads(rank.communicate(timeout=110)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    worst = {name: max((of_rank[name] for of_rank in came), key=_badness) for name in came[0]}
    failed = {name: what for name, what in worst.items() if what not in ("passes", "skips")}
    unexpected = failed.keys() - NOT_HERE.keys() - DIFFER.keys()
    assert not unexpected, {name: failed[name] for name in unexpected}
    assert Counter(worst.values())["passes"] >= 90


def _badness(what: str) -> int:
    return {"skips": 0, "passes": 1}.get(what, 2)
