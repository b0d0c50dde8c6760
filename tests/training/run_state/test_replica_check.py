"""Interval between comparisons of replicas, and how a difference is found and reported."""

import threading

import pytest
import torch
from torch.optim import SGD

from dure.errors import WorkerFailed
from dure.strategies.contract.replica_state import HasReplicas, ReplicaState, replica_state
from dure.strategies.table import STRATEGIES, load_strategy
from dure.training.fault_injection import flip
from dure.training.run_state.divergence import Divergence, common_parts, find_divergence, minority
from dure.training.run_state.replica_check import MOST_FRACTION, Pace
from tests.conformance.cases import train_case
from tests.conformance.zoo.feature import STEPS, ZooTask


def test_pace_when_comparing_is_dear_then_it_is_rare_but_not_at_once():
    pace = Pace(None)
    every = []
    for _ in range(6):
        pace.note(0.2, 0.01)
        every.append(pace.every)
    assert every == [4, 16, 64, 256, 1024, 2858]
    # cost and steps are measured beside whatever else runs: a third more is still within the bound
    assert 1.33 * 0.2 / (every[-1] * 0.01) < MOST_FRACTION


def test_pace_when_one_comparison_was_slow_then_the_others_decide():
    pace = Pace(None)
    for cost in (0.001, 0.001, 0.001, 9.0, 0.001):
        pace.note(cost, 1.0)
    assert pace.every == 1


def test_pace_when_given_then_it_stays():
    pace = Pace(7)
    pace.note(100.0, 0.001)
    assert pace.every == 7


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ({0: 1, 1: 1, 2: 9}, (2,)),
        ({0: 9, 1: 1, 2: 1}, (0,)),
        ({0: 1, 1: 9}, ()),
        ({0: 1, 1: 1, 2: 9, 3: 9}, ()),
        ({0: 1, 2: 8, 4: 1, 6: 9, 8: 1}, (2, 6)),
        ({0: 1, 1: 2, 2: 3}, ()),
    ],
)
def test_minority_is_who_differs_from_more_than_half(digests, odd):
    assert minority(digests) == odd


def test_parts_when_one_rank_alone_holds_it_then_there_is_nothing_to_compare():
    assert common_parts(["a", "b", None, "a", "c"]) == {"a": [0, 3]}


class Threads:
    """Ranks as threads that gather messages."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks, timeout=30)
        self.said = [None] * num_ranks
        self.messages = 0

    def group(self, rank):
        def gather(message):
            self.barrier.wait()
            self.said[rank] = message
            self.barrier.wait()
            return list(self.said)

        return type("Rank", (), {"all_gather_json": staticmethod(gather)})()


def found_by(states, digests):
    ranks, answers = Threads(len(states)), {}

    def run(rank):
        answers[rank] = find_divergence(ranks.group(rank), states[rank], digests)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answer == answers[0] for answer in answers.values())
    return answers[0]


@pytest.mark.parametrize("element", [0, 1, 4095, 4096, 123_456, 199_999])
def test_element_when_one_bit_differs_then_it_is_found_with_both_values(element):
    tensors = [{"a": torch.ones(3), "b": torch.ones(2, 100_000, dtype=torch.float64)} for _ in range(3)]
    flip(tensors[1]["b"], element, 52)
    states = [ReplicaState(part="all", tensors=one) for one in tensors]
    found = found_by([*states, None], {0: 5, 1: 6, 2: 5})
    assert (found.holders, found.odd, found.tensors) == ((0, 1, 2), (1,), ("b",))
    assert found.element == f"b[{element // 100_000}, {element % 100_000}]"
    assert found.values == {0: "1.0", 1: "0.5", 2: "1.0"}


def test_tensor_when_a_rank_lacks_it_or_has_another_shape_then_that_is_said():
    states = [ReplicaState(part="all", tensors={"a": torch.ones(n)} if n else {}) for n in (2, 3, 0)]
    found = found_by(states, {0: 1, 1: 2, 2: 3})
    assert (found.element, found.odd) == ("a", ())
    assert found.values == {0: "of shape [2]", 1: "of shape [3]", 2: "missing"}


def test_scalar_when_it_differs_then_it_has_no_index():
    states = [ReplicaState(part="all", tensors={"step of w": torch.tensor(value)}) for value in (3.0, 4.0)]
    assert found_by(states, {0: 1, 1: 2}).element == "step of w"


def divergence(odd, values, tensors=("w",)):
    return Divergence(holders=tuple(values), odd=odd, tensors=tensors, element="w[0]", values=values)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            divergence((2,), {0: "1.0", 1: "1.0", 2: "0.5"}),
            "rank 2 holds other values than ranks 0, 1 after step 9: w[0] is 1.0 on ranks 0, 1, 0.5 on rank 2",
        ),
        (
            divergence((), {0: "1.0", 1: "0.5"}, ("w", "x", "y", "z", "q")),
            "ranks 0, 1 hold different values after step 9, and with two it is unknown which are wrong: "
            "w[0] is 1.0 on rank 0, 0.5 on rank 1 (also x, y, z and 1 more)",
        ),
    ],
)
def test_divergence_in_words(found, said):
    assert found.describe(9) == said


def test_strategies_that_hold_replicas_are_those_that_can_be_told_to_compare_them():
    telling = {name for name, info in STRATEGIES.items() if "on_divergence" in info.settings}
    assert telling == {name for name, info in STRATEGIES.items() if "check_replicas_every" in info.settings}
    base = {name for name in STRATEGIES if not isinstance(load_strategy(name), HasReplicas)}
    assert telling - base == telling - {"parameter_server"}  # its workers and servers are classes of their own
    assert base & telling <= {"parameter_server"}


def test_replica_has_parameters_and_the_optimisers_state_under_their_names():
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2).double()).sum().backward()
    optimizer.step()
    state = replica_state("all", model.named_parameters(), optimizer, model)
    assert list(state.tensors) == [
        *("weight", "exp_avg of weight", "exp_avg_sq of weight", "step of weight"),
        *("bias", "exp_avg of bias", "exp_avg_sq of bias", "step of bias"),
    ]


class LeavesOutSpikes(SGD):
    def __init__(self, parameters, task):
        super().__init__(parameters, lr=0.1)
        self.task = task

    def step(self, closure=None):
        if self.task.last < 1.1 * self.task.average:
            super().step()


class SkipsSpikes(ZooTask):
    """Takes no step after a loss that is larger than a running mean of the losses."""

    def __init__(self):
        self.last = self.average = None

    def build_optimizer(self, model):
        return LeavesOutSpikes(model.parameters(), self)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if model.training:
            self.last = float(loss)
            self.average = self.last if self.average is None else 0.8 * self.average + 0.2 * self.last
        return loss


def test_replicas_when_the_step_uses_each_ranks_own_loss_then_that_state_is_named(tmp_path):
    said = r"after step \d+ ranks hold different weights and different values of task\.average, task\.last"
    with pytest.raises(WorkerFailed, match=said) as refused:
        train_case(tmp_path, SkipsSpikes(), "ddp", 2, check_replicas_every=1, **STEPS)
    assert refused.value.exit_code == 2
