"""Run folders that are used again: options are kept in full; checkpoints may be gone."""

import json
import os
import shutil
import signal

import pytest

import dure
from dure.errors import Interrupted, Misuse, SpecInvalid
from tests.commands import RunFiles
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression


def test_options_when_left_out_then_are_recorded_in_full_with_their_types(tmp_path):
    run = train_case(tmp_path, Regression(kind="tokens"), samples=20)
    spec = json.loads((run / "spec.json").read_text())
    recorded = (spec.get("spec") or spec)["task_options"]
    assert (recorded["kind"], recorded["optimizer"], recorded["dropout"]) == ("tokens", "sgd", 0.0)
    assert recorded["layered"] is False
    assert isinstance(recorded["num_samples"], int)


def test_resume_when_a_task_of_the_same_options_is_given_then_goes_on_and_of_others_is_refused(tmp_path):
    run = train_case(tmp_path, Regression(), samples=20, global_batch_size=10)
    again = dure.train(Regression(), resume=run, samples=40, quiet=True, start="fork")
    assert again.samples == 40
    with pytest.raises(SpecInvalid, match="task option kind is 'tokens' but the run was begun with 'mean'"):
        dure.train(Regression(kind="tokens"), resume=run, samples=60, quiet=True, start="fork")


def test_resume_when_the_checkpoints_are_gone_then_starts_again_and_says_so(tmp_path, capfd):
    run = train_case(tmp_path, Regression(), samples=20, global_batch_size=10)
    shutil.rmtree(run / "checkpoints")
    summary = dure.train(resume=run, quiet=True, start="fork")
    assert (
        "there is no usable checkpoint: the run starts again, its records so far go to undone" in capfd.readouterr().err
    )
    assert summary.samples == 20
    assert len((run / "rank0.jsonl").read_text().splitlines()) == 2
    assert len((run / "undone.jsonl").read_text().splitlines()) == 2


def test_resume_when_there_is_no_checkpoint_yet_then_says_that_it_starts_from_the_beginning(tmp_path, capfd):
    class StoppedWhileItPrepares(Regression):
        def prepare_data(self):
            if not (tmp_path / "run/prepared").exists():
                (tmp_path / "run/prepared").touch()
                os.kill(os.getpid(), signal.SIGINT)

    task, settings = StoppedWhileItPrepares(), {"quiet": True, "start": "inline", "threads": 1}
    said = r"stopped before the first checkpoint; `dure\.train\(resume='.*run'\)` starts from the beginning"
    with pytest.raises(Interrupted, match=said):
        dure.train(task, runs_dir=tmp_path, name="run", samples=20, global_batch_size=10, **settings)
    sentence = "there is no checkpoint yet: the run starts from the beginning"
    assert sentence not in capfd.readouterr().err
    dure.train(task, resume=tmp_path / "run", **settings)
    assert capfd.readouterr().err.count(f"dure: {sentence}\n") == 1
    dure.train(task, resume=tmp_path / "run", samples=40, **settings)
    assert sentence not in capfd.readouterr().err
    assert [event["message"] for event in RunFiles(tmp_path / "run").events("warning")] == [sentence]


def test_export_when_the_folder_is_missing_then_one_sentence_says_so(tmp_path):
    run = train_case(tmp_path, Regression(), samples=20)
    with pytest.raises(
        Misuse, match=r"model.safetensors cannot be written \(No such file or directory\): give a file in"
    ):
        dure.export(run, tmp_path / "nowhere/model.safetensors")
    assert not (tmp_path / "nowhere").exists()


def test_run_when_its_folder_was_given_a_name_that_is_no_unicode_then_it_goes_on(tmp_path):
    run = train_case(tmp_path, Regression(), "ddp", 2, samples=20, global_batch_size=10)
    odd = run.rename(run.parent / "\udcff\u202e")
    assert dure.train(Regression(), resume=odd, samples=40, quiet=True, start="fork").samples == 40
