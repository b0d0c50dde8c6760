"""Tests of the benchmarks without their measurements: how they compare, and what they print where there is no GPU."""

import importlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from dure.strategies.table import STRATEGIES

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def paired():
    spec = importlib.util.spec_from_file_location("paired", BENCHMARKS / "paired.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["paired"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["paired"]


def test_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians(paired):
    rows = paired.compare({"base": [1.0, 10.0, 2.0], "ours": [2.0, 10.0, 3.0]}, "base")
    assert (rows[1].ratio, rows[1].difference, rows[0].ratio) == (1.5, 1.0, 1.0)


def test_every_round_gives_each_candidate_one_turn(paired):
    turns = list(paired.random_rounds(["a", "b", "c"], 20, seed=0))
    assert all(sorted(name for number, name in turns if number == r) == ["a", "b", "c"] for r in range(20))
    assert len({tuple(name for number, name in turns if number == r) for r in range(20)}) > 2


def test_turns_time_dure_from_callback_to_callback(paired):
    ran = []
    turns = paired.Turns({"other": ran.append}, num_rounds=3, block=2)
    for step in range(1, 10):
        turns(step)
    assert ran == [2, 2, 2]
    assert [len(turns.seconds[name]) for name in ("other", "dure")] == [3, 3]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("script", ["gpu_check.py", "resnet50_gpu.py", "transformer_gpu.py"])
def test_check_without_a_gpu_says_so_in_one_sentence_and_exits_3(script):
    done = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert "there is no CUDA device here" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_gpu_check_has_a_place_for_every_strategy_on_one_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_check = importlib.import_module("gpu_check")
    for strategy in STRATEGIES:
        places = list(gpu_check.places_of(strategy).values())
        assert places
        assert all(place["strategy"] == strategy for place in places)
    assert all(callable(getattr(gpu_check, part)) for part in gpu_check.PARTS)


def test_wheels_for_a_gpu_machine_are_all_that_dure_needs_beside_torch_and_numpy():
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    names = {re.match(r"[\w-]+", need).group() for need in needs} - {"torch", "numpy"}
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (packages,) = [line.partition(":=")[2].split() for line in lines if line.startswith("GPU_PACKAGES")]
    while missing := {need for name in names for need in _requirements(name)} - names - {"torch", "numpy"}:
        names |= missing
    assert names <= {*packages}


def _requirements(name):
    plain = [need for need in importlib.metadata.requires(name) or [] if "extra ==" not in need]
    return {re.match(r"[\w-]+", need).group().lower() for need in plain}
