"""The loss of the first samples, as ranks compare it."""

import pytest
import torch

from dure.errors import DataInvalid
from dure.training.inspection.first_loss import FirstLoss, difference_of_ranks
from dure.training.task.identity import refuse_unlike_samples, sample_views


def first(value, gradient=2.0):
    return FirstLoss(value=value, gradient=gradient, tolerance=1e-9)


@pytest.mark.parametrize(
    "by_rank",
    [
        [],
        [first(1.0)],
        [first(1.0), first(1.0 + 1e-12)],
        [first(1.0), first(None, None), first(1.0)],
        [first(None, None), first(1.0)],
        [first(0.0), first(0.0)],
        [first(1.0, 2.0), first(1.0, 2.0 + 1e-9)],
    ],
)
def test_ranks_with_one_loss_do_not_differ(by_rank):
    assert difference_of_ranks(by_rank) is None


@pytest.mark.parametrize(
    ("by_rank", "figures"),
    [
        ([first(1.0), first(1.5)], "it is 1 on rank 0 and 1.5 on rank 1 for the same samples"),
        ([first(None), first(1.0), first(-1.0)], "it is 1 on rank 1 and -1 on rank 2 for the same samples"),
        (
            [first(1.0, 2.0), first(1.0, 3.0)],
            "the norm of its gradient is 2 on rank 0 and 3 on rank 1 for the same samples",
        ),
    ],
)
def test_ranks_with_other_losses_are_named(by_rank, figures):
    assert difference_of_ranks(by_rank) == figures


def test_samples_that_ranks_have_in_common_are_not_refused():
    one, other = ["a", "rest", [1.0, 2.0]], ["b", "rest", [0.5]]
    refuse_unlike_samples([{"training": {"0": one, "9": other}}, {"training": {"0": one}}, {"training": {}}])


def test_samples_that_hosts_round_otherwise_are_not_refused():
    refuse_unlike_samples(
        [{"training": {"0": ["a", "rest", [1e-9, 2.0]]}}, {"training": {"0": ["b", "rest", [-1e-9, 2.0 + 1e-6]]}}]
    )


@pytest.mark.parametrize("kind", ["training", "evaluation"])
@pytest.mark.parametrize("view", [["c", "rest", [0.6, 2.0]], ["c", "rest", []], ["c", "rest", [0.5]]])
def test_samples_that_differ_are_refused(kind, view):
    by_rank = [
        {kind: {"0": ["a", "rest", []], "9": ["b", "rest", [0.5, 2.0]]}},
        {kind: {"0": ["a", "rest", []], "9": view}},
    ]
    with pytest.raises(DataInvalid, match=f"sample 9 of the {kind} data is another one on rank 1 than on rank 0"):
        refuse_unlike_samples(by_rank)


def test_samples_without_floating_point_numbers_are_compared_as_they_are():
    with pytest.raises(DataInvalid, match="sample 0 of the training data is another one on rank 1"):
        refuse_unlike_samples([{"training": {"0": ["a", "rest", []]}}, {"training": {"0": ["b", "rest", []]}}])


def test_samples_whose_labels_alone_differ_are_refused():
    x = torch.tensor([0.5, 2.0])
    views = [sample_views(1, lambda index, label=label: (x, label)) for label in (1, 2)]
    with pytest.raises(DataInvalid, match="sample 0 of the training data is another one on rank 1"):
        refuse_unlike_samples([{"training": view} for view in views])
