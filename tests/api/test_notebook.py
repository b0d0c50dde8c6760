"""dure in a real notebook kernel: tasks of cells, on one rank and on several, and what a person sees of them."""

import json

import pytest

from dure.cli import main
from tests.commands import RunFiles

pytestmark = pytest.mark.slow

TASK = """
import time
import torch
import dure

class Small(dure.Task):
    scale: float = 1.0
    seconds: float = 0.0

    def build_model(self):
        return torch.nn.Linear(2, 1)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.arange(24.0).view(12, 2))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(self, model, batch):
        time.sleep(self.seconds)
        return model(batch[0]).mean() * 0.0 + self.scale
"""
SETTINGS = "global_batch_size=2, threads=1"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    pytest.importorskip("ipykernel", reason="needs ipykernel, of dure[dev]")
    from tests.notebooks import Kernel

    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    yield kernel
    kernel.close()


@pytest.fixture
def defined(kernel):
    """Return the kernel with the task of its first cell."""
    assert kernel.run(TASK).error == ""
    return kernel


def train(kernel, task, name, *, more="", **watched):
    """Train in a cell; return what it showed, and the final loss as it was printed."""
    call = f"dure.train({task}, name={name!r}, {SETTINGS}{more and ', '}{more})"
    cell = kernel.run(f"print({call}.final_loss)", **watched)
    return cell, cell.streams["stdout"].strip()


@pytest.mark.parametrize("more", ["", "start='inline'", "nproc=2"], ids=["forked", "inline", "two ranks"])
def test_task_of_a_cell_when_it_is_trained_then_it_is_and_its_talk_is_in_the_cell(defined, more):
    name = f"run{len(more)}"
    cell, loss = train(defined, "Small(scale=3)", name, more=more)
    assert (cell.error, loss) == ("", "3.0")
    assert cell.screen[0].startswith("Small: ")
    assert cell.screen[2].endswith(f"runs/{name}")


def test_progress_when_it_is_redrawn_then_one_line_is_left_and_at_the_end_none(defined):
    cell, _ = train(defined, "Small(seconds=0.3)", "live", more="nproc=2")
    assert cell.streams["stderr"].count("samples/s") > 1
    assert cell.screen[3:] == ["epoch 1  train loss 1.0000"]


def test_class_of_a_cell_when_it_is_patched_or_defined_anew_then_the_newest_counts(defined):
    defined.run("Small.loss = lambda self, model, batch: model(batch[0]).mean() * 0.0 + 5.0")
    assert train(defined, "Small", "patched", more="nproc=2")[1] == "5.0"
    defined.run(TASK.replace("+ self.scale", "+ 7.0"))
    assert train(defined, "Small", "anew")[1] == "7.0"


def test_task_of_a_cell_when_it_fails_then_the_cells_own_line_is_shown_and_none_of_dures(defined):
    defined.run("class Bad(Small):\n    def loss(self, model, batch):\n        raise ValueError('a bad cell')")
    for more in ("nproc=2", "start='inline'"):
        cell, _ = train(defined, "Bad", f"bad{len(more)}", more=more)
        assert cell.error.startswith("WorkerFailed: ")
        assert "ValueError: a bad cell\n  Cell In[" in cell.error
        assert "]:3 in loss: raise ValueError('a bad cell')" in cell.error
        assert "/dure/" not in cell.traceback


@pytest.mark.parametrize("more", ["nproc=2", "start='inline'"])
def test_kernel_when_it_is_interrupted_then_the_run_is_saved_and_the_kernel_goes_on(defined, more):
    name = f"stopped{len(more)}"
    cell, _ = train(defined, "Small(scale=2, seconds=0.2)", name, more=f"{more}, epochs=9", interrupt_at="samples/s")
    assert cell.error.startswith("Interrupted: stopped; continue with `dure.train(resume=")
    run = RunFiles(defined.folder / "runs" / name)
    assert run.summary()["status"] == "interrupted"
    assert run.checkpoints()
    assert train(defined, "Small", f"after-{name}")[1] == "1.0"


def test_run_of_a_cells_task_when_it_goes_on_then_here_with_the_task_and_not_from_the_command_line(defined, capsys):
    train(defined, "Small(scale=4)", "begun", more="nproc=2")
    run = defined.folder / "runs/begun"
    again = f"dure.train(Small(scale=4), resume={str(run)!r}, epochs=2, quiet=True)"
    assert defined.run(f"print({again}.epochs)").streams["stdout"] == "2.0\n"
    refused = defined.run(again.replace("scale=4", "scale=5"))
    assert "task option scale is 5.0 but the run was begun with 4.0" in refused.error
    assert main(["train", "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert "because the task's class Small is not at the top level of a file: pass the task there again" in said
    assert said.count("\n") == 1
    assert json.loads((run / "summary.json").read_text())["epochs"] == 2.0


def test_settings_when_they_are_wrong_then_the_cell_shows_one_sentence_about_arguments(defined):
    cell = defined.run("dure.train(Small, nproc='many')")
    said = "argument nproc: nproc is 'many' but must be a whole number above 0 and of at most 4096"
    assert cell.traceback == f"SpecInvalid: {said}"
