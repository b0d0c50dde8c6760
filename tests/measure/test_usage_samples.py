"""Samples of the use of a machine, and their records."""

import math

import pytest
import torch

from dure.measure.usage_samples import UsageSampler, gpus_of
from dure.records.run_dir import RunDir
from dure.records.usage import read_usage, usage_path
from tests.commands import wait_until
from tests.preflight.nvml import Card, Nvml, installed


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def test_samples_when_taken_then_are_records_of_process_and_gpus(run):
    with installed(Nvml(Card(1)), None), UsageSampler(usage_path(run, 3), lambda: (0,), seconds=0.02):
        wait_until(lambda: len([*read_usage(run, 3)]) >= 2, "two samples")
    first, second, *_ = read_usage(run, 3)
    assert first.time < second.time
    assert first.resident_bytes > 2**20
    assert [gpu.watts for gpu in first.gpus] == [350.5]
    assert next(iter(read_usage(run, 3, since=second.time))) == second
    assert [*read_usage(run, 0)] == []


def test_samples_when_they_cannot_be_written_then_end_without_a_word(run):
    sampler = UsageSampler(run.path / "missing" / "file", lambda: (), seconds=0.01)
    with sampler:
        sampler._thread.join(timeout=5)
        assert not sampler._thread.is_alive()


def test_samples_when_the_context_ends_then_the_thread_ends(run):
    with UsageSampler(usage_path(run, 0), lambda: (), seconds=100.0) as sampler:
        pass
    sampler._thread.join(timeout=5)
    assert not sampler._thread.is_alive()


@pytest.mark.parametrize(
    "damage",
    ["{", "[1]", '{"time": 1}', '{"time": 1.5, "cores": 1e999, "resident_bytes": 1, "loaders": 0, "loader_cores": 0, '
     '"loader_bytes": 0}', '{"time": 1.5, "gpus": 7}', '{"time": 1.5, "gpus": [[[]]]}'],
)  # fmt: skip
def test_records_when_a_line_is_damaged_then_it_is_left_out(run, damage):
    good = '{"time": 2.0, "cores": 1, "resident_bytes": 1, "loaders": 0, "loader_cores": 0, "loader_bytes": 0}'
    usage_path(run, 0).write_text(f"{good}\n{damage}\n{good}\n")
    assert [record.cores for record in read_usage(run, 0)] == [1.0, 1.0]
    assert not any(math.isinf(record.cores) for record in read_usage(run, 0))


def test_devices_when_they_are_no_gpus_of_nvml_then_have_no_index():
    assert gpus_of([torch.device("cpu"), torch.device("cuda", 1), torch.device("mps")]) == (1,)


def test_records_when_there_are_many_then_the_newest_are_read(run):
    line = '{{"time": {}, "cores": 1, "resident_bytes": 1, "loaders": 0, "loader_cores": 0, "loader_bytes": 0}}\n'
    usage_path(run, 0).write_text("".join(line.format(float(number)) for number in range(20_000)))
    times = [record.time for record in read_usage(run, 0)]
    assert times == [float(number) for number in range(20_000 - len(times), 20_000)]
    assert 2_000 < len(times) < 4_000
