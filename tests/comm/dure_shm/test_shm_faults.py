"""The backend `dure_shm` when calls go wrong: wrong arguments, calls that break off, ranks that do not come."""

import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dure.errors import PeerLost, RanksDisagree
from tests.comm.dure_shm.broken_calls import play, random_script, wrong_values
from tests.comm.gloo_ranks import on_ranks

LATE = timedelta(seconds=0.1)


def shm_group(timeout=None):
    """Make a group, which takes its time, and let its calls take less."""
    group = dist.new_group(backend="cpu:dure_shm", timeout=timedelta(seconds=20))
    if timeout is not None:
        group.set_timeout(timeout)
    return group


def numbers(value, size=1, dtype=torch.float32):
    return torch.full((size,), value).to(dtype)


def caught(call):
    """Return what a call raises, by type and words, or what it returns."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# -- calls that break off


class TooLate(Exception):
    """Raised by a signal handler."""


def raise_too_late(*_):
    raise TooLate("too late")


def interrupt_one_call(group):
    """Let a signal handler raise while rank 0 waits for rank 1, and go on as if nothing had been."""
    ours, sums = shm_group(), []
    if group.rank == 0:
        signal.signal(signal.SIGALRM, raise_too_late)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        time.sleep(0.2)
    for base in (0, 1000):
        number = numbers(base + group.rank + 1.0)
        sums.append(caught(lambda number=number: dist.all_reduce(number, group=ours) or number.item()))
    sums.append(
        caught(lambda: dist.gather(numbers(1.0), [*torch.zeros(2, 1)] if group.rank == 0 else None, group=ours))
    )
    sums.append(caught(lambda: dist.send(numbers(1.0), 1 - group.rank, group=ours)))
    return sums


def test_call_when_a_signal_handler_leaves_it_then_the_group_ends_and_no_value_is_another_calls():
    interrupted, other = on_ranks(2, interrupt_one_call)
    assert interrupted[0] == "TooLate: too late"
    first_failure = "an earlier call of this group failed, so none can follow: it broke off with TooLate (too late)"
    assert [later for later in interrupted[1:] if first_failure not in later] == []
    # rank 0 had told its 1 before; it may not be 1001
    assert other[0] == 3.0
    assert "rank 0 gave up after an error" in other[1]


def come_too_late(group):
    ours = shm_group(LATE)
    if group.rank == 1:
        time.sleep(0.3)
        number = numbers(20.0)
        return caught(lambda: dist.all_reduce(number, group=ours) or number.item())
    with pytest.raises(PeerLost, match=r"rank 1 did not come within 0\.1 s"):
        dist.all_reduce(numbers(1.0), group=ours)
    with pytest.raises(PeerLost, match="an earlier call of this group failed"):
        dist.all_reduce(numbers(1000.0), group=ours)
    return None


def test_call_when_it_timed_out_then_a_late_rank_gets_no_value_of_a_later_call():
    # what rank 0 gave in the call that belongs to this one; 1020 would be of its next
    assert on_ranks(2, come_too_late)[1] in (21.0, "PeerLost: rank 0 gave up after an error")


def call_in_handler(group):
    """Let a signal handler make a call in the middle of another one of the same group."""
    ours = shm_group()
    if group.rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: dist.barrier(group=ours))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        time.sleep(0.2)
    return caught(lambda: dist.all_reduce(numbers(1.0), group=ours))


def test_call_when_a_signal_handler_makes_it_inside_of_another_then_it_is_refused():
    assert "another call was under way in the same thread" in on_ranks(2, call_in_handler)[0]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_random_calls_when_some_go_wrong_then_no_value_is_of_calls_that_do_not_belong_together(num_ranks):
    scripts = [random_script(seed, num_ranks) for seed in range(16)]

    def work(group):
        answers = []
        for script in scripts:
            ours = shm_group(LATE)
            answers.append(play(script, ours))
            group.barrier()
            dist.destroy_process_group(ours)
        return answers

    by_rank = on_ranks(num_ranks, work, timeout_seconds=60.0)
    by_script = list(zip(*by_rank, strict=True))
    wrong = [
        fault for script, answers in zip(scripts, by_script, strict=True) for fault in wrong_values(script, answers)
    ]
    assert wrong == []
    outcomes = [one for answers in by_script for answer in answers for one in answer]
    # else nothing was tried
    assert sum(one.get("value") is not None for one in outcomes) > 40
    assert sum(one.get("error") is not None for one in outcomes) > 40
    assert any("Interruption" in (one.get("error") or "") for one in outcomes)


def play_on_both(group):
    """Play scripts in which calls are refused on all ranks, by shared memory and by gloo."""
    both = []
    for backend in ("cpu:dure_shm", "gloo"):
        ours = dist.new_group(backend=backend, timeout=timedelta(seconds=20))
        scripts = [
            [call for call in random_script(seed, 2, 20) if call.fault in ("", "wrong everywhere")]
            for seed in range(110, 115)
        ]
        answers = [one for script in scripts for one in play(script, ours)]
        kinds = [call.kind for script in scripts for call in script]
        # where a reduction goes to another rank, gloo leaves some of its sums
        is_root = group.rank == 0
        both.append([one["value"] for kind, one in zip(kinds, answers, strict=True) if is_root or kind != "reduce"])
    return both


def test_random_calls_when_all_ranks_are_refused_some_then_the_others_bring_what_gloo_does():
    for ours, gloos in on_ranks(2, play_on_both):
        assert ours == gloos
        assert None in ours
        assert len(ours) > 40


# -- wrong arguments


def gather_single(output, own, group):
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, own, group=group)


def scatter_single(output, long, group, op=dist.ReduceOp.SUM):
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, long, op, group=group)


def swap(output, own, outputs=None, inputs=None):
    return lambda rank, group: dist.all_to_all_single(output, own, outputs, inputs, group=group)


def zeros(*sizes):
    return [torch.zeros(size) for size in sizes]


both = torch.zeros(1)
LISTS = "got a list of {} {} tensors in a group of 2 ranks"
FITS = "got a tensor of {} elements of {} where one of {} elements of {} fits"
SHARED = "would overwrite share memory"
STRIDES = "has several elements in one place"
RANGE = r"names rank {} of a group of 2: the ranks are 0 to 1"
ON_FIRST = "on rank 0 alone"
WRONG = {
    "all_gather, a longer list": (
        lambda rank, group: dist.all_gather(zeros(1, 1, 1), torch.zeros(1), group=group), LISTS.format(3, "output")),
    "all_gather, a shorter list": (
        lambda rank, group: dist.all_gather(zeros(1), torch.zeros(1), group=group), LISTS.format(1, "output")),
    "all_gather, no list": (
        lambda rank, group: dist.all_gather([], torch.zeros(1), group=group), LISTS.format(0, "output")),
    "all_gather, sizes": (
        lambda rank, group: dist.all_gather(zeros(1, 2), torch.zeros(1), group=group),
        FITS.format(2, "float32", 1, "float32")),
    "all_gather, dtypes": (
        lambda rank, group: group.allgather([[numbers(0, dtype=torch.int32)] * 2], [torch.zeros(1)]),
        FITS.format(1, "int32", 1, "float32")),
    "all_gather, one output twice": (
        lambda rank, group: dist.all_gather([both, both], torch.zeros(1), group=group), SHARED),
    "all_gather, outputs that overlap": (
        lambda rank, group: dist.all_gather([*torch.zeros(3).unfold(0, 2, 1)], torch.zeros(2), group=group), SHARED),
    "all_gather, expanded": (
        lambda rank, group: dist.all_gather([torch.zeros(1).expand(3)] * 2, torch.zeros(3), group=group), STRIDES),
    "all_gather, fewer lists": (
        lambda rank, group: group.allgather([zeros(1, 1)], zeros(1, 1)), "1 outputs for 2 inputs"),
    "all_gather_single, longer": (
        lambda rank, group: gather_single(torch.zeros(3), torch.zeros(1), group),
        FITS.format(3, "float32", 2, "float32")),
    "all_gather_single, shorter": (
        lambda rank, group: gather_single(torch.zeros(1), torch.zeros(1), group),
        FITS.format(1, "float32", 2, "float32")),
    "all_gather_single, expanded": (
        lambda rank, group: gather_single(torch.zeros(1).expand(2), torch.zeros(1), group), STRIDES),
    "reduce_scatter, a longer list": (
        lambda rank, group: dist.reduce_scatter(torch.zeros(1), zeros(1, 1, 1), group=group), LISTS.format(3, "input")),
    "reduce_scatter, a shorter list": (
        lambda rank, group: dist.reduce_scatter(torch.zeros(1), zeros(1), group=group), LISTS.format(1, "input")),
    "reduce_scatter, size": (
        lambda rank, group: dist.reduce_scatter(torch.zeros(1), zeros(2, 2), group=group),
        FITS.format(1, "float32", 2, "float32")),
    "reduce_scatter_single, size": (
        lambda rank, group: scatter_single(torch.zeros(2), torch.zeros(3), group),
        FITS.format(3, "float32", 4, "float32")),
    "reduce_scatter_single, op": (
        lambda rank, group: scatter_single(torch.zeros(1), torch.zeros(2), group, dist.ReduceOp.BAND),
        "cannot reduce tensors of float32 by BAND"),
    "all_reduce, op": (
        lambda rank, group: dist.all_reduce(torch.zeros(1), dist.ReduceOp.BXOR, group=group),
        "all_reduce cannot reduce tensors of float32 by BXOR"),
    "all_reduce, dtype": (
        lambda rank, group: dist.all_reduce(torch.zeros(1).to(torch.float8_e5m2), group=group),
        "all_reduce cannot reduce tensors of float8_e5m2 by SUM"),
    "all_reduce, expanded": (
        lambda rank, group: dist.all_reduce(torch.zeros(1).expand(3), group=group), STRIDES),
    "all_reduce, sparse": (
        lambda rank, group: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX, group=group), "by SUM only"),
    "broadcast, expanded": (
        lambda rank, group: dist.broadcast(torch.zeros(1).expand(3), 0, group=group), STRIDES),
    "broadcast, source": (
        lambda rank, group: dist.broadcast(torch.zeros(1), group=group, group_src=5), RANGE.format(5)),
    "broadcast, negative source": (
        lambda rank, group: dist.broadcast(torch.zeros(1), group=group, group_src=-1), RANGE.format(-1)),
    "reduce, destination": (
        lambda rank, group: dist.reduce(torch.zeros(1), group=group, group_dst=2), RANGE.format(2)),
    "gather, a longer list": (
        lambda rank, group: group.gather([zeros(1, 1, 1)], [torch.zeros(1)]), LISTS.format(3, "output")),
    "gather, sizes": (
        lambda rank, group: group.gather([zeros(1, 2)], [torch.zeros(1)]), FITS.format(2, "float32", 1, "float32")),
    "gather, two inputs": (lambda rank, group: group.gather([zeros(1, 1)], zeros(1, 1)), "got 2 input tensors"),
    "scatter, a shorter list": (
        lambda rank, group: group.scatter([torch.zeros(1)], [zeros(1)]), LISTS.format(1, "input")),
    "scatter, sizes": (
        lambda rank, group: group.scatter([torch.zeros(1)], [zeros(1, 2)]), FITS.format(2, "float32", 1, "float32")),
    "scatter, source": (
        lambda rank, group: group.scatter(torch.zeros(1), zeros(1, 1), 2), RANGE.format(2)),
    "all_to_all, a longer list": (
        lambda rank, group: dist.all_to_all(zeros(1, 1, 1), zeros(1, 1, 1), group=group), LISTS.format(3, "output")),
    "all_to_all, own": (
        lambda rank, group: dist.all_to_all(zeros(1, 1), zeros(2, 2), group=group),
        FITS.format(1, "float32", 2, "float32")),
    "all_to_all, dtypes": (
        lambda rank, group: group.alltoall([torch.zeros(1), numbers(0, dtype=torch.int8)], zeros(1, 1)),
        "got tensors of several dtypes"),
    "all_to_all_single, rows": (swap(torch.zeros(3), torch.zeros(3)), "output of 3 rows for 2 ranks and no output spl"),
    "all_to_all_single, a sum": (swap(torch.zeros(4), torch.zeros(4), [1, 2], [1, 3]), r"\[1, 2\] for an output of 4"),
    "all_to_all_single, negative": (swap(torch.zeros(4), torch.zeros(4), [2, 2], [-1, 5]), r"input splits \[-1, 5\]"),
    "all_to_all_single, splits": (swap(torch.zeros(4), torch.zeros(4), [4], [4]), r"\[4\] for an output of 4 rows"),
    "all_to_all_single, size": (swap(torch.zeros(4), torch.zeros(2)), FITS.format(4, "float32", 2, "float32")),
    "all_to_all_single, one number": (swap(torch.zeros(()), torch.zeros(())), "an output of one number"),
    "all_to_all_single, width": (swap(torch.zeros(2, 3), torch.zeros(2, 2), [1, 1], [1, 1]), "rows of"),
    "send, peer": (lambda rank, group: dist.send(torch.zeros(1), group=group, group_dst=7), RANGE.format(7)),
    "send, negative peer": (lambda rank, group: group.send([torch.zeros(1)], -1, 0), RANGE.format(-1)),
    "recv, strides": (
        lambda rank, group: dist.recv(torch.zeros(4)[::2], 1 - rank, group=group), "takes contiguous ones only"),
}  # fmt: skip


def ask_wrongly(group):
    """Make every wrong call on all ranks, and a right one after each."""
    ours, answers = shm_group(), {}
    for name, (call, _) in WRONG.items():
        answer = caught(lambda call=call: call(group.rank, ours))
        number = numbers(group.rank + 1.0)
        dist.all_reduce(number, group=ours)
        answers[name] = (answer, number.item())
    return answers


def test_call_when_its_arguments_are_wrong_then_it_is_refused_and_the_next_one_works():
    for answers in on_ranks(2, ask_wrongly):
        assert {name: after for name, (_, after) in answers.items()} == dict.fromkeys(WRONG, 3.0)
        for name, (answer, _) in answers.items():
            with pytest.raises(RuntimeError, match=WRONG[name][1]):
                raise RuntimeError(answer)
            assert str(answer).startswith("RuntimeError: "), name


def split_otherwise(group):
    """Let rank 1 expect more from rank 0 than that gives."""
    ours = shm_group()
    splits = ([2, 1], [2, 1]) if group.rank == 0 else ([2, 1], [1, 2])
    return caught(lambda: dist.all_to_all_single(torch.zeros(3), torch.ones(3), *splits, group=ours))


def test_all_to_all_when_splits_of_ranks_do_not_fit_then_all_ranks_name_the_two():
    for answer in on_ranks(2, split_otherwise):
        assert answer.startswith(
            "RanksDisagree: rank 0 gives 4 bytes to rank 1 of the group in all_to_all, which expects"
        )


def meet_in_other_calls(group):
    """Let ranks be in calls of the same size that do not belong together."""
    ours, answers = shm_group(), []
    if group.rank == 0:
        answers.append(caught(lambda: dist.reduce(numbers(1.0), 0, group=ours)))
    else:
        answers.append(caught(lambda: dist.all_reduce(numbers(1.0), group=ours)))
    other = shm_group()
    answers.append(caught(lambda: dist.gather(numbers(1.0), None, 1 - group.rank, group=other)))
    return answers


def test_calls_when_ranks_mix_up_reduce_and_gather_then_each_names_both():
    for reduced, gathered in on_ranks(2, meet_in_other_calls):
        assert "RanksDisagree: rank " in reduced
        assert "reduce(sum) to rank 0 of 4 bytes float32" in reduced
        assert "gather to rank 0 of 4 bytes" in gathered
        assert "gather to rank 1 of 4 bytes" in gathered


# -- tensors that are no plain vectors


def move_odd_tensors(group):
    """Let every call read and fill tensors with gaps, with a lazy sign, without elements, and that share memory."""
    ours, rank = shm_group(), group.rank
    answers = {}
    gaps = torch.zeros(2, 2, 2)
    column = (torch.arange(8.0).view(4, 2) + 10 * rank)[:, 1]
    dist.scatter(gaps[0][:, 0], [column[:2], column[2:]] if rank == 0 else None, 0, group=ours)
    answers["scatter"] = gaps[0].tolist()
    outputs = [gaps[1][:, 0], gaps[1][:, 1]]
    dist.all_to_all(outputs, [column[:2], column[2:]], group=ours)
    answers["all_to_all"] = gaps[1].tolist()
    swapped = torch.zeros(4, 2)
    dist.all_to_all_single(swapped[:, 0], column, group=ours)
    answers["all_to_all_single"] = swapped.tolist()
    gathered = torch.zeros(4, 2)
    dist.gather(column, [gathered[:, 0], gathered[:, 1]] if rank == 0 else None, 0, group=ours)
    answers["gather"] = gathered.tolist()
    long = torch.zeros(4, 2)
    gather_single(long[:, 1], column[:2], ours)
    answers["all_gather_single"] = long.tolist()
    reduced = torch.zeros(4)
    dist.reduce_scatter(reduced[::2], [column[:2], column[2:]], group=ours)
    answers["reduce_scatter"] = reduced.tolist()
    for_one = (torch.arange(6.0).view(2, 3) + rank).t() if rank else torch.arange(6.0).view(2, 3).t().contiguous()
    dist.reduce(for_one, 0, group=ours)
    answers["reduce"] = for_one.tolist()
    minus = torch.tensor([1j + rank]).conj().imag
    dist.all_reduce(minus, group=ours)
    answers["lazy sign"] = minus.tolist()
    truth = torch.tensor([rank == 0, False, True, True])[::2]
    dist.all_reduce(truth, dist.ReduceOp.MIN, group=ours)
    answers["truth"] = truth.tolist()
    row = torch.arange(4.0) + 10 * rank
    dist.all_gather([row[:2], row[2:]], row[1:3], group=ours)
    answers["own input among the outputs"] = row.tolist()
    shares = torch.arange(4.0) + 10 * rank
    scatter_single(shares[1:3], shares, ours)
    answers["own output among the inputs"] = shares.tolist()
    return answers


def test_odd_tensors_then_every_call_reads_and_fills_their_elements():
    for rank, answers in enumerate(on_ranks(2, move_odd_tensors)):
        first = [1.0, 3.0, 5.0, 7.0]
        mine = first[2 * rank : 2 * rank + 2]
        theirs = [value + 10 for value in mine]
        sums = [a + b for a, b in zip(mine, theirs, strict=True)]
        assert answers == {
            "scatter": [[mine[0], 0.0], [mine[1], 0.0]],
            "all_to_all": [[mine[0], theirs[0]], [mine[1], theirs[1]]],
            "all_to_all_single": [[value, 0.0] for value in (*mine, *theirs)],
            "gather": [[value, value + 10] for value in first] if rank == 0 else [[0.0, 0.0]] * 4,
            "all_gather_single": [[0.0, value] for value in (1.0, 3.0, 11.0, 13.0)],
            "reduce_scatter": [sums[0], 0.0, sums[1], 0.0],
            "reduce": [[1.0, 7.0], [3.0, 9.0], [5.0, 11.0]] if rank == 0 else [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]],
            "lazy sign": [-2.0],
            "truth": [False, True],
            "own input among the outputs": [1.0, 2.0, 11.0, 12.0],
            "own output among the inputs": [0.0, 10.0, 12.0, 3.0] if rank == 0 else [10.0, 14.0, 16.0, 13.0],
        }


def move_nothing(group):
    """Make every call with tensors without elements, and uneven ones with empty parts; several rounds of a segment."""
    ours, rank = shm_group(), group.rank
    empty = torch.zeros(0)
    dist.all_reduce(empty, group=ours)
    dist.reduce(empty, 1, group=ours)
    dist.broadcast(empty, 1, group=ours)
    dist.all_gather(zeros(0, 0), empty, group=ours)
    dist.gather(empty, zeros(0, 0) if rank == 0 else None, 0, group=ours)
    dist.scatter(empty, zeros(0, 0) if rank == 0 else None, 0, group=ours)
    dist.reduce_scatter(empty, zeros(0, 0), group=ours)
    gather_single(torch.zeros(0, 3), torch.zeros(0, 3), ours)
    dist.all_to_all_single(empty, empty, group=ours)
    uneven = torch.zeros(rank)
    dist.reduce_scatter(uneven, [torch.ones(0), torch.ones(1)], group=ours)
    size = 3_000_001
    own, swapped = torch.arange(float(size)) + rank, torch.zeros(size if rank == 0 else 0)
    dist.all_to_all_single(swapped, own[: size // 2 + rank], [size // 2, size // 2 + 1] if rank == 0 else [0, 0],
                           [size // 2 + rank, 0], group=ours)  # fmt: skip
    wanted = torch.cat([torch.arange(float(size // 2)), torch.arange(float(size // 2 + 1)) + 1])
    return uneven.tolist(), rank == 1 or torch.equal(swapped, wanted)


def test_nothing_and_uneven_amounts_then_they_move_as_they_should():
    assert on_ranks(2, move_nothing) == [([], True), ([2.0], True)]


def test_difference_between_ranks_then_it_is_no_lost_peer():
    assert not issubclass(RanksDisagree, PeerLost)
