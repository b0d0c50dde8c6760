"""Samples of each step: a rank's share of a batch, and the steps of a rank that computes none."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.step_facts import Requests
from dure.training.session.sample_order import GlobalBatch, SampleOrder
from dure.training.step_samples import RankBatch, samples_of
from tests.strategies.contract.test_base import prepared


@given(n=st.integers(1, 100), world_size=st.integers(1, 9), microbatch_size=st.one_of(st.none(), st.integers(1, 20)))
def test_ranks_share_a_batch_contiguously_and_meet_in_every_microstep(n, world_size, microbatch_size):
    indices = np.random.default_rng(n).permutation(1000)[:n]
    batch = GlobalBatch(0, indices, n, n)
    shares = [RankBatch.of(batch, rank, world_size, microbatch_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate([share.indices for share in shares]), indices)
    assert len({len(share.microbatches) for share in shares}) == 1
    for share in shares:
        assert sum(share.microbatches) == len(share.indices)
        assert max(share.microbatches) <= (microbatch_size or n)
    assert all(shares[0].microbatches)  # rank 0, whose BatchNorm is kept, never computes a stand-in


def test_steps_of_a_rank_without_samples_then_none_is_fetched_and_all_are_served():
    served = []
    strategy = prepared(lambda model, batch: model(batch).mean())
    strategy.take_share(DataShare(index=0, count=2, takes_samples=False, leads=False))
    strategy.serve_step = served.append
    samples = samples_of(strategy, loader=None, order=SampleOrder(5, 2, seed=0), microbatch_size=1)
    samples.begin(2, 9, step=1)
    seen = []
    while (step := samples.next_step()) is not None:
        samples.compute(step, Requests(save=True))
        assert samples.microbatch_under_way() is None
        seen.append((step.batch.epoch, step.batch.samples_seen, len(step.share.indices), list(step.share.microbatches)))
    assert seen == [(0, 4, 0, []), (0, 5, 0, []), (1, 7, 0, []), (1, 9, 0, [])]
    assert served == [Requests(save=True)] * 4
    assert samples.wait_seconds == 0
