"""Proofs of scripts that divide the data, or reduce, by other means than DistributedSampler and DDP."""

from pathlib import Path

import pytest
import torch

from dure.api.prove import ProofSettings, prove
from dure.cli import main
from dure.errors import SpecInvalid
from dure.scripts.prove.certificate import Certificate

HERE = Path(__file__).parent
SHARES, HAND, HOROVOD = (str(HERE / name) for name in ("shares.py", "hand.py", "horovod_script.py"))

slow = pytest.mark.slow


def proven(script: str, variant: str) -> Certificate:
    face = "horovod" if script == HOROVOD else None
    return prove(ProofSettings(script=script, arguments=[variant], face=face))


@pytest.mark.parametrize(
    ("script", "variant"),
    [
        pytest.param(SHARES, "slices", marks=slow),
        pytest.param(SHARES, "divided stream", marks=slow),
        (SHARES, "augmented slices"),
        pytest.param(SHARES, "made at two lines", marks=slow),
        pytest.param(SHARES, "schedule by the sampler", marks=slow),
        pytest.param(SHARES, "sampler of batches", marks=slow),
        pytest.param(HAND, "dropout of an LSTM", marks=slow),
        pytest.param(HAND, "dropout of attention", marks=slow),
        (HAND, "FSDP1"),
        pytest.param(HAND, "FSDP1, original parameters, clipped", marks=slow),
        pytest.param(HAND, "FSDP2", marks=slow),
        (HAND, "weights averaged"),
        pytest.param(HAND, "accumulated, divided by ranks", marks=slow),
        (HOROVOD, "right"),
        pytest.param(HOROVOD, "accumulated and clipped", marks=slow),
    ],
)
def test_script_of_another_kind_when_it_is_right_then_it_is_equal(script: str, variant: str) -> None:
    found = proven(script, variant)
    has_own_precision = variant.endswith("clipped") and variant.startswith("FSDP1")  # it computes norms in float32
    assert (found.verdict, found.causes) == ("equal", [])
    assert found.precision == ("float32" if has_own_precision else "float64")
    assert found.num_sketched_steps == (0 if has_own_precision or variant.startswith("accumulated") else 6)
    assert any("weights are after each step" in note for note in found.notes) == (variant == "weights averaged")
    assert any("dropout was left out" in note for note in found.notes) == variant.startswith("dropout")


@pytest.mark.parametrize(
    ("script", "variant", "causes", "line"),
    [
        (SHARES, "overlapping slices", ["samples_seen_twice"], "DataLoader(TensorDataset(x[here]"),
        pytest.param(SHARES, "half slices", ["samples_never_seen"], "DataLoader(TensorDataset(x[here]", marks=slow),
        (SHARES, "unequal last batch", ["mean_of_means"], ".backward()"),
        pytest.param(
            SHARES, "undivided stream", ["same_samples_on_all_ranks"], "is_divided=False), BATCH)", marks=slow
        ),
        (SHARES, "undivided stream with noise", ["samples_seen_twice"], "noise=0.3), BATCH)"),
        pytest.param(
            SHARES, "augmented, undivided", ["same_samples_on_all_ranks"], "Augmented(x, y), BATCH", marks=slow
        ),
        pytest.param(SHARES, "the same draws", ["same_samples_on_all_ranks"], "WeightedRandomSampler(", marks=slow),
        pytest.param(SHARES, "long and unseeded", ["samples_seen_twice"], "order[RANK::RANKS]), 40)", marks=slow),
        (SHARES, "late schedule", ["scaled_learning_rate"], "torch.optim.SGD("),
        pytest.param(
            SHARES, "sampler of batches, no epoch", ["same_order_every_epoch"], "batch_sampler=Batches()", marks=slow
        ),
        pytest.param(SHARES, "plateau of a rank's loss", ["rates_part"], "plateau.step(", marks=slow),
        (SHARES, "rank 1 stops", ["other_numbers_of_steps"], "optimizer.step()"),
        (HAND, "clipped before the average", ["clipped_before_average"], "clip_grad_norm_(parameters, 0.1)"),
        pytest.param(HAND, "frozen part by rank", ["other_weights_at_the_start"], "loss.backward()", marks=slow),
        pytest.param(HAND, "frozen at another step", ["other_parameters"], "loss.backward()", marks=slow),
        pytest.param(HAND, "buffer of one rank", ["other_buffers"], "loss.backward()", marks=slow),
        pytest.param(
            HAND, "noise and ignored classes", ["other_draws", "mean_of_means"], "loss.backward()", marks=slow
        ),
        pytest.param(HAND, "weights averaged sometimes", ["gradients_not_averaged"], "loss.backward()", marks=slow),
        pytest.param(
            HAND, "norm, and scaled by rank", ["batchnorm_statistics", "mean_of_means"], "loss.backward()", marks=slow
        ),
        pytest.param(HAND, "norm of a later epoch", ["batchnorm_statistics"], "loss.backward()", marks=slow),
        pytest.param(HAND, "FSDP1, divided twice", ["gradients_scaled"], "loss.backward()", marks=slow),
        (HOROVOD, "no broadcast", ["other_weights_at_the_start"], "torch.optim.SGD("),
        pytest.param(HOROVOD, "plain optimiser", ["gradients_not_averaged"], ".backward()", marks=slow),
        pytest.param(HOROVOD, "summed", ["gradients_scaled"], ".backward()", marks=slow),
        pytest.param(HOROVOD, "scaled rate", ["scaled_learning_rate"], "torch.optim.SGD(", marks=slow),
        pytest.param(HOROVOD, "no sampler", ["same_samples_on_all_ranks"], "DataLoader(samples", marks=slow),
    ],
)
def test_script_of_another_kind_when_it_is_wrong_then_its_cause_and_line_are_named(
    script: str, variant: str, causes: list[str], line: str
) -> None:
    found = proven(script, variant)
    assert found.verdict == "differs"
    assert [each.id for each in found.causes] == causes
    file, _, number = found.causes[0].line.rpartition(":")
    assert file == script
    assert line in Path(script).read_text().splitlines()[int(number) - 1]


