"""Devices that ranks may have."""

from contextlib import nullcontext

import pytest

from dure.api import external_launcher as under_launcher
from dure.cluster.rank import RankInfo
from dure.errors import SpecInvalid
from dure.host import devices as machine
from dure.host.devices import check_devices, check_each_has_its_own
from dure.spec import RunSpec


@pytest.mark.parametrize(
    ("visible", "is_launched", "is_taken"), [(1, True, True), (1, False, False), (2, True, False), (4, False, True)]
)
def test_one_visible_device_under_a_launcher_is_one_for_each_rank(visible, is_launched, is_taken, monkeypatch):
    monkeypatch.setattr(machine, "count_accelerators", lambda kind: visible)
    said = f"nproc is 4 but {visible} cuda"
    with nullcontext() if is_taken else pytest.raises(SpecInvalid, match=said):
        check_devices("cuda", 4, shared=False, is_launched=is_launched)


def test_ranks_with_the_same_device_are_refused():
    check_each_has_its_own(["GPU-a", "GPU-b", None, None])
    with pytest.raises(SpecInvalid, match="ranks 0, 2 have the same device GPU-a: let the launcher give each"):
        check_each_has_its_own(["GPU-a", "GPU-b", "GPU-a", None])


@pytest.mark.parametrize(
    ("names", "local_rank", "device", "found"),
    [
        (["GPU-a"], 1, "cuda", "GPU-a"),
        (["GPU-a", "GPU-b"], 1, "cuda", "GPU-b"),
        ([], 1, "cuda", None),
        (["GPU-a"], 1, "cpu", None),
    ],
)
def test_a_rank_says_which_gpu_it_has(names, local_rank, device, found, monkeypatch):
    monkeypatch.setattr(under_launcher, "visible_gpus", lambda: names)
    monkeypatch.setattr(under_launcher, "resolve_device", lambda wanted: wanted)
    rank = RankInfo(rank=local_rank, local_rank=local_rank, world_size=2, local_world_size=2)
    spec = RunSpec(task="file.py:T", nproc=2, device=device)
    assert under_launcher._own_gpu(spec, rank) == found
    assert under_launcher._own_gpu(spec.model_copy(update={"nproc": 1}), rank) is None
