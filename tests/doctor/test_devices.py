"""Findings about GPUs, from recorded samples of them: no GPU is needed."""

from dure.doctor.slowness import slow_findings
from dure.host.usage import GpuUse, ProcessUse
from dure.records.run_dir import RunDir
from dure.records.usage import usage_line, usage_path
from dure.spec import RunSpec
from tests.doctor.test_slowness import evenly, training, write_records

PROCESS = ProcessUse(cores=1.0, resident_bytes=2**30, loaders=0, loader_cores=0.0, loader_bytes=0)


def gpu(busy=0.97, slowed_by=(), megahertz=1980):
    return GpuUse(
        device=0, busy=busy, memory_bytes=2**34, watts=500.0, most_watts=700.0, megahertz=megahertz,
        most_megahertz=1980, slowed_by=slowed_by,
    )  # fmt: skip


def findings(tmp_path, *ranks):
    """Return the findings of a run whose ranks have these samples of their GPUs."""
    run = RunDir.create(tmp_path, "run")
    for rank, samples in enumerate(ranks):
        write_records(run, rank, evenly(forward_backward=0.1))
        lines = [usage_line(4e9 + number, PROCESS, (each,)) for number, each in enumerate(samples)]
        usage_path(run, rank).write_text("".join(lines))
    spec = RunSpec(task="-:-", global_batch_size=32, nproc=len(ranks), precision="bf16")
    return {finding.id: finding for finding in slow_findings(run, spec, [training(len(ranks))])}


def test_gpus_when_they_compute_all_the_time_then_nothing_is_found(tmp_path):
    assert not {"device_idle", "throttled"} & {*findings(tmp_path, [gpu()] * 5, [gpu()] * 5)}


def test_gpus_when_all_wait_then_are_idle(tmp_path):
    finding = findings(tmp_path, [gpu(0.2)] * 5, [gpu(0.4)] * 5)["device_idle"]
    assert finding.what == "no GPU computes for more than 40% of the time"
    assert finding.evidence == ("rank 0, GPU 0: busy for 20% of the time", "rank 1, GPU 0: busy for 40% of the time")
    assert finding.gain_fraction == 0.3


def test_gpus_when_one_is_hot_then_it_is_named_and_its_idleness_is_not(tmp_path):
    hot = gpu(0.3, ("SW thermal slowdown",), 990)
    found = findings(tmp_path, [gpu(0.3)] * 4, [gpu(0.3)] * 2 + [hot] * 2)
    assert found["throttled"].evidence == (
        "rank 1, GPU 0: in 50% of 4 samples (SW thermal slowdown), its clock at 50% of the most",
    )
    assert found["throttled"].gain_fraction == 0.25
    assert "device_idle" not in found


def test_gpus_when_there_are_few_samples_or_none_of_what_is_asked_then_nothing_is_found(tmp_path):
    assert "device_idle" not in findings(tmp_path, [gpu(0.1)] * 2)
    assert "device_idle" not in findings(tmp_path / "other", [gpu(None)] * 9)
