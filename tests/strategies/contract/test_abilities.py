"""Abilities that only some strategies have, and a rank's share of batches."""

import pytest
import torch

from dure.comm.groups import Solo
from dure.errors import TaskInvalid
from dure.strategies.contract import abilities
from dure.strategies.contract.batch_parts import BatchParts, DataShare
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.replica_state import HasReplicas, replica_of
from dure.strategies.contract.watch.parameter_watch import Freezing
from dure.strategies.parameter_server.async_worker import AsyncWorker
from dure.strategies.single import Single
from dure.strategies.table import STRATEGIES, load_strategy
from tests.specs import spec_of


@pytest.mark.parametrize(
    ("ability", "names"),
    [
        (abilities.HasRoles, {"parameter_server"}),
        (abilities.ImportsLate, {"zero1", "fsdp", "tensor_parallel", "rpc_model"}),
        (
            abilities.ChecksModel,
            {"ring_ddp", "fsdp", "tensor_parallel", "model_parallel", "pipeline", "rpc_model", "parameter_server"},
        ),
        (
            abilities.ChecksOptimizer,
            {"zero1", "fsdp", "tensor_parallel", "pipeline", "rpc_model", "parameter_server"},
        ),
        (
            HasReplicas,
            {"ddp", "ring_ddp", "naive_ddp", "zero1", "averaging", "diloco", "fsdp", "tensor_parallel", "pipeline"},
        ),
        (abilities.OutlivesRanks, set()),
        (abilities.GathersState, set()),
    ],
)
def test_ability_when_classes_of_the_table_are_asked_then_these_have_it(ability, names):
    assert {name for name in STRATEGIES if isinstance(load_strategy(name), ability)} == names


def test_checks_when_a_strategy_has_them_then_its_row_says_that_it_is_asked():
    asked = {name for name, info in STRATEGIES.items() if info.checks_model}
    checking = (abilities.ChecksModel, abilities.ChecksOptimizer)
    assert {name for name in STRATEGIES if isinstance(load_strategy(name), checking)} == asked


def test_worker_at_its_own_pace_outlives_ranks_and_gathers_its_state():
    assert isinstance(AsyncWorker, abilities.OutlivesRanks)
    assert isinstance(AsyncWorker, abilities.GathersState)


def test_questions_when_a_strategy_has_none_of_the_abilities_then_there_is_an_answer():
    cpu = torch.device("cpu")
    spec = spec_of("single")
    strategy = Single(StrategyContext(STRATEGIES["single"], Solo(), (cpu,), Precision("fp32", "cpu"), spec))
    model = torch.nn.Linear(2, 1)
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), lambda m, batch: m(batch).mean())
    assert abilities.role_of(Single, Solo(), spec) is Single
    assert abilities.faults_of_model(Single, model, spec) == []
    assert abilities.faults_of_optimizer(Single, strategy.optimizer) == []
    assert replica_of(strategy) is None
    assert abilities.share_by_step(strategy)(7) == (0, 1)
    assert abilities.lost_shares(strategy) == []
    assert abilities.own_state(strategy).model.keys() == model.state_dict().keys()
    model.bias.requires_grad_(False)
    assert abilities.steady_names(strategy) == {"weight"}


def test_share_when_batches_are_evaluated_then_each_is_counted_once():
    shares = [DataShare(index=index, count=3) for index in range(3)]
    assert [share.evaluated(5) for share in shares] == [[0, 3], [1, 4], [2]]
    assert [share.num_counted(5) for share in shares] == [2, 2, 1]


def test_share_when_all_ranks_take_part_in_each_forward_pass_then_all_make_as_many():
    last = DataShare(index=2, count=3, leads=False, is_joint=True)
    assert last.evaluated(5) == [2, 0]
    assert last.num_counted(5) == 0
    assert DataShare(index=0, count=3, takes_samples=False).evaluated(5) == []


@pytest.mark.parametrize(
    ("size", "parts"), [(None, [4, 3, 3]), (2, [2, 2, 2, 1, 2, 1]), (3, [2, 2, 2, 1, 2, 1]), (8, [4, 3, 3])]
)
def test_parts_when_a_batch_is_divided_then_every_share_has_as_many_microbatches(size, parts):
    of_batch = BatchParts(spec_of("ddp", microbatch_size=size, global_batch_size=10), 3)
    assert of_batch.of(10) == parts
    assert of_batch.calls_per_step() == len(parts) // 3


@pytest.mark.parametrize("name", [name for name in STRATEGIES if load_strategy(name).rules.freezing == "refused"])
def test_strategy_when_its_rule_refuses_freezing_then_it_does_whatever_it_inherits(name: str) -> None:
    strategy = object.__new__(load_strategy(name))
    strategy.info = STRATEGIES[name]
    with pytest.raises(TaskInvalid, match=r"the task unfroze a\.weight during the run"):
        strategy.follow_freezing(Freezing(frozen=[], unfrozen=["a.weight"]))
    with pytest.raises(TaskInvalid, match=r"the task froze a\.weight during the run"):
        strategy.follow_freezing(Freezing(frozen=["a.weight"], unfrozen=[]))
