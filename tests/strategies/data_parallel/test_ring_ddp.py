"""Own reducer: gradients as views, buckets in reverse order, what is sent and when, parameters that nobody used."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.comm.algorithms.backend import BackendAllReduce
from dure.comm.buckets import FlatGradients
from dure.errors import TaskInvalid
from dure.strategies.contract.abilities import faults_of_model
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.data_parallel.options import RingDDPOptions
from dure.strategies.data_parallel.ring_ddp import BucketReducer
from dure.strategies.table import STRATEGIES, load_strategy
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.conformance.test_failures import Branching
from tests.specs import spec_of

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}


# --- the flat buffer


def layers() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in (3, 5, 2, 4)]


def test_buckets_when_cut_then_hold_the_parameters_from_the_last_to_the_first():
    flat = FlatGradients(layers(), bucket_elements=5, tail_elements=2)
    assert [bucket.positions for bucket in flat.buckets] == [(3, 2), (1,), (0,)]
    assert [bucket.vector.numel() for bucket in flat.buckets] == [6, 5, 5]
    assert [bucket.tail.numel() for bucket in flat.buckets] == [0, 0, 2]


def test_gradients_when_kept_then_backward_begins_over_what_lay_in_the_buffer_and_adds_up_in_it():
    parameters, reached = layers(), []
    flat = FlatGradients(parameters, bucket_elements=100, tail_elements=1)
    flat.buffers[0][:-1].fill_(9.0)
    for position, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(flat.keeper(position, reached))
    for _ in range(2):
        sum((p * p).sum() for p in parameters).backward()
    (buffer,) = flat.buffers
    assert buffer.tolist() == [4.0] * 14 + [0.0]
    assert all(p.grad.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for p in parameters)
    assert len(reached) == 2 * len(parameters)


def test_gradient_when_its_parameter_was_frozen_since_its_forward_then_is_not_kept():
    parameter = nn.Parameter(torch.ones(3))
    reached: list[nn.Parameter] = []
    gradients = FlatGradients([parameter], bucket_elements=1, tail_elements=1)
    parameter.register_post_accumulate_grad_hook(gradients.keeper(0, reached))
    loss = (2 * parameter).sum()
    parameter.requires_grad_(False)
    loss.backward()
    assert (parameter.grad, reached) == (None, [])


def test_gradients_when_of_several_dtypes_then_the_tail_is_in_full_precision_and_last():
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)]
    flat = FlatGradients(parameters, bucket_elements=100, tail_elements=3)
    assert [bucket.vector.dtype for bucket in flat.buckets] == [torch.bfloat16, torch.float32]
    assert flat.tail.dtype == torch.float32
    only_halves = FlatGradients(parameters[:1], bucket_elements=100, tail_elements=3)
    assert [bucket.positions for bucket in only_halves.buckets] == [(0,), ()]
    assert only_halves.tail.dtype == torch.float32


def test_gradients_when_channels_last_then_keep_the_strides_of_their_parameter():
    parameter = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
    flat = FlatGradients([parameter], bucket_elements=100, tail_elements=1)
    assert flat.views[0].stride() == parameter.stride()


# --- the strategy


def strategy_on(group, model, loss=lambda model, rows: model(rows).mean(), **options):
    strategy = load_strategy("ring_ddp")(
        StrategyContext(STRATEGIES["ring_ddp"], group, (torch.device("cpu"),), Precision("fp32", "cpu"),
        spec_of("ring_ddp", comm="ring", **options)),
    )  # fmt: skip
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), loss)
    return strategy


def step(strategy, *batches):
    microbatches = [Microbatch(batch=batch, num_samples=len(batch)) for batch in batches]
    total = sum(map(len, batches)) * strategy.group.world_size
    strategy.forward_backward(microbatches, global_samples=total, requests=Requests())


def chain(width: int = 4, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, dtype=torch.float64) for _ in range(depth)])


def test_buckets_are_sent_while_backward_runs_and_the_last_carries_the_facts():
    def launched(group):
        strategy = strategy_on(group, chain(), message_size=20)
        step(strategy, torch.ones(2, 4, dtype=torch.float64))
        during_backward = strategy.reducer._num_under_way
        strategy.sync_gradients().read()
        counts = (during_backward, len(strategy.gradients.buckets))
        strategy.close()
        return counts

    assert on_ranks(2, launched) == [(2, 3)] * 2


@pytest.mark.parametrize("options", [{"message_size": 20, "delay_allreduce": True}, {}], ids=["delayed", "one bucket"])
def test_nothing_is_sent_before_backward_has_ended_when_asked_or_when_there_is_one_bucket(options):
    def launched(group):
        strategy = strategy_on(group, chain(), **options)
        step(strategy, torch.ones(2, 4, dtype=torch.float64))
        under_way = strategy.reducer._num_under_way, strategy.reducer.algorithm.sent_bytes
        strategy.sync_gradients().read()
        strategy.close()
        return under_way

    assert on_ranks(2, launched) == [(0, 0)] * 2


def test_accumulation_sends_once_and_what_is_sent_is_the_formula():
    def sent(group):
        strategy = strategy_on(group, chain(), message_size=20)
        rows = torch.ones(2, 4, dtype=torch.float64)
        step(strategy, rows, rows, rows)
        strategy.sync_gradients().read()
        counted = strategy.reducer.algorithm.sent_bytes
        formula = strategy.sent_bytes(3)
        strategy.close()
        return counted, formula

    (counted, formula), *others = on_ranks(3, sent)
    elements = 3 * (4 * 4 + 4) + 4 + 6  # weights and biases, facts, and a flag for each parameter
    assert counted == formula
    assert abs(counted - 2 * 2 / 3 * elements * 8) <= 3 * 4 * 8  # each of three buckets is cut in uneven shards
    assert all(count == said for count, said in others)


def test_a_second_gradient_after_its_bucket_was_sent_is_refused_with_the_cure():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = chain(depth=2)
            self.head = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, rows):
            rows = rows.requires_grad_()
            return self.head(checkpoint(self.head, self.body(rows), use_reentrant=True))

    def train(group):
        strategy = strategy_on(group, Twice(), message_size=20)
        try:
            step(strategy, torch.ones(2, 4, dtype=torch.float64))
        except TaskInvalid as error:
            return str(error)
        finally:
            strategy.close()

    assert all("pass --ring-ddp.delay-allreduce" in str(said) for said in on_ranks(2, train))


OPTIONS = [
    {"message_size": 1},
    {"message_size": 20, "delay_allreduce": True},
    {"gradient_average": False},
    {"gradient_predivide_factor": 3.0, "message_size": 20},
    {"gradient_predivide_factor": 2.0, "gradient_average": False},
    {"allreduce_always_fp32": True},
]


ALGORITHMS = ("naive", "star", "halving_doubling", "tree", "hierarchical", "backend")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "comm"), [*(("ring_ddp", name) for name in ALGORITHMS), ("naive_ddp", "hierarchical")]
)
def test_weights_by_any_algorithm_equal_one_process(strategy, comm, trained, tmp_path):
    one = weights_of(trained(Regression(kind="tokens"), **STEPS))
    run = train_case(tmp_path, Regression(kind="tokens"), strategy, 3, comm=comm, microbatch_size=2, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_weights_under_any_of_apex_options_equal_one_process(options, trained, tmp_path):
    one = weights_of(trained(Regression(kind="tokens"), **STEPS))
    run = train_case(
        tmp_path, Regression(kind="tokens"), "ring_ddp", 3, comm="ring", microbatch_size=2, **options, **STEPS
    )
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_ddp", "naive_ddp"])
def test_parameters_that_some_or_all_leave_unused_stay_as_on_one_device(strategy, trained, tmp_path):
    task = Branching(never=True, optimizer="adamw")
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, strategy, 3, comm="ring", **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


def test_sparse_gradients_are_refused_by_the_name_of_their_module():
    model = nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1))
    faults = faults_of_model(load_strategy("ring_ddp"), model, spec_of("ring_ddp", nproc=2))
    assert faults == [
        "0 gives sparse gradients (sparse=True), which have no place in a flat buffer: use ddp or naive_ddp"
    ]


# --- on an accelerator


class Noting(BackendAllReduce):
    """Notes when reductions begin and when they are waited for."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def start(self, vector, op="sum"):
        finish = super().start(vector, op)
        self.notes.append(f"begin {vector.numel()}")
        return lambda: (self.notes.append(f"wait {vector.numel()}"), finish())


@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}, {"allreduce_always_fp32": True}])
def test_buckets_without_a_thread_then_begin_where_they_are_launched_and_end_when_waited_for(options):
    def work(group):
        flat = FlatGradients(
            [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for size in (3, 5, 2)], bucket_elements=4,
            tail_elements=1,
        )  # fmt: skip
        for buffer in flat.buffers:
            buffer.fill_(group.rank + 1.0)
        algorithm = Noting()
        reducer = BucketReducer(algorithm, RingDDPOptions(**options), 2, None, has_thread=False)
        for bucket in flat.buckets:
            reducer.launch(bucket)
        threads = [thread.name for thread in threading.enumerate()]
        begun = list(algorithm.notes)
        reducer.wait()
        reducer.close()
        return begun, algorithm.notes[len(begun) :], [b.unique().tolist() for b in flat.buffers], threads

    for begun, waited, values, threads in on_ranks(2, work):
        assert begun == ["begin 7", "begin 3", "begin 1"]
        assert waited == ["wait 7", "wait 3", "wait 1"]
        assert values == [[1.5], [1.5]]
        assert "dure-reducer" not in threads
