"""Choice of the backend where nobody names one."""

import pytest

from dure.cluster.rank import RankInfo
from dure.process.context import Place
from dure.spec import RunSpec
from dure.training.session import session


@pytest.mark.parametrize(
    ("strategy", "settings", "chosen"),
    [
        ("ddp", {}, "nccl"),
        ("fsdp", {}, "nccl"),
        ("ddp", {"share_devices": True}, "gloo"),
        # what travels of these is in host memory, which NCCL does not move
        ("rpc_model", {}, "gloo"),
        ("parameter_server", {}, "gloo"),
        ("rpc_model", {"backend": "nccl"}, "nccl"),
    ],
)
def test_backend_of_ranks_with_gpus_then_takes_the_tensors_that_they_exchange(strategy, settings, chosen, monkeypatch):
    monkeypatch.setattr(session, "resolve_device", lambda wanted: "cuda")
    spec = RunSpec(task="x.py:X", strategy=strategy, nproc=2, device="cuda", **settings)
    rank = RankInfo(rank=0, local_rank=0, world_size=2, local_world_size=2)
    place = Place(rank=rank, store=None, threads=1, is_supervised=True)
    assert session._backend(spec, place) == chosen
