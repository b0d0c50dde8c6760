"""Errors name what the caller wrote: arguments in Python, flags on the command line."""

from pathlib import Path

import pytest

import dure
from dure.cli import main
from dure.errors import RunInvalid, SpecInvalid
from dure.spec import SETTINGS, flag_name
from dure.spec.arguments import as_arguments
from tests.training.session.test_session import Small, train


@pytest.mark.parametrize(
    ("said", "in_python"),
    [
        ("flag --nproc: nproc is 'x' but must be", "argument nproc: nproc is 'x' but must be"),
        ("flag --epochs and flag --samples both", "argument epochs and argument samples both"),
        ("use --nproc 4, or raise", "use nproc=4, or raise"),
        ("leave --nproc out", "leave nproc= out"),
        ("use a smaller --microbatch-size.", "use a smaller microbatch_size=."),
        ("use --strategy ddp or fsdp", 'use strategy="ddp" or fsdp'),
        ("choose another axis or --strategy", "choose another axis or strategy="),
        ("use --start fork, or leave it out", 'use start="fork", or leave it out'),
        ("--device that is there", "device= that is there"),
        ("--mesh data=2,pipeline=2 needs", 'mesh="data=2,pipeline=2" needs'),
        ("--drop-last with 6 samples", "drop_last=True with 6 samples"),
        ("with --no-compile: slower", "with compile=False: slower"),
        ("set --no-fsdp.cpu-offload, or", 'set fsdp={"cpu_offload": False}, or'),
        ("name some with --fsdp.units, or", 'name some with fsdp={"units": ...}, or'),
        ("pass --ddp.find-unused-parameters=true, or", 'pass ddp={"find_unused_parameters": True}, or'),
        ("flag --ring-ddp.message-size: no", 'argument ring_ddp["message_size"]: no'),
        ("--shuffle false keeps", "shuffle=False keeps"),
        ("--config run.toml cannot be read", 'config="run.toml" cannot be read'),
        ("give --task.hidden-size", "give task option hidden_size"),
        ("flag --task.hidden: no", "task option hidden: no"),
        ("`dure train --resume runs/a b` goes on", "`dure.train(resume='runs/a b')` goes on"),
        ("see `dure preflight --nnodes 2`: all", "see `dure preflight --nnodes 2`: all"),
        ("--no-such-flag 3 and a -- b", "--no-such-flag 3 and a -- b"),
    ],
)
def test_sentence_when_it_is_said_to_python_then_flags_are_arguments(said, in_python):
    assert as_arguments(said) == in_python


@pytest.mark.parametrize("name", SETTINGS)
def test_flag_of_a_setting_when_it_is_said_to_python_then_none_is_left(name):
    assert "--" not in as_arguments(f"use another {flag_name(name)}, or {flag_name(name)} 3")


def test_train_when_settings_are_wrong_then_all_are_named_as_arguments(tmp_path):
    with pytest.raises(SpecInvalid, match="argument nproc") as caught:
        train(Small, tmp_path, nproc="many", gpus=2, diloco={"outer_lr": 0.5}, task_options={"width": 3})
    assert "--" not in str(caught.value)
    assert caught.value.faults[0] == "argument gpus: unknown setting 'gpus': use nproc="
    assert str(caught.value) == "\n".join(caught.value.faults)


def test_train_when_a_rank_refuses_then_its_sentence_names_arguments_too(tmp_path):
    with pytest.raises(dure.WorkerFailed, match=r"drop_last=True with 6 training samples .* leaves nothing"):
        train(Small, tmp_path, drop_last=True, global_batch_size=7)


def test_the_same_error_when_the_command_line_called_then_names_flags(tmp_path, capsys):
    path = f"{Path(__file__).parents[1] / 'training/session/test_session.py'}:Small"
    words = ["train", path, "--runs-dir", str(tmp_path), "--start", "inline", "--quiet", "--drop-last"]
    assert main([*words, "--global-batch-size", "7"]) == 2
    assert "--drop-last with 6 training samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epochs": 3}, "epochs= is given, but an evaluation takes it from the run: leave it out"),
        ({"strategy": "fsdp"}, "strategy= is given, but an evaluation takes it from the run: leave it out"),
        ({"epoch": 3}, "unknown setting 'epoch'"),
        ({"gpus": 3}, "unknown setting 'gpus': use nproc="),
    ],
)
def test_evaluation_when_it_is_given_what_it_does_not_use_then_refuses(settings, said, tmp_path):
    class Evaluated(Small):
        def eval_data(self):
            return self.train_data()

    run = train(Evaluated, tmp_path).run
    with pytest.raises(SpecInvalid, match=said):
        dure.evaluate(run, task=Evaluated, **settings)


def test_names_that_are_taken_when_given_again_then_say_so_in_python_words(tmp_path):
    train(Small, tmp_path, name="run")
    with pytest.raises(
        RunInvalid, match=r"choose another name=, or continue that run with `dure\.train\(resume='.*'\)`"
    ):
        train(Small, tmp_path, name="run")
