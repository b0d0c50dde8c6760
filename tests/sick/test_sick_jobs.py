"""Jobs that are slow for one reason, run for real: `dure doctor` finds it first, and nothing in the healthy ones."""

from pathlib import Path
from typing import Any

import pytest

import dure
from dure.doctor.findings import diagnose
from dure.records.run_dir import RunDir
from tests.sick.jobs import Job

pytestmark = [pytest.mark.slow, pytest.mark.alone]
TWO = {"nproc": 2, "strategy": "ddp"}
HEALTHY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one device": ({"computing": 0.02}, {}),
    "two ranks": ({"computing_each": 0.002}, TWO),
    "loaders in time": ({"computing": 0.04, "loading": 0.0005}, {"num_workers": 1}),
    "evaluates seldom": ({"computing": 0.02, "evaluating": 0.001}, {}),
    "microbatches": ({"computing_each": 0.002}, {**TWO, "microbatch_size": 8}),
}
SICK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "waits_for_data": ({"computing": 0.01, "loading": 0.001}, {}),
    "waits_for_data (loaders)": ({"computing": 0.01, "loading": 0.005}, {"num_workers": 1}),
    "straggler": ({"computing_each": 0.001, "late_rank": 1, "late": 0.03}, TWO),
    "straggler (first rank)": ({"computing_each": 0.001, "late_rank": 0, "late": 0.03}, TWO),
    "too_small_to_distribute": (
        {},
        {**TWO, "strategy": "naive_ddp", "backend": "gloo", "comm": "naive", "samples": 6_000},
    ),
    "communication_bound": (
        {"ballast": 10**7, "computing_each": 0.0037},
        {**TWO, "strategy": "naive_ddp", "backend": "gloo", "comm": "naive", "samples": 1_200},
    ),
    "python_bound": ({"num_layers": 150}, {"samples": 20_000}),
    "batch_too_small": ({}, {"samples": 60_000}),
    "small_samples_per_step": ({"computing": 0.002}, {"microbatch_size": 2}),
    "uneven_shares": ({"computing": 0.01, "uneven": 0.04}, TWO),
    "needless_unused_parameter_search": ({"computing": 0.02}, {**TWO, "ddp": {"find_unused_parameters": True}}),
    "ranks_drift_apart": (
        {"computing_each": 0.001, "late_rank": 1, "late": 0.03},
        {"nproc": 3, "strategy": "parameter_server", "parameter_server": {"sync": False}},
    ),
    "memory_imbalance": ({"computing_each": 0.001, "late_rank": 1, "hoarded_bytes": 10**9}, TWO),
    "evaluation_dominates": ({"computing": 0.01, "evaluating": 0.01}, {"eval_every_epochs": 0.2}),
    "checkpoint_stalls": (
        {"ballast": 10**7, "computing": 0.01},
        {"checkpoint": {"background": False, "every_samples": 64}, "samples": 1_000},
    ),
}


def diagnosed(folder: Path, options: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    # one thread: others would wait for cores if anything else runs on the machine, which is a finding
    given = {"samples": 2_000, "global_batch_size": 32, "threads": 1, **settings}
    summary = dure.train(Job(**options), runs_dir=folder, quiet=True, **given)
    return [finding.id for finding in diagnose(RunDir.open(Path(summary.run))).findings]


@pytest.mark.parametrize("name", SICK)
def test_job_when_it_is_slow_then_its_reason_comes_first(name, tmp_path):
    assert diagnosed(tmp_path, *SICK[name])[:1] == [name.partition(" ")[0]]


@pytest.mark.parametrize("name", HEALTHY)
def test_job_when_it_is_healthy_then_nothing_is_found(name, tmp_path):
    assert diagnosed(tmp_path, *HEALTHY[name]) == []
