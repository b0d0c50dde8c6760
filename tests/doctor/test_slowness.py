"""Findings of `dure doctor` about the speed of a run, from records whose times are known."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dure.doctor.slowness import slow_findings
from dure.doctor.step_times import step_times
from dure.records.events import (
    CheckpointSaved,
    Evaluated,
    MemoryUsed,
    OperationsCounted,
    RankMemory,
    SlowThreads,
    Training,
)
from dure.records.finding import Finding
from dure.records.run_dir import RunDir
from dure.records.step_record import StepRecord, step_line
from dure.spec import RunSpec

NUM_STEPS = 60

Spans = Callable[[int], dict[str, float]]
"""Function from a step to the seconds of its parts, and its `wall`."""


def evenly(wall: float = 0.1, **parts: float) -> Spans:
    return lambda step: {"wall": wall, **parts}


def write_records(run: RunDir, rank: int, spans: Spans, steps: range = range(1, NUM_STEPS + 1)) -> None:
    with run.records_path(rank).open("a") as file:
        for step in steps:
            seconds = spans(step)
            parts = {
                f"{part}_seconds": seconds.get(part, 0.0) for part in ("data", "forward_backward", "sync", "optimizer")
            }
            record = StepRecord(
                time=1e9 + step, step=step, epoch=0, samples_seen=32 * step, loss_sum=1.0, loss_count=32,
                sent_bytes=1000, wall_seconds=seconds["wall"], **parts,
            )  # fmt: skip
            file.write(step_line(record))


def training(world_size: int, *, num_devices: int | None = None, step: int = 0, cores: int | None = 64) -> Training:
    return Training(
        world_size=world_size, num_devices=num_devices or world_size, device="cpu", epoch_samples=640,
        total_samples=1920, samples_seen=32 * step, step=step, cores=cores,
    )  # fmt: skip


def found(tmp_path: Path, *ranks: Spans, events=(), cores: int | None = 64, **settings) -> list[Finding]:
    run = RunDir.create(tmp_path, "run")
    for rank, spans in enumerate(ranks):
        write_records(run, rank, spans)
    spec = RunSpec(task="-:-", **{"global_batch_size": 32, "nproc": len(ranks), **settings})
    return slow_findings(run, spec, [training(len(ranks), cores=cores), *events])


def evaluated(seconds: float) -> Evaluated:
    return Evaluated(
        step=1, samples_seen=32, epochs=1.0, train_loss=None, metrics={}, is_best=False, best_metric="loss",
        seconds=seconds, seconds_since_last=1.0,
    )  # fmt: skip


def saved(stall_seconds: float) -> CheckpointSaved:
    return CheckpointSaved(path="x", samples_seen=32, step=1, num_bytes=2**20, stall_seconds=stall_seconds)


def test_run_when_it_computes_all_the_time_then_nothing_is_found(tmp_path):
    assert found(tmp_path, evenly(forward_backward=0.08, optimizer=0.01, data=0.005)) == []


def test_run_when_it_is_shorter_than_a_second_then_it_is_not_judged(tmp_path):
    assert found(tmp_path, evenly(wall=0.01, data=0.009)) == []


def test_data_when_the_rank_loads_them_itself_then_the_loader_processes_to_try_are_told(tmp_path):
    (finding,) = found(tmp_path, evenly(data=0.06, forward_backward=0.04))
    assert (finding.id, finding.severity, finding.gain_fraction) == ("waits_for_data", "warning", 0.6)
    assert finding.evidence == (
        "60.0 ms of the 100.0 ms of a step",
        "it brings 533 samples/s; without waiting, each rank would use 800",
    )
    assert finding.remedy == "--num-workers 2"


@pytest.mark.parametrize(
    ("cores", "remedy"), [(64, "--num-workers 5"), (None, "--num-workers 5"), (4, "host has 4 cores")]
)
def test_data_when_there_are_loader_processes_then_more_are_proposed_if_there_are_cores(cores, remedy, tmp_path):
    (finding,) = found(tmp_path, evenly(data=0.06, forward_backward=0.04), num_workers=2, cores=cores)
    assert remedy in finding.remedy


def test_data_when_there_is_one_loader_process_then_it_is_one(tmp_path):
    (finding,) = found(tmp_path, evenly(data=0.06, forward_backward=0.04), num_workers=1, cores=2)
    assert "1 loader process per rank:" in finding.cause


@pytest.mark.parametrize("data", [0.1, 0.2])
def test_data_when_a_step_is_nothing_but_the_wait_then_the_figures_have_an_end(data, tmp_path):
    (finding,) = found(tmp_path, evenly(data=data))
    assert (finding.remedy, finding.gain_fraction) == ("--num-workers 64", 1.0)
    assert finding.evidence[1].endswith("each rank would use 320,000")


def test_data_when_some_ranks_only_serve_the_others_then_the_samples_are_those_of_the_rest(tmp_path):
    run = RunDir.create(tmp_path, "run")
    for rank, spans in enumerate([evenly(data=0.06, forward_backward=0.04)] * 2 + [evenly(sync=0.1)] * 2):
        write_records(run, rank, spans)
    spec = RunSpec(task="-:-", global_batch_size=32, nproc=2)
    (finding,) = slow_findings(run, spec, [training(4, num_devices=2)])
    assert finding.evidence[1] == "it brings 267 samples/s; without waiting, each rank would use 400"


def test_rank_when_it_is_late_from_some_step_on_then_rank_step_and_part_are_named(tmp_path):
    def slow(step: int) -> dict[str, float]:
        return {"wall": 0.1, "forward_backward": 0.09 if step > 20 else 0.04, "sync": 0.01 if step > 20 else 0.05}

    (finding,) = found(
        tmp_path, evenly(forward_backward=0.04, sync=0.05), slow, evenly(forward_backward=0.04, sync=0.05)
    )
    assert finding.id == "straggler"
    assert finding.what.startswith("the other ranks wait for rank 1, 40.0 ms in each step, since step 2")
    assert finding.evidence[1] == "50.0 ms of the difference is forward and backward"


@pytest.mark.parametrize("usual", [range(6, 9), range(15, 18), range(45, 48)])
def test_rank_when_it_is_late_from_the_start_but_for_some_steps_then_no_later_step_is_named(usual, tmp_path):
    def slow(step: int) -> dict[str, float]:
        return {"wall": 0.1, "forward_backward": 0.09, "sync": 0.01} | (
            {"forward_backward": 0.05, "sync": 0.05} if step in usual else {}
        )

    (finding,) = found(tmp_path, evenly(forward_backward=0.04, sync=0.05), slow)
    assert finding.what.startswith("the other ranks wait for rank 1")
    assert "since step" not in finding.what


@pytest.mark.parametrize(
    ("part", "remedy"), [("data", "loader is slower"), ("optimizer", "cores are slower"), ("other", "writing files")]
)
def test_rank_when_it_is_late_then_the_cause_is_that_of_the_part(part, remedy, tmp_path):
    late = {} if part == "other" else {part: 0.03}
    (finding, *_) = found(
        tmp_path, evenly(forward_backward=0.05, sync=0.05), evenly(forward_backward=0.05, sync=0.01, **late)
    )
    assert (finding.id, remedy in finding.cause) == ("straggler", True)


def test_ranks_when_they_take_turns_at_being_late_then_none_is_a_straggler(tmp_path):
    def turn(own: int) -> Spans:
        return lambda step: {"wall": 0.1, "forward_backward": 0.09 if step % 2 == own else 0.06, "sync": 0.01}

    assert found(tmp_path, turn(0), turn(1)) == []


def test_communication_when_even_the_last_rank_waits_for_it_then_is_named_with_its_bytes(tmp_path):
    (finding,) = found(tmp_path, *[evenly(forward_backward=0.05, sync=0.04, optimizer=0.01)] * 2)
    assert (finding.id, finding.gain_fraction) == ("communication_bound", 0.2)
    assert finding.evidence[1] == "each rank sends 1000 B per step, 24.4 KiB/s"


def test_work_when_one_device_would_do_it_as_fast_then_the_times_are_told(tmp_path):
    (finding,) = found(tmp_path, *[evenly(forward_backward=0.02, sync=0.07, optimizer=0.01)] * 3)
    assert finding.id == "too_small_to_distribute"
    assert finding.what == "one device would be as fast as 3: 70.0 ms for a step that takes 100.0 ms now"


@pytest.mark.parametrize(
    ("spans", "remedy"),
    [(evenly(forward_backward=0.02, sync=0.07), "--nnodes 1 --nproc 1;"), (evenly(data=0.06), "--num-workers 2")],
)
def test_ranks_when_they_are_on_several_hosts_then_the_remedy_is_for_one_of_them(spans, remedy, tmp_path):
    (finding, *_) = found(tmp_path, *[spans] * 3, cores=2, nnodes="3", nproc=1)
    assert finding.remedy.startswith(remedy)


def test_rank_when_it_computes_nothing_then_one_device_is_not_compared(tmp_path):
    ranks = evenly(forward_backward=0.05, sync=0.05), evenly(sync=0.1)
    assert "too_small_to_distribute" not in [each.id for each in found(tmp_path, *ranks)]


def test_evaluation_when_it_takes_most_of_the_time_then_a_longer_interval_is_proposed(tmp_path):
    (finding,) = found(tmp_path, evenly(forward_backward=0.1), events=[evaluated(2.0), evaluated(2.0)])
    assert (finding.id, finding.what) == ("evaluation_dominates", "evaluation takes 42% of the time")
    assert finding.remedy == "--eval-every-epochs 8, or fewer samples in eval_data"
    assert finding.gain_fraction == pytest.approx(0.42 / 2, abs=0.005)  # the evaluation at the end remains


def test_evaluation_when_its_seconds_are_none_that_one_takes_then_the_interval_has_an_end(tmp_path):
    (finding,) = found(tmp_path, evenly(forward_backward=0.1), events=[evaluated(1e300)] * 2)
    assert finding.remedy.startswith("--eval-every-epochs 1e+03")


def test_checkpoints_when_training_stands_still_for_them_then_the_cure_follows_the_settings(tmp_path):
    events = [saved(1.0), saved(1.0)]
    (finding,) = found(tmp_path, evenly(forward_backward=0.1), events=events, checkpoint={"background": False})
    assert (finding.id, finding.remedy.partition(":")[0]) == ("checkpoint_stalls", "--checkpoint.background true")


def test_threads_when_other_work_had_their_cores_then_one_thread_is_proposed(tmp_path):
    (finding,) = found(tmp_path, evenly(forward_backward=0.1), events=[SlowThreads(threads=4, slowdown=5.0)])
    assert (finding.id, finding.gain_fraction) == ("cpu_oversubscribed", 0.8)


def test_ranks_when_there_are_more_than_cores_then_it_is_said(tmp_path):
    (finding,) = found(tmp_path, *[evenly(forward_backward=0.1)] * 3, cores=2)
    assert (finding.id, finding.remedy) == ("cpu_oversubscribed", "--nproc 2, or hosts with more cores")


def test_findings_when_there_are_several_then_the_largest_gain_comes_first(tmp_path):
    several = found(tmp_path, evenly(data=0.05, forward_backward=0.05), events=[evaluated(5.0), evaluated(5.0)])
    assert [finding.id for finding in several] == ["evaluation_dominates", "waits_for_data"]


def test_steps_when_the_run_was_resumed_on_fewer_ranks_then_those_of_the_last_attempt_count(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(), range(1, 61))
    write_records(run, 1, evenly(), range(1, 31))
    times = step_times(run, world_size=1, first_step=30)
    assert (times.ranks, times.steps[0], times.steps[-1]) == ((0,), 36, 60)


def test_steps_when_a_rank_has_no_records_or_damaged_ones_then_the_others_are_read(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly())
    with run.records_path(0).open("a") as file:
        file.write('{"step": "x"}\n[]\n{"step": 61, "tim')
    times = step_times(run, world_size=2, first_step=0)
    assert (times.ranks, times.missing, times.num_left_out, times.steps[-1]) == ((0,), (1,), 3, 60)


def test_findings_when_a_rank_has_no_records_or_lines_are_damaged_then_that_is_said(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(forward_backward=0.1))
    with run.records_path(0).open("a") as file:
        file.write("{}\n[]\n")
    gaps = slow_findings(run, RunSpec(task="-:-"), [training(2)])
    assert [finding.what for finding in gaps] == [
        "step records of rank 1 are missing: the others are judged",
        "2 lines of the step records are damaged, and were left out",
    ]


def test_ranks_when_the_records_of_one_are_missing_then_it_is_not_told_for_what_the_others_wait(tmp_path):
    run = RunDir.create(tmp_path, "run")
    for rank, computing in enumerate((0.04, 0.06)):
        write_records(run, rank, evenly(forward_backward=computing, sync=0.1 - computing))
    gaps = slow_findings(run, RunSpec(task="-:-", nproc=3), [training(3)])
    assert [finding.id for finding in gaps] == ["missing_records"]


def in_rounds(rank: int) -> Spans:
    """Return the steps of a rank that waits for the others in every tenth step only, of 10 or of 60 ms of work."""

    def spans(step: int) -> dict[str, float]:
        sync = (0.0, 0.45)[rank == 0] if step % 10 == 0 else 0.0
        return {"wall": (0.01, 0.06)[rank] + sync, "forward_backward": (0.01, 0.06)[rank], "sync": sync}

    return spans


def test_ranks_when_they_wait_for_each_other_only_now_and_then_then_a_step_takes_what_the_slowest_takes(tmp_path):
    (finding,) = found(tmp_path, in_rounds(0), in_rounds(1))
    assert (finding.id, finding.what[:51]) == ("straggler", "the other ranks wait for rank 1, 50.0 ms in each st")
    assert finding.evidence[0].startswith("rank 1 is busy for 60.0 ms of a step's 60.0 ms")


def test_ranks_when_they_load_in_turns_and_wait_for_nobody_then_the_longest_wait_is_that_of_one(tmp_path):
    def turn(own: int) -> Spans:
        return lambda step: {"wall": 0.1, "data": 0.04} if step % 2 == own else {"wall": 0.05}

    (finding,) = found(tmp_path, turn(0), turn(1))
    assert finding.what == "steps wait for data for 27% of their time"


def test_rank_when_it_is_late_but_no_other_waits_then_that_is_not_said(tmp_path):
    (finding,) = found(tmp_path, *[evenly(wall=wall, forward_backward=wall) for wall in (0.02, 0.05, 0.02)])
    assert finding.what == "rank 1 is behind the others, by 30.0 ms more in each step"


def test_findings_when_no_rank_has_recorded_a_step_then_there_are_none(tmp_path):
    assert slow_findings(RunDir.create(tmp_path, "run"), RunSpec(task="-:-", nproc=2), [training(2)]) == []


@pytest.mark.parametrize("number", [math.nan, math.inf, -5.0, -math.inf, 0])
def test_events_when_their_numbers_are_none_that_they_have_then_they_are_left_out(number, tmp_path):
    events = [evaluated(number), saved(number), SlowThreads(threads=4, slowdown=number)] * 2
    assert found(tmp_path, evenly(forward_backward=0.1), events=events, cores=0) == []


def test_ranks_when_a_record_tells_of_any_number_of_them_then_those_with_records_are_read(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(forward_backward=0.1))
    (finding,) = slow_findings(run, RunSpec(task="-:-"), [training(2**62)])
    assert finding.what == "step records of ranks 1, 2, 3, 4, 5, 6, 7, 8, … are missing: the others are judged"


def test_ranks_when_the_records_of_one_end_early_then_evaluation_is_compared_with_all_steps(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(forward_backward=0.09), range(1, 1001))
    write_records(run, 1, evenly(forward_backward=0.09), range(1, 61))
    spec = RunSpec(task="-:-", nproc=2)
    assert slow_findings(run, spec, [training(2), evaluated(5.0), evaluated(5.0)]) == []


def test_data_when_the_records_of_a_rank_are_missing_then_its_share_and_its_loaders_count(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(data=0.06, forward_backward=0.04))
    finding, _ = slow_findings(run, RunSpec(task="-:-", global_batch_size=32, nproc=2), [training(2, cores=2)])
    assert finding.evidence[1] == "it brings 267 samples/s; without waiting, each rank would use 400"
    assert "the host has 2 cores" in finding.remedy


def test_step_when_the_machine_was_suspended_in_it_then_it_is_left_out(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, lambda step: {"wall": 900.0 if step == 30 else 0.1})
    assert 30 not in step_times(run, world_size=1, first_step=0).steps


@pytest.mark.parametrize(
    "odd", [{"wall": 0.0}, {"wall": 1e300}, {"wall": -1.0}, {"wall": 0.1, "data": -1e300}, {"wall": 0.1, "sync": 1e308}]
)
def test_steps_when_their_times_are_none_that_a_step_has_then_they_are_left_out(odd, tmp_path):
    run = RunDir.create(tmp_path, "run")
    for rank, spans in enumerate((lambda step: odd, evenly())):
        write_records(run, rank, spans)
    assert step_times(run, world_size=2, first_step=0).steps.size == 0
    assert slow_findings(run, RunSpec(task="-:-"), [training(2), evaluated(1e300), evaluated(1e308)]) == []


def counted(operations: int, least_seconds: float = 3e-6) -> OperationsCounted:
    return OperationsCounted(operations=operations, least_seconds=least_seconds)


@pytest.mark.parametrize(("operations", "least", "id"), [(9_000, 3e-6, "python_bound"), (100, 2e-4, "batch_too_small")])
def test_step_when_it_mostly_calls_operations_then_their_number_and_time_are_told(operations, least, id, tmp_path):
    spans = evenly(forward_backward=0.08, optimizer=0.01)
    (finding,) = found(tmp_path, spans, events=[counted(operations, least)])
    assert (finding.id, finding.gain_fraction) == (id, 0.45)
    each = f"{0.08e6 / operations:.1f} us of forward and backward"
    assert finding.evidence[0] == f"{operations:,} operations in a backward, and for each {each}"


@pytest.mark.parametrize(
    "event", [counted(300), counted(0), counted(9_000, 0.0), counted(9_000, math.nan), counted(9, 1.0)]
)
def test_step_when_its_operations_compute_or_the_record_is_damaged_then_nothing_is_found(event, tmp_path):
    assert found(tmp_path, evenly(forward_backward=0.08, optimizer=0.01), events=[event]) == []


def test_microbatches_when_they_are_many_and_small_then_larger_ones_are_proposed(tmp_path):
    (finding,) = found(tmp_path, evenly(forward_backward=0.09), microbatch_size=2)
    assert (finding.id, finding.gain_fraction) == ("small_samples_per_step", 0.3)
    assert finding.remedy.startswith("--microbatch-size 16,")


def test_device_when_it_is_an_accelerator_in_fp32_then_lower_precision_is_proposed(tmp_path):
    run = RunDir.create(tmp_path, "run")
    write_records(run, 0, evenly(forward_backward=0.09))
    on_device = replace(training(1), device="cuda")
    for precision, ids in (("fp32", ["low_precision_unused"]), ("bf16", [])):
        spec = RunSpec(task="-:-", global_batch_size=32, precision=precision)
        assert [finding.id for finding in slow_findings(run, spec, [on_device])] == ids


def test_ranks_when_each_step_waits_for_another_one_then_samples_are_uneven(tmp_path):
    def turn(own: int) -> Spans:
        return lambda step: {"wall": 0.1, "sync": 0.01 if step % 2 == own else 0.06, "forward_backward": 0.04}

    (finding,) = found(tmp_path, turn(0), turn(1))
    assert (finding.id, finding.gain_fraction) == ("uneven_shares", pytest.approx(0.25, abs=0.01))
    assert finding.evidence == ("the last rank of a step is busy for 90.0 ms, the mean rank for 65.0 ms",)


def memory(gradients: int) -> MemoryUsed:
    rank = RankMemory(rank=0, parameters=1, gradients=gradients, optimizer=1, buffers=0, devices=())
    return MemoryUsed(ranks=(rank,))


@pytest.mark.parametrize(
    ("bucket_bytes", "gradients", "id"),
    [
        (2**16, 2**22, "bucket_size"),
        (2**30, 2**26, "bucket_size"),
        (25 * 2**20, 2**26, "communication_bound"),
        (2**30, 2**22, "communication_bound"),
    ],
)
def test_buckets_when_they_are_tiny_or_one_holds_everything_then_their_size_is_the_reason(
    bucket_bytes, gradients, id, tmp_path
):
    spans = [evenly(forward_backward=0.05, sync=0.04, optimizer=0.01)] * 2
    options = {"bucket_bytes": bucket_bytes}
    (finding,) = found(tmp_path, *spans, events=[memory(gradients)], strategy="ddp", options=options)
    assert finding.id == id
    assert "--ddp.bucket-bytes 26214400" in finding.remedy or id != "bucket_size"
