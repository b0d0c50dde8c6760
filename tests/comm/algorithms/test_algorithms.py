import subprocess
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist

from dure.comm.algorithms import segments
from dure.comm.algorithms.base import REDUCE_OPS
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.algorithms.over_wire import AllReduceOverWire
from dure.comm.algorithms.table import ALGORITHMS, find_algorithm, sent_elements
from dure.comm.algorithms.thread_wire import on_threads
from dure.comm.algorithms.trace import trace
from dure.errors import PeerLost, SpecInvalid
from tests.comm.algorithms.all_reduce_cases import (
    DTYPES,
    LARGE,
    OVER_SOCKETS,
    OVER_WIRE,
    Case,
    all_large_cases,
    digest,
    faults,
    hosts_of,
    large_cases,
    run_cases,
    small_cases,
    small_sizes,
)
from tests.comm.gloo_ranks import on_ranks

WORLD_SIZES = range(1, 9)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_algorithm_over_gloo_sends_its_formula_and_agrees_with_torch(world_size):
    stride = 1 if world_size < 3 else 2 if world_size < 5 else 7  # many processes on few cores take long
    cases = [*small_cases(world_size)[world_size % stride :: stride], *large_cases(world_size)]
    answers = on_ranks(world_size, lambda group: run_cases(cases, group.rank, world_size))
    assert faults(answers) == []


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 4])
def test_every_algorithm_with_every_size_dtype_and_op_over_gloo(world_size):
    cases = [*small_cases(world_size), *all_large_cases()]
    answers = on_ranks(world_size, lambda group: run_cases(cases, group.rank, world_size))
    assert faults(answers) == []


def test_large_cases_over_all_world_sizes_are_every_dtype_and_op_of_every_algorithm():
    met = {case for world_size in WORLD_SIZES for case in large_cases(world_size)}
    assert met == set(all_large_cases())


def reduce_on_threads(name, world_size, make, op, hosts=None):
    """Return the vectors after an all-reduce between threads, and what each sent."""
    vectors = [make(rank) for rank in range(world_size)]

    def work(wire):
        AllReduceOverWire(name, wire).all_reduce(vectors[wire.rank], op)
        return wire.sent_bytes

    return vectors, on_threads(world_size, work, hosts=hosts)


@pytest.mark.parametrize("name", OVER_WIRE)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_size_dtype_and_op_between_threads_is_exact_and_sends_the_formula(name, world_size):
    check_exactly(name, world_size, [Case(name, *v) for v in product(small_sizes(world_size), DTYPES, REDUCE_OPS)])


@pytest.mark.parametrize("name", OVER_WIRE)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_algorithm_in_many_segments_is_exact_and_waits_for_what_it_uses(name, world_size, monkeypatch):
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 16)  # 37 elements are up to 19 segments, more than a window
    kinds = [(torch.float32, "sum"), (torch.int64, "mean"), (torch.bfloat16, "max")]
    check_exactly(name, world_size, [Case(name, 37, *kind) for kind in kinds])


def check_exactly(name, world_size, cases):
    """Reduce small whole numbers, whose sums are exact in every dtype, one case after the other on the same threads."""
    hosts = hosts_of(world_size)
    sizes = {case.num_elements for case in cases}
    numbers = {size: torch.arange(size * world_size).view(world_size, size) % 13 - 6 for size in sizes}

    def work(wire):
        algorithm, answers = AllReduceOverWire(name, wire), []
        for case in cases:
            vector = numbers[case.num_elements][wire.rank].to(case.dtype, copy=True)
            before = algorithm.sent_bytes
            algorithm.all_reduce(vector, case.op)
            answers.append((vector, algorithm.sent_bytes - before))
        return answers

    for case, by_rank in zip(cases, zip(*on_threads(world_size, work, hosts=hosts), strict=True), strict=True):
        before = numbers[case.num_elements]
        expected = (before.amax(0) if case.op == "max" else before.sum(0)).to(case.dtype)
        if case.op == "mean":
            expected = expected.div(world_size, rounding_mode="trunc" if case.dtype == torch.int64 else None)
        assert all(torch.equal(vector, expected) for vector, _ in by_rank), case
        formula = sent_elements(name, case.num_elements, world_size, hosts=hosts)
        assert [sent for _, sent in by_rank] == [count * case.dtype.itemsize for count in formula], case


