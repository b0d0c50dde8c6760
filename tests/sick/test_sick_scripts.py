"""Scripts under `dure run --record`, slow for one reason each: `dure doctor` finds it first, and nothing in others."""

import re
from pathlib import Path

import pytest

from dure.doctor.findings import diagnose
from dure.records.run_dir import RunDir
from dure.records.step_columns import read_columns
from dure.records.step_record import PARTS
from tests.commands import Prewarmed

SCRIPT = Path(__file__).parent / "script.py"
SICK = {
    "waits_for_data": "--loading 0.003 --computing 0.01",
    "waits_for_data (loaders)": "--loading 0.01 --computing 0.01 --num-workers 1",
    "straggler": "--late 0.03 --computing 0.01",
    "straggler (first rank)": "--late 0.03 --computing 0.01 --late-rank 0",
    "too_small_to_distribute": "--computing 0 --metrics 10 --steps 150",
    "communication_bound": "--ballast 8000000 --computing 0.035 --steps 30",
    "bucket_size": "--layers 40 --width 128 --bucket-mb 0.01 --computing 0.03 --steps 60",
    "needless_unused_parameter_search": "--search",
    "uneven_shares": "--batch 4 12 --computing 0.02",
    "uneven_shares (changing)": "--uneven 0.03 --computing 0.01",
    "evaluation_on_one_rank": "--evaluates 0 --evaluating 0.005 --evaluate-every 20",
    "small_samples_per_step": "--batch 1 --accumulate 16 --computing 0.02 --steps 40",
    "python_bound": "--layers 100 --width 8 --computing 0 --steps 200",
    "evaluation_dominates": "--evaluating 0.005 --evaluate-every 20",
    "checkpoint_stalls": "--ballast 5000000 --computing 0.06 --save-every 1 --steps 40",
}
HEALTHY = {
    "two ranks": "",
    "loaders in time": "--loading 0.001 --computing 0.05 --num-workers 1",
    "evaluates seldom": "--evaluating 0.001 --evaluate-every 50",
    "accumulates": "--accumulate 4 --steps 40",
    "saves seldom": "--save-every 50",
}


def recorded(prewarmed: Prewarmed, folder: Path, arguments: str, *flags: str) -> tuple[Path, str]:
    words = ["run", "--nproc", "2", "--threads", "1", *flags, "--runs-dir", folder, "--name", "seen"]
    done = prewarmed.run(folder, *words, SCRIPT, *arguments.split())
    assert done.code == 0, done.err
    return folder / "seen", done.out


def found_in(run: Path) -> list[str]:
    return [finding.id for finding in diagnose(RunDir.open(run, or_script=True)).findings]


def digests(said: str) -> set[str]:
    return set(re.findall("weights ([0-9a-f]{64})", said))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", SICK)
def test_script_when_it_is_slow_then_its_reason_comes_first(name, prewarmed, tmp_path):
    run, _ = recorded(prewarmed, tmp_path, SICK[name], "--record")
    assert found_in(run)[:1] == [name.partition(" ")[0]]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", HEALTHY)
def test_script_when_it_is_healthy_then_nothing_is_found(name, prewarmed, tmp_path):
    run, _ = recorded(prewarmed, tmp_path, HEALTHY[name], "--record")
    assert found_in(run) == []


def test_script_when_it_is_recorded_then_it_computes_the_same_and_parts_add_up(prewarmed, tmp_path):
    (tmp_path / "plain").mkdir()
    few = "--steps 30 --computing 0.005 --accumulate 2 --save-every 10 --evaluating 0.001 --evaluate-every 10"
    run, said = recorded(prewarmed, tmp_path, few, "--record")
    _, plain = recorded(prewarmed, tmp_path / "plain", few)
    assert len(digests(said)) == 1
    assert digests(said) == digests(plain)
    for rank in range(2):
        columns = read_columns(run / f"rank{rank}.jsonl", with_measured=True)
        assert columns.steps.tolist() == list(range(1, 31))
        parts = sum(columns.values[f"{part}_seconds"] for part in PARTS)
        assert (parts <= columns.values["wall_seconds"] + 1e-6).all()
        assert parts[5:].sum() > 0.9 * columns.values["wall_seconds"][5:].sum()
        assert (columns.values["sync_seconds"] > 0).all()
        # the gradients of all weights, in each of two backwards
        assert (columns.values["sent_bytes"][5:] == 2 * 4 * (1 + 64 * 16 + 64 + 64 + 1)).all()
        assert (columns.measured["evaluation_seconds"] > 0.05).sum() == 3
        assert (columns.measured["saving_seconds"] > 0).sum() == 3


def test_script_when_it_is_not_recorded_then_there_are_no_records(prewarmed, tmp_path):
    run, _ = recorded(prewarmed, tmp_path, "--steps 5")
    assert not [*run.glob("rank*.jsonl")]
    assert found_in(run) == []
