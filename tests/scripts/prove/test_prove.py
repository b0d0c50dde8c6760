"""Proofs of right and wrong scripts."""

import json
from pathlib import Path
from typing import Any

import pytest

from dure.api.prove import ProofSettings, prove
from dure.cli import main
from dure.errors import Misuse, SpecInvalid, WorkerFailed
from dure.scripts.prove.certificate import Certificate

SCRIPT = str(Path(__file__).with_name("script.py"))


def proven(*arguments: str, **settings: Any) -> Certificate:
    return prove(ProofSettings(script=SCRIPT, arguments=arguments, **settings))


def line_of(text: str) -> int:
    lines = Path(SCRIPT).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


@pytest.mark.parametrize(
    "variant",
    [
        "right", "adam", "by hand", "accumulated", "accumulated without division", "padded", "uneven", "evaluated",
        "schedule", "seed by rank", "dropout", "persistent workers", "evaluated in a loop", "evaluated first by rank 0",
        "looked at a batch", "wrapped optimiser", "drawn with replacement", "left at once",
    ],
)  # fmt: skip
def test_script_when_it_is_right_then_it_is_equal(variant: str) -> None:
    found = proven(variant)
    assert (found.verdict, found.causes, found.precision) == ("equal", [], "float64")
    assert len(found.steps) == 6
    assert all(max(step.gradients, step.weights, step.gradients_between_ranks) < 1e-12 for step in found.steps)
    assert any("dropout was left out" in note for note in found.notes) == (variant == "dropout")
    assert any("1 sample of an epoch are used twice" in note for note in found.notes) == (variant == "padded")


@pytest.mark.parametrize(
    ("variant", "cause", "line"),
    [
        ("no sampler", "same_samples_on_all_ranks", "return DataLoader(samples, batch_size=BATCH), None"),
        ("shuffled by each rank", "samples_seen_twice", "shuffle=True), None"),
        ("half the data", "samples_never_seen", "sampler=sampler), sampler"),
        ("half a part", "samples_never_seen", "DataLoader(samples, BATCH,"),
        ("shuffled list", "samples_seen_twice", "order[dist.get_rank()"),
        ("loaders made again, no epoch", "same_order_every_epoch", "sampler=DistributedSampler(samples))"),
        ("no epoch", "same_order_every_epoch", "loader = DataLoader("),
        ("weighted mean", "mean_of_means", "backward()"),
        ("contrastive", "mean_of_means", "backward()"),
        ("uneven shares", "mean_of_means", "backward()"),
        ("noise", "other_draws", "backward()"),
        ("sum divided twice", "gradients_scaled", "backward()"),
        ("summed", "gradients_scaled", "backward()"),
        ("no average", "gradients_not_averaged", "backward()"),
        ("one parameter left out", "gradients_not_averaged", "backward()"),
        ("module called", "gradients_not_averaged", "backward()"),
        ("accumulated, never synchronised", "gradients_not_averaged", "backward()"),
        ("seed by rank, no wrapper", "other_weights_at_the_start", "torch.optim.SGD"),
        ("scaled rate", "scaled_learning_rate", "torch.optim.SGD"),
        ("batchnorm", "batchnorm_statistics", "backward()"),
        ("clipped by each", "gradients_scaled_by_rank", "optimizer.step()"),
        ("rate of a rank", "rates_part", "optimizer.step()"),
        ("weights of a rank", "weights_part", "optimizer.step()"),
        ("rank 0 steps on", "weights_part", "optimizer.step()"),
    ],
)
def test_script_when_it_is_wrong_then_its_cause_and_line_are_named(variant: str, cause: str, line: str) -> None:
    found = proven(variant)
    assert found.verdict == "differs"
    assert [each.id for each in found.causes] == [cause]
    assert found.causes[0].line == f"{SCRIPT}:{line_of(line)}"
    assert found.causes[0].is_fault == (cause != "other_draws")


def test_gradient_when_it_was_not_averaged_then_it_is_named() -> None:
    (cause,) = proven("one parameter left out").causes
    assert cause.what.startswith("the gradient of first.bias was not averaged over the ranks before the step")


