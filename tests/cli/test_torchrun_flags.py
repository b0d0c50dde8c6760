"""torchrun's flags under `dure run`: each is known, and most mean the same."""

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dure.cli import main
from dure.cli.options import torchrun_flags
from dure.errors import SpecInvalid


def test_flags_of_the_installed_torchrun_then_each_is_known_and_has_a_value_where_it_has_one_there():
    for action in get_args_parser()._actions:
        names = {torchrun_flags.bare_name(flag) for flag in action.option_strings} - {"h", "help"}
        assert names <= torchrun_flags.known(), "say in torchrun_flags.py what this flag means"
        for name in names:
            assert (name in torchrun_flags.TRUTHS) == (action.nargs == 0)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ([("--nproc_per_node", "2"), ("--max_restarts", "3")], ["--nproc", "2", "--max-restarts", "3"]),
        ([("--nnodes", "1:1")], ["--nnodes", "1"]),
        ([("--nnodes", "2"), ("--rdzv_endpoint", "h:1")], ["--nnodes", "2", "--rendezvous", "h:1"]),
        ([("--nnodes", "2"), ("--master_addr", "h"), ("--master_port", "1")], ["--nnodes", "2", "--rendezvous", "h:1"]),
        ([("-m", None), ("--hang_after", "3")], ["--module", "--hang-after", "3"]),
    ],
)
def test_flag_when_it_means_the_same_then_it_is_ours(given, ours):
    assert torchrun_flags.translated(given) == (ours, [])


def test_number_of_ranks_when_it_is_left_to_torchrun_then_a_line_says_what_differs():
    ours, (note,) = torchrun_flags.translated([("--nproc_per_node", "auto")])
    assert ours == ["--nproc", "auto"]
    assert "torchrun starts one per core" in note
    assert torchrun_flags.translated([("--nproc", "auto")]) == (["--nproc", "auto"], [])


@pytest.mark.parametrize("flags", [["--standalone"], ["--rdzv-backend", "c10d"], ["--tee", "3"], ["--master-port=1"]])
def test_flag_when_it_has_no_effect_then_a_line_says_why(flags, prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    run = prewarmed.run(tmp_path, "run", *flags, "script.py", "--standalone")
    assert (run.code, run.out) == (0, "['--standalone']\n")
    assert run.err.startswith(f"dure: {flags[0].partition('=')[0]} of torchrun has no effect: ")
    assert run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--log_dir", "x"], "--log-dir is a flag of torchrun; logs are in the run's folder: use --runs-dir DIR"),
        (["--no-python"], "--no-python is a flag of torchrun; dure run runs Python alone: start the program from"),
        (["--rdzv-backend", "etcd"], "--rdzv-backend is etcd but ranks meet at a store of dure's own: leave it out"),
        (["--start-method", "forkserver"], "--start-method is forkserver but must be fork or spawn"),
        (["--nnodes", "2", "--master-addr", "h"], "--master-addr and --master-port go together: give both"),
        (["--nnodes", "1:2"], "nnodes is 1:2, but a script needs all its hosts"),
        (["--nproc-per-node", "gpu"], "nproc is gpu but torch sees none here: use --nproc cpu, or a number"),
        (["--local-ranks-filter", "a"], "local_ranks_filter is 'a' but must be local ranks, as 0,1"),
    ],
)
def test_flag_when_dure_has_another_way_then_a_sentence_names_it(flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    monkeypatch.setattr("dure.api.script.count_all_accelerators", lambda: 0)
    assert main(["run", *flags, "script.py"]) == 2
    assert sentence in capsys.readouterr().err


def test_every_refused_flag_then_has_a_cure():
    for name in torchrun_flags.REFUSED:
        with pytest.raises(SpecInvalid, match=f"^--{name} is a flag of torchrun; .*: "):
            torchrun_flags.translated([(f"--{name}", "x")])


def test_flag_when_it_stands_after_the_script_which_refuses_it_then_a_hint_says_so(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    run = prewarmed.run(tmp_path, "run", "script.py", "--nproc", "2")
    assert run.code == 2
    assert "--nproc stands after the script and so went to it: flags of dure run stand before the script" in run.err


def test_flag_when_the_script_understands_it_then_no_hint_is_given(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("import sys; sys.exit(3)")
    run = prewarmed.run(tmp_path, "run", "script.py", "--nproc", "2")
    assert (run.code, "stands after" in run.err) == (3, False)


def test_ranks_when_filtered_and_given_a_role_then_the_others_are_in_their_logs_alone(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text("import os; print(os.environ['ROLE_NAME'])")
    flags = ["--local-ranks-filter", "1", "--role", "trainer", "--name", "one"]
    run = prewarmed.run(tmp_path, "run", "--nproc=2", *flags, "script.py")
    assert run.out == "[rank 1] trainer\n"
    assert "trainer" in (tmp_path / "runs/one/logs/rank0.log").read_text()


def test_ranks_when_there_are_more_than_cores_then_a_line_says_so(monkeypatch, tmp_path, capfd):
    from dure.host import devices as machine

    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    assert machine.crowding(2) is None
    assert machine.crowding(99) == "99 ranks share 2 cores, and so take turns: fewer may be as fast"
    monkeypatch.setattr(machine, "count_cores", lambda: 1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    assert main(["run", "--nproc", "2", "script.py"]) == 0
    assert capfd.readouterr().err == "dure: 2 ranks share 1 core, and so take turns: fewer may be as fast\n"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["script.py", "--lr", "1"], ["--lr", "1"]),
        (["--", "script.py", "--lr", "1"], ["--lr", "1"]),
        (["--nproc", "1", "--", "script.py", "--nproc", "3"], ["--nproc", "3"]),
        (["-m", "--", "script", "--help"], ["--help"]),
        (["script.py", "--", "--lr"], ["--", "--lr"]),
    ],
)
def test_arguments_when_they_stand_after_the_script_then_they_are_its_own(words, arguments, monkeypatch):
    given = []
    monkeypatch.setattr("dure.api.script.run_script", given.append)
    assert main(["run", *words]) == 0
    assert (Path(given[0].script).stem, list(given[0].arguments)) == ("script", arguments)


@pytest.mark.parametrize("flag", ["--lr", "--warmup", "--dropout"])
def test_flag_of_a_script_when_it_stands_before_it_then_no_task_is_spoken_of(flag, capsys):
    assert main(["run", flag, "1", "script.py"]) == 2
    said = capsys.readouterr().err
    assert "a flag of the script's own stands after the script" in said
    assert "task" not in said
