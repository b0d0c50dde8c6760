"""The order of samples: a permutation of each epoch, from seed and epoch alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import SpecInvalid
from dure.training.session.sample_order import SampleOrder

sizes = st.integers(1, 200)
seeds = st.integers(0, 2**63 - 1)


@given(n=sizes, seed=seeds, epoch=st.integers(0, 10**6))
def test_an_epoch_is_a_permutation_from_seed_and_epoch_alone(n, seed, epoch):
    order = SampleOrder(n, 7, seed=seed)
    permutation = order.permutation(epoch)
    assert sorted(permutation.tolist()) == list(range(n))
    assert np.array_equal(permutation, SampleOrder(n, 3, seed=seed).permutation(epoch))


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(SampleOrder(50, 7, seed=s).permutation(e)) for s in (0, 1, 2**62) for e in (0, 1, 2)}
    assert len(orders) == 9


def test_order_never_changes_between_versions():
    """A run that is resumed by a later dure must go on with the same samples."""
    assert SampleOrder(10, 3, seed=21).permutation(4).tolist() == [8, 0, 5, 1, 2, 4, 6, 7, 3, 9]
    assert SampleOrder(10, 3, seed=21, shuffle=False).permutation(4).tolist() == list(range(10))


@given(n=sizes, batch_size=sizes, total=st.integers(1, 900), cut=st.integers(0, 900))
def test_batches_are_the_epochs_in_order_and_go_on_from_any_batch(n, batch_size, total, cut):
    order = SampleOrder(n, batch_size, seed=3)
    batches = list(order.batches(0, total))
    used = np.concatenate([batch.indices for batch in batches])
    epochs = np.concatenate([order.permutation(epoch) for epoch in range(total // n + 1)])
    assert np.array_equal(used, epochs[:total])
    assert batches[-1].samples_seen == total
    assert all(len(batch.indices) <= batch_size for batch in batches)
    assert {len(batch.indices) for batch in batches} == order.batch_sizes(0, total)
    position = batches[cut % len(batches)].samples_seen
    rest = list(order.batches(position, total))
    assert [b.indices.tolist() for b in rest] == [b.indices.tolist() for b in batches[cut % len(batches) + 1 :]]


@given(n=sizes, batch_size=sizes)
def test_dropping_the_last_batch_leaves_whole_ones(n, batch_size):
    if batch_size > n:
        with pytest.raises(SpecInvalid, match=r"--drop-last with .* leaves nothing: use a global batch of at most"):
            SampleOrder(n, batch_size, seed=0, drop_last=True)
        return
    order = SampleOrder(n, batch_size, seed=0, drop_last=True)
    assert order.epoch_samples == n // batch_size * batch_size
    batches = list(order.batches(0, 2 * order.epoch_samples))
    assert {len(batch.indices) for batch in batches} == {batch_size}
    assert [b.epoch for b in batches] == [0] * (len(batches) // 2) + [1] * (len(batches) // 2)
