"""Findings on the memory of ranks and devices."""

import pytest

from dure.doctor.memory import memory_findings
from dure.records.events import DeviceMemory, MemoryUsed, RankMemory, Training
from tests.specs import spec_of

GIB = 2**30


def of_rank(rank, *peaks, device="cuda:0", total=80 * GIB, **held):
    devices = tuple(DeviceMemory(device=device, peak=int(peak * GIB), total=total) for peak in peaks)
    usual = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "buffers": 0}
    return RankMemory(rank=rank, devices=devices, **{**usual, **held})


def found(*ranks, **settings):
    return [*memory_findings(spec_of(**settings), [MemoryUsed(ranks=ranks)])]


def test_memory_when_it_is_even_and_has_room_then_nothing_is_found():
    assert found(*(of_rank(rank, 40 + rank) for rank in range(4))) == []
    assert found(of_rank(0, 40)) == []
    assert found(of_rank(0), of_rank(1)) == []
    assert [*memory_findings(spec_of(), [])] == []


def test_memory_when_a_device_is_nearly_full_then_it_is_named_with_the_bytes():
    (finding,) = found(of_rank(0, 70), of_rank(1, 75))
    assert finding.id == "near_out_of_memory"
    assert finding.evidence == ("rank 1, cuda:0: at most 75.0 GiB of 80.0 GiB so far",)
    assert "--microbatch-size" in finding.remedy


def test_memory_when_the_ranks_of_a_host_together_nearly_fill_it_then_that_is_told():
    ranks = [of_rank(rank, 4, device="cpu", total=16 * GIB) for rank in range(4)]
    (finding,) = found(*ranks)
    assert finding.evidence == ("all ranks on the host: at most 16.0 GiB of 16.0 GiB so far",)
    assert found(*ranks[:2]) == []


@pytest.mark.parametrize(
    ("ranks", "cause"),
    [
        ((of_rank(0, 30), of_rank(1, 50)), "it keeps something else"),
        ((of_rank(0, 30), of_rank(1, 50, optimizer=20 * GIB)), "it holds 18.0 GiB more of optimiser state"),
        ((of_rank(0, 50, 30, 30),), "the first device of dp has the optimiser"),
    ],
)
def test_memory_when_one_device_has_more_than_the_others_then_the_cause_is_told(ranks, cause):
    (finding,) = found(*ranks)
    assert finding.id == "memory_imbalance"
    assert cause in finding.cause
    assert "has had 50.0 GiB on cuda:0, and others usually 30.0 GiB" in finding.what
    assert "1.0 GiB of parameters" in finding.evidence[0]


def test_memory_of_an_earlier_attempt_then_is_left_out():
    training = Training(
        world_size=1, num_devices=1, device="cuda", epoch_samples=1, total_samples=1, samples_seen=0, step=0
    )
    events = [MemoryUsed(ranks=(of_rank(0, 79.9),)), training]
    assert [*memory_findings(spec_of(), events)] == []