def test_script_when_three_ranks_are_compared_then_one_gets_the_samples_of_all() -> None:
    found = proven("right", nproc=3, steps=2)
    assert [(step.num_samples, step.step) for step in found.steps] == [(12, 1), (12, 2)]
    assert found.verdict == "equal"


def test_batch_size_when_its_argument_is_named_then_one_process_gets_that_of_all() -> None:
    assert proven("schedule", "--batch-size", "5", batch_size_argument="--batch-size").verdict == "equal"
    with pytest.raises(Misuse, match="no number after it: add it"):
        proven("right", batch_size_argument="--batch-size")


def written(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


WITHOUT_LOADER = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    model(torch.randn(8, 4) + dist.get_rank()).square().mean().backward()
    optimizer.step()
"""

ONLY_FLOAT32 = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
class Clock(torch.utils.data.Dataset):
    def __len__(self): return 24
    def __getitem__(self, index): return torch.full((4,), time.time() % 1 + index)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for x in DataLoader(Clock(), batch_size=4, sampler=DistributedSampler(Clock(), shuffle=False)):
    model(x.float()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_script_without_loader_when_it_is_compared_then_only_its_ranks_are(tmp_path: Path) -> None:
    found = prove(ProofSettings(script=written(tmp_path, WITHOUT_LOADER)))
    assert (found.verdict, found.causes, len(found.steps)) == ("unproven", [], 3)
    assert "not from a torch.utils.data.DataLoader" in found.notes[0]


def test_script_when_it_allows_no_float64_and_reads_the_clock_then_both_are_said(tmp_path: Path) -> None:
    found = prove(ProofSettings(script=written(tmp_path, ONLY_FLOAT32)))
    assert (found.verdict, found.precision) == ("equal", "float32")
    assert "fails in float64" in found.notes[0]
    assert any("the same sample otherwise each time" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("print(1)", Misuse, "takes no step of a torch optimiser in its ranks"),
        ("raise SystemExit(3)", WorkerFailed, "exit code 3"),
        ("def f(:", WorkerFailed, "SyntaxError"),
        (
            "import torch.multiprocessing as mp\ndef f(rank): pass\nmp.spawn(f, nprocs=2)",
            WorkerFailed,
            "starts its ranks by itself",
        ),
    ],
)
def test_script_when_nothing_can_be_compared_then_says_so(text, kind, said, tmp_path: Path) -> None:
    with pytest.raises(kind, match=said):
        prove(ProofSettings(script=written(tmp_path, text)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"nproc": 1}, "nproc is 1 but must be from 2 to 64"),
        ({"steps": 0}, "steps is 0 but must be from 1"),
        ({"script": "none.py"}, "none.py does not exist: give the path"),
    ],
)
def test_settings_when_nothing_could_be_proven_then_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecInvalid, match=said):
        prove(ProofSettings(**{"script": SCRIPT, **settings}))


def test_command_when_a_script_is_wrong_then_writes_a_certificate_and_ends_with_4(tmp_path: Path, capfd) -> None:
    file = tmp_path / "certificate.json"
    assert main(["prove", SCRIPT, "--output", str(file), "--", "summed"]) == 4
    out, err = capfd.readouterr()
    assert "gradients_scaled  the gradients are summed over the ranks, not averaged (step 1)" in out
    assert err.startswith("dure: ")
    assert "does not compute on 2 ranks what it computes on one" in err
    record = json.loads(file.read_text())
    assert (record["version"], record["verdict"], record["arguments"]) == (1, "differs", ["summed"])
    assert len(record["sha256"]) == 64
    assert {"python", "torch", "dure"} == {*record["versions"]}


def test_command_when_a_script_is_right_then_ends_with_0_and_shows_nothing_of_its_output(tmp_path, capfd) -> None:
    assert main(["prove", SCRIPT, "--arguments", "evaluated", "--json", "--output", str(tmp_path / "c.json")]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["verdict"] == "equal"
    assert not err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arguments", "'a", "--nproc", "2"], "close every quotation mark"),
        (["--arguments", "a", "--", "b"], "arguments are given twice"),
        (["--output", "none/there.json"], "no such folder"),
    ],
)
def test_command_when_its_words_are_wrong_then_ends_with_2(words: list[str], said: str, capfd) -> None:
    assert main(["prove", SCRIPT, *words]) == 2
    assert said in capfd.readouterr().err
