"""The algorithm `shm` between processes: gloo's values, the same bits on every rank, the bytes of the formula."""

import hashlib

import pytest
import torch
import torch.distributed as dist

from dure.comm.algorithms import shm
from dure.comm.algorithms.base import REDUCE_OPS
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.algorithms.table import sent_elements
from dure.errors import PeerLost
from tests.comm.gloo_ranks import on_ranks

LARGE = 1_000_007
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]


def reduce_everything(group):
    """Return what was wrong on this rank, and a digest of the bits of all results."""
    algorithm, digest, wrong = open_all_reduce("shm"), hashlib.sha256(), []
    rank, world_size = group.rank, group.world_size
    for size in sorted({0, 1, world_size - 1, world_size + 1, LARGE}):
        for number, (dtype, op) in enumerate((dtype, op) for dtype in DTYPES for op in REDUCE_OPS):
            if size == LARGE and number % 8 != world_size % 8:
                continue  # over the world sizes 1 to 8 all have their turn
            draw = torch.Generator().manual_seed(rank)
            mine = (torch.rand(size, generator=draw) * 2000 - 1000).to(dtype)
            in_common = algorithm.zeros(size + 3, dtype, mine.device)[3:].copy_(mine)
            expected = mine.to(torch.float64, copy=True)
            dist.all_reduce(expected, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM)
            if op == "mean":
                expected = (expected / world_size).trunc() if dtype == torch.int64 else expected / world_size
            before = algorithm.sent_bytes
            algorithm.all_reduce(mine, op)
            sent = algorithm.sent_bytes - before
            formula = sent_elements("shm", size, world_size)[rank] * dtype.itemsize
            # every addition rounds to half a unit in the last place of at most world_size * 1000
            rounding = 0.0 if dtype == torch.int64 else torch.finfo(dtype).eps * world_size * world_size * 1000
            error = (mine.double() - expected).abs().max().item() if size else 0.0
            if error > rounding or not sent == formula == algorithm.sent_bytes_for(size, dtype.itemsize):
                wrong.append((size, dtype, op, error, sent, formula))
            algorithm.all_reduce(in_common, op)
            same_bits = torch.equal(in_common.view(torch.uint8), mine.view(torch.uint8))
            if not same_bits or algorithm.sent_bytes - before != 2 * formula:
                wrong.append((size, dtype, op, "in common memory", algorithm.sent_bytes - before, formula))
            digest.update(mine.view(torch.uint8).numpy().tobytes())
    algorithm.close()
    return wrong, digest.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", range(1, 9))
def test_shm_then_every_rank_has_gloos_values_by_the_same_bits_and_the_formulas_bytes(world_size):
    answers = on_ranks(world_size, reduce_everything, timeout_seconds=60.0)
    assert [wrong for wrong, _ in answers] == [[]] * world_size
    assert len({digest for _, digest in answers}) == 1


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sent_elements_then_each_rank_sends_its_vector_once(world_size):
    assert shm.sent_elements(10, world_size) == [10] * world_size
    assert shm.sent_elements(10, 1) == [0]


def misuse(group):
    algorithm = open_all_reduce("shm")
    with pytest.raises(ValueError, match="cannot be reduced in place"):
        algorithm.all_reduce(torch.ones(2, 2))
    with pytest.raises(ValueError, match="shm reduces CPU tensors only, but the vector is on meta"):
        algorithm.all_reduce(torch.ones(2, device="meta"))
    if group.rank == 1:
        algorithm.close()
        return
    with pytest.raises(PeerLost, match="rank 1 left the group while rank 0 waited"):
        algorithm.all_reduce(torch.ones(2))


def test_shm_when_it_is_misused_then_it_says_how():
    assert on_ranks(2, misuse) == [None, None]