@pytest.mark.parametrize("hosts", [None, [0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [7, 7, 3, 3, 7]], ids=str)
def test_hierarchical_on_any_hosts_reduces_and_sends_its_formula(hosts):
    vectors, sent_bytes = reduce_on_threads("hierarchical", 5, lambda rank: torch.arange(11.0) + rank, "sum", hosts)
    assert all(torch.equal(vector, 5 * torch.arange(11.0) + 10) for vector in vectors)
    assert sent_bytes == [4 * count for count in sent_elements("hierarchical", 11, 5, hosts=hosts)]


def test_hierarchical_on_two_hosts_sends_between_them_what_two_ranks_would():
    hosts = [0, 0, 0, 1, 1, 1]
    crossing = [
        m for m in trace("hierarchical", 6, 12, hosts=hosts).messages if hosts[m.source] != hosts[m.destination]
    ]
    assert sum(message.num_elements for message in crossing) == sum(sent_elements("ring", 12, 2)) == 24


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("num_elements", [0, 1, 840, LARGE])
def test_formulas_are_the_ones_that_the_table_prints(world_size, num_elements):
    n, p = num_elements, world_size
    sent = {name: sent_elements(name, n, p) for name in OVER_SOCKETS}
    assert {sum(sent[name]) for name in OVER_SOCKETS if name != "naive"} == {2 * n * (p - 1)}
    assert sent["naive"] == [n * (p - 1)] * p
    assert sent["star"] == [n * (p - 1)] + [n] * (p - 1)
    assert max(sent["tree"]) == n * min(p - 1, 3 if p > 4 else 2)
    assert max(abs(count - 2 * n * (p - 1) / p) for count in sent["ring"]) < 2
    power = 1 << p.bit_length() - 1
    largest = 2 * n * (power - 1) / power + n * (p > power)
    assert abs(max(sent["halving_doubling"]) - largest) <= p.bit_length()


def test_mean_of_whole_numbers_is_cut_off_towards_zero():
    for name in OVER_WIRE:
        vectors, _ = reduce_on_threads(name, 3, lambda rank: torch.tensor([-rank, rank, 5]), "mean", [0, 0, 1])
        assert [vector.tolist() for vector in vectors] == [[-1, 1, 5]] * 3
    vectors, _ = reduce_on_threads("ring", 2, lambda rank: torch.tensor([-1 * rank, 1 * rank]), "mean")
    assert vectors[0].tolist() == [0, 0]


def test_sum_of_halves_is_rounded_after_every_addition():
    vectors, _ = reduce_on_threads(
        "naive", 3, lambda rank: torch.tensor([2048.0, 1.0, 1.0])[rank].half().view(1), "sum"
    )
    assert [vector.item() for vector in vectors] == [2048.0] * 3


@pytest.mark.parametrize("name", OVER_WIRE)
def test_maximum_with_a_nan_on_one_rank_is_nan_on_all(name):
    vectors, _ = reduce_on_threads(name, 4, lambda rank: torch.tensor([float("nan") if rank == 2 else 1.0, 2.0]), "max")
    assert all(vector.isnan().tolist() == [True, False] for vector in vectors)


def test_all_reduce_of_a_parameter_changes_it_in_place():
    vectors, _ = reduce_on_threads("ring", 2, lambda rank: torch.nn.Parameter(torch.ones(3)), "sum")
    assert [vector.tolist() for vector in vectors] == [[2.0] * 3] * 2


@pytest.mark.parametrize("name", ["ring", "backend"])
def test_all_reduce_of_what_is_no_vector_is_refused(name):
    answers = on_ranks(1, lambda group: [refusal(name, tensor) for tensor in (torch.ones(2, 2), torch.ones(4)[::2])])
    assert answers == [["a tensor of shape (2, 2)", "a tensor of shape (2,)"]]


def refusal(name, tensor):
    with pytest.raises(ValueError, match="takes a contiguous vector") as caught:
        open_all_reduce(name).all_reduce(tensor)
    return str(caught.value).partition(" and")[0]


def test_all_reduce_with_an_unknown_op_names_the_known_ones():
    with pytest.raises(ValueError, match="no op 'avg': all_reduce knows sum, mean, max"):
        reduce_on_threads("ring", 2, lambda rank: torch.ones(2), "avg")


def test_unknown_algorithm_when_asked_for_then_the_known_ones_are_named():
    with pytest.raises(SpecInvalid, match="no all-reduce algorithm 'rings': choose one of naive, star, ring"):
        find_algorithm("rings")


def subgroups(group):
    group_of_two = dist.new_group([2, 1])
    if group.rank == 0:
        with pytest.raises(ValueError, match="not in the process group"):
            open_all_reduce("ring", group_of_two)
        return None
    vector = torch.full((5,), float(group.rank))
    algorithm = open_all_reduce("ring", group_of_two)
    algorithm.all_reduce(vector)
    algorithm.close()
    return vector.tolist(), algorithm.sent_bytes, algorithm.sent_bytes_for(5, 4)


def test_all_reduce_in_a_group_of_some_ranks_is_theirs_alone():
    assert on_ranks(3, subgroups) == [None, ([3.0] * 5, 20, 20), ([3.0] * 5, 20, 20)]


def test_rank_that_fails_when_others_wait_for_it_then_they_are_told():
    def work(wire):
        if wire.rank == 1:
            raise KeyError("the cause")
        with pytest.raises(PeerLost, match="rank 1 ended while rank 0 waited"):
            AllReduceOverWire("star", wire).all_reduce(torch.ones(3))

    with pytest.raises(KeyError, match="the cause"):
        on_threads(2, work)


def every_row(group):
    answers = []
    for name in ALGORITHMS:
        algorithm = open_all_reduce(name)
        vector = torch.arange(10.0) + group.rank
        algorithm.all_reduce(vector, "mean")
        answers.append((vector.tolist(), algorithm.sent_bytes == algorithm.sent_bytes_for(10, 4)))
        assert (algorithm.name, algorithm.rank, algorithm.world_size) == (name, group.rank, 2)
        algorithm.close()
    return answers


def test_every_row_of_the_table_opens_reduces_and_counts_what_its_formula_says():
    expected = [([0.5 + i for i in range(10)], True)] * len(ALGORITHMS)
    assert on_ranks(2, every_row) == [expected] * 2


def test_trace_of_a_ring_is_the_textbooks():
    seen = trace("ring", 3, 3)
    assert [(m.phase, m.step, m.source, m.destination, m.start, m.values) for m in seen.messages[:6]] == [
        ("scatter-reduce", 0, 0, 1, 0, (10.0,)),
        ("scatter-reduce", 0, 1, 2, 1, (21.0,)),
        ("scatter-reduce", 0, 2, 0, 2, (32.0,)),
        ("scatter-reduce", 1, 0, 1, 2, (44.0,)),
        ("scatter-reduce", 1, 1, 2, 0, (30.0,)),
        ("scatter-reduce", 1, 2, 0, 1, (52.0,)),
    ]
    assert seen.result == (60.0, 63.0, 66.0)
    assert seen.sent_bytes == (16, 16, 16)


@pytest.mark.parametrize("name", OVER_WIRE)
def test_trace_of_any_algorithm_has_the_phases_of_the_table_in_order_and_all_bytes(name):
    seen = trace(name, 6, 25, op="mean", hosts=[0, 0, 0, 1, 1, 2])
    phases = list(dict.fromkeys(message.phase for message in seen.messages))
    assert phases == list(ALGORITHMS[name].phases)
    assert sum(message.num_bytes for message in seen.messages) == sum(seen.sent_bytes)
    assert seen.result == tuple(35.0 + i for i in range(25))


def test_trace_of_what_sends_no_messages_of_its_own_is_refused():
    with pytest.raises(SpecInvalid, match="the messages of 'backend' cannot be shown"):
        trace("backend", 2, 4)


def test_table_when_imported_then_torch_is_not_loaded():
    code = "import sys, dure.comm.algorithms.table as a; a.ALGORITHMS['ring'].to_json(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_digest_tells_bits_apart_that_compare_equal():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
