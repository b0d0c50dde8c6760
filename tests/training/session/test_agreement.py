"""Ranks that do not run the same are refused before the first step, with the field and both values."""

import pytest

from dure.comm.groups import Solo
from dure.errors import RanksDisagree
from dure.training.session.session import check_ranks_agree

AGREED = {
    "Python version": "3.11.7",
    "torch version": "2.13.0",
    "task code": "abc",
    "seed": 21,
    "global_batch_size": 64,
    "training samples": 1000,
    "evaluation samples": 100,
    "parameters": [["a", [4, 2], "torch.float32"], ["b", [4], "torch.float32"]],
}


class Three(Solo):
    """A group whose third rank has something else."""

    world_size = 3

    def __init__(self, field, value):
        self.other = {**AGREED, field: value}

    def all_gather_json(self, message):
        return [message, message, self.other]


def refusal(field, value):
    with pytest.raises(RanksDisagree, match="rank 0 and rank 2 do not run the same: ") as caught:
        check_ranks_agree(Three(field, value), AGREED)
    return str(caught.value)


@pytest.mark.parametrize("field", [field for field in AGREED if field != "parameters"])
def test_ranks_when_one_fact_differs_then_it_is_named_with_both_values(field):
    assert f"{field} is {AGREED[field]} on rank 0 and 7 on rank 2; start all ranks with the same code" in refusal(
        field, 7
    )


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ([["a", [4, 3], "torch.float32"], AGREED["parameters"][1]], "['a', [4, 2], 'torch.float32'] on rank 0"),
        ([AGREED["parameters"][0], ["b", [4], "torch.float64"]], "['b', [4], 'torch.float64'] on rank 2"),
        (AGREED["parameters"][::-1], "['a', [4, 2], 'torch.float32'] on rank 0 and ['b', [4], 'torch.float32']"),
        (AGREED["parameters"][:1], "first differing parameter is 2 on rank 0 and 1 on rank 2"),
    ],
    ids=["shape", "dtype", "order", "number"],
)
def test_ranks_when_models_differ_then_the_first_differing_parameter_is_named(parameters, words):
    assert words in refusal("parameters", parameters)


def test_ranks_when_they_agree_then_nothing_is_said():
    check_ranks_agree(Three("seed", 21), AGREED)