def test_script_when_only_rank_0_takes_steps_then_it_is_compared_and_the_others_are_not_seen() -> None:
    found = proven(HAND, "steps of rank 0")
    assert (found.verdict, found.causes, found.num_followed_steps) == ("unproven", [], 12)
    assert max(step.gradients for step in found.steps) < 1e-12
    assert any("rank 1 computes gradients and takes no step" in note for note in found.notes)


ENDLESS = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
samples = TensorDataset(torch.randn(24, 4))
for x, in DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, shuffle=False)):
    {first}
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
{last}
"""


@pytest.mark.parametrize(
    ("first", "last", "verdict", "note"),
    [
        ("time.sleep(60)", "", "unproven", "no rank takes a step of an optimiser within 1.5 s (--timeout)"),
        ("", "time.sleep(60)", "equal", "the ranks were ended after 1.5 s (--timeout) and 3 steps"),
    ],
)
def test_script_when_it_never_ends_then_what_it_has_done_in_time_is_compared(
    first: str, last: str, verdict: str, note: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDLESS.format(first=first or "pass", last=last))
    found = prove(ProofSettings(script=str(script), timeout_seconds=1.5))
    assert (found.verdict, found.causes) == (verdict, [])
    assert any(note in each for each in found.notes)


RESUMED = """
import os, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
first = 0
if os.path.exists("last.pt"):
    found = torch.load("last.pt")
    first = found["epoch"] + 1
    model.load_state_dict(found["model"])
model = torch.nn.parallel.DistributedDataParallel(model)
samples = TensorDataset(torch.randn(24, 4))
for epoch in range(first, 3):
    for x, in DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, shuffle=False)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict()}, "last.tmp")
        os.replace("last.tmp", "last.pt")
        torch.save(model.module.state_dict(), f"epoch{epoch}.pt")
    dist.barrier()
"""


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_checkpoints_when_the_script_goes_on_from_them_then_are_as_before_each_run(
    has_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(RESUMED)
    monkeypatch.chdir(tmp_path)
    if has_checkpoint:
        torch.save({"epoch": 0, "model": torch.nn.Linear(4, 1).double().state_dict()}, "last.pt")
        before = Path("last.pt").read_bytes()
    found = prove(ProofSettings(script="train.py"))
    assert (found.verdict, found.num_followed_steps) == ("equal", 6 if has_checkpoint else 9)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == ["last.pt"] * has_checkpoint
    assert not has_checkpoint or Path("last.pt").read_bytes() == before


def test_time_limit_when_it_is_no_time_then_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecInvalid, match="timeout is 0 but must be a number of seconds above 0"):
        prove(ProofSettings(script=HAND, timeout_seconds=0))
    assert main(["prove", HAND, "--timeout", "nan"]) == 2
    assert "timeout is nan but must be" in capfd.readouterr().err
