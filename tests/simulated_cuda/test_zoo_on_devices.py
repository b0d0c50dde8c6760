"""The table of what works, on simulated devices: each cell is exact, declared, refused, or an error about devices."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dure.errors import DureError
from dure.strategies.table import STRATEGIES
from tests.conformance.zoo.cell import Verdict, reference_of, run_cell
from tests.conformance.zoo.feature import FEATURES
from tests.conformance.zoo.table import is_available

pytestmark = pytest.mark.simulated

OFTEN = (
    "SparseEmbedding",
    "ShadowParameters",
    "OutputMapping",
    "TaskCounter",
    "LearnedBuffer",
    "Unfrozen",
    "NoiseInLoss",
    "CheckpointReentrant",
)
"""Rows that every test run has under `ALWAYS`."""
ALWAYS = ("ddp", "fsdp", "dp", "pipeline")
ON_HOST = ("SecondOptimizer", "AverageOfWeight", "ShadowParameters", "AverageBySchedule", "HeadOfOptimizer")
"""Rows whose tasks keep tensors on the host, where one process on one device fails loudly."""
SPARSE = ("SparseEmbedding",)
"""Rows with sparse tensors, which simulated devices of a kind from outside do not have."""
OF_THE_HOST = (
    "same device",
    "same type of devices",
    "on the cpu",
    "device type cpu",
    "cpu tensor",
    "on cuda:",
    "on fieldgpu:",
    "indices should be",
)
"""Words of torch about a task that keeps tensors on the host, which a CPU's run does not mind."""


def check_row(folder: Path, name: str, strategies: list[str], way: str, kind: str = "cuda") -> None:
    """Run a row under strategies on devices, and compare with one process on one device, whose draws are the same.

    If the task keeps tensors on the host, it is compared with one process on the CPU.
    """
    feature = replace(FEATURES[name], settings={**FEATURES[name].settings, "device": kind})
    try:
        reference = reference_of(feature, folder)
    except DureError as error:
        if name not in ON_HOST or not _is_of_the_host(str(error)):
            raise
        reference = reference_of(FEATURES[name], folder)
    else:
        assert name not in ON_HOST, "the row runs on a device now"
    verdicts = {strategy: run_cell(feature, strategy, way, reference, folder) for strategy in strategies}
    wrong = {strategy: str(one) for strategy, one in verdicts.items() if one.kind == "wrong" and not _is_loud(one)}
    assert not wrong, wrong


def _is_loud(verdict: Verdict) -> bool:
    return verdict.detail.startswith("exit code 1") and _is_of_the_host(verdict.detail)


def _is_of_the_host(message: str) -> bool:
    return any(words in message.lower() for words in OF_THE_HOST)


def _rows() -> list[Any]:
    marks = {name: [] if name in OFTEN else [pytest.mark.zoo] for name in FEATURES}
    return [pytest.param(name, marks=marks[name]) for name, feature in FEATURES.items() if is_available(feature)]


@pytest.mark.parametrize("name", _rows())
def test_row_on_devices_is_exact_declared_or_refused(name, simulated_devices, tmp_path):
    simulated_devices.call(check_row, tmp_path, name=name, strategies=ALWAYS, way="straight")


@pytest.mark.zoo
@pytest.mark.parametrize("way", ["killed", "resumed"])
@pytest.mark.parametrize("name", _rows())
def test_row_on_devices_killed_or_resumed_is_exact_declared_or_refused(name, way, simulated_devices, tmp_path):
    others = [name for name in STRATEGIES if name not in (*ALWAYS, "single", "averaging", "diloco")]
    simulated_devices.call(check_row, tmp_path, name=name, strategies=others, way=way)


@pytest.mark.zoo
@pytest.mark.parametrize("name", [row for row in _rows() if row.values[0] not in SPARSE])
def test_row_on_devices_from_outside_is_exact_declared_or_refused(name, devices_from_outside, tmp_path):
    settings = {"strategies": ALWAYS, "way": "straight", "kind": "fieldgpu"}
    devices_from_outside.call(check_row, tmp_path, name=name, **settings)
