"""`dure` as it is typed: verbs, flags, what is refused, and what reaches the library."""

import errno
import importlib
import inspect
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dure.api
from dure.cli import main
from dure.cli.app import VERBS
from dure.cli.options.settings import setting_names, spell_out_truths
from dure.cli.options.task import take_task_options
from dure.errors import DiskFull, EnvironmentLacks, Interrupted, Misuse, SpecInvalid
from dure.records.step_record import Metric, RunSummary
from dure.spec import field_of, flag_name, kinds, option_names, resolve
from dure.strategies.table import STRATEGIES

TASK_FILE = """
import dure.training.task.task

class Small(dure.training.task.task.Task):
    hidden: int = 64
    "units of the hidden layer"
    pretrained: bool = True

    def build_model(self): ...
    def train_data(self): ...
    def build_optimizer(self, model): ...
    def loss(self, model, batch): ...
"""

SUMMARY = RunSummary(
    run="runs/x",
    status="completed",
    strategy="ddp",
    world_size=2,
    num_devices=2,
    device="cpu",
    precision="fp32",
    steps=4,
    samples=256,
    epochs=1.0,
    final_loss=0.5,
    metrics={"loss": Metric(value=0.25, count=64)},
    best=None,
    wall_seconds=1.0,
    samples_per_second=256.0,
)

LIMIT_SECONDS = 0.4
"""Limit of `dure --help` in seconds of processor time, since tests share the machine with others."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the library; keeps what it was called with."""
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def record(name: str, answer: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    evaluation = {"run": "runs/x", "checkpoint": "samples-1", "metrics": {"accuracy": {"value": 0.97, "count": 360}}}
    fake = SimpleNamespace(calls=calls, record=record, train=record("train", SUMMARY))
    fake.evaluate = record("evaluate", evaluation)
    fake.export = record(
        "export",
        {"file": "m.safetensors", "num_bytes": 2048, "checkpoint": "samples-1", "warnings": ["one is damaged"]},
    )
    monkeypatch.setitem(sys.modules, "dure.api.train", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(dure.api, "train", fake, raising=False)
    return fake


@pytest.fixture
def task_file(tmp_path: Path) -> str:
    (tmp_path / "small_task.py").write_text(TASK_FILE)
    return f"{tmp_path / 'small_task.py'}:Small"


# --- what reaches the library


def test_train_when_flags_are_given_then_only_they_are_passed_as_written(api: SimpleNamespace) -> None:
    line = "train a.py:T --epochs 10 --no-shuffle --compile --global-batch-size=512 --task.hidden 3 --config r.toml"
    assert main(line.split()) == 0
    settings = {"epochs": "10", "shuffle": False, "compile": True, "global_batch_size": "512"}
    options = {"task_options": {"hidden": "3"}}
    assert api.calls == [("train", ("a.py:T",), {"resume": None, "config": Path("r.toml"), **settings, **options})]


def test_train_when_resumed_then_needs_no_task(api: SimpleNamespace) -> None:
    assert main(["train", "--resume", "runs/x", "--nproc", "3"]) == 0
    assert api.calls == [("train", (None,), {"resume": Path("runs/x"), "config": None, "nproc": "3"})]


def test_evaluate_when_called_then_takes_the_best_unless_told(api: SimpleNamespace) -> None:
    assert main(["eval", "runs/x", "--nproc", "2"]) == main(["eval", "runs/x", "--which", "last"]) == 0
    expected = [{"which": "best", "nproc": "2"}, {"which": "last"}]
    assert [kwargs for _, _, kwargs in api.calls] == expected


DIGITS = f"{Path(__file__).parents[2] / 'examples/digits.py'}:Digits"


def test_flag_when_its_value_is_no_number_then_says_what_it_must_be(capsys: Any) -> None:
    assert main(["train", DIGITS, "--epochs", "three"]) == 2
    assert capsys.readouterr().err == "dure: flag --epochs: epochs is 'three' but must be a number above 0\n"


def test_flags_when_several_cannot_be_then_all_are_named(capsys: Any) -> None:
    assert main(["train", DIGITS, "--epochs", "-1", "--seed", "x", "--nproc", "1.5"]) == 2
    head, *faults = capsys.readouterr().err.splitlines()
    assert head == "dure: 3 settings are invalid:"
    assert [fault.split(":")[0].strip() for fault in faults] == ["flag --epochs", "flag --seed", "flag --nproc"]


def test_export_when_called_then_takes_the_last_and_says_what_was_written(api: SimpleNamespace, capsys: Any) -> None:
    assert main(["export", "runs/x", "m.safetensors"]) == 0
    assert api.calls == [("export", (Path("runs/x"), Path("m.safetensors")), {"which": "last"})]
    said = capsys.readouterr()
    assert said.err == "dure: one is damaged\n"
    assert said.out == "m.safetensors: last checkpoint samples-1, 2.0 KiB\n"


@pytest.mark.parametrize("name", setting_names())
def test_setting_when_it_exists_then_is_a_flag_that_the_library_gets(name: str, api: SimpleNamespace) -> None:
    is_bool = bool in kinds(field_of(name))
    assert main(["train", "a.py:T", flag_name(name), *(() if is_bool else ("7",))]) == 0
    table, _, inner = name.partition(".")
    given = api.calls[0][2][table]
    assert (given[inner] if inner else given) == (True if is_bool else "7")


@pytest.mark.parametrize(
    ("line", "spelled"),
    [
        ("--shuffle false", "--shuffle=false"),
        ("--no-compile", "--compile=false"),
        ("--shuffle a.py:T", "--shuffle a.py:T"),
        ("--seed 1", "--seed 1"),
    ],
)
def test_truths_when_spelled_in_any_form_then_are_one(line: str, spelled: str) -> None:
    assert spell_out_truths(line.split()) == spelled.split()


# --- task options


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--task.pretrained false", {"pretrained": "false"}),
        ("--task.num-layers=3", {"num_layers": "3"}),
        ("--task.rate -0.5 --seed 1", {"rate": "-0.5"}),
        ("--task.pretrained --seed 1", {"pretrained": "true"}),
        ("--no-task.pretrained", {"pretrained": "false"}),
    ],
)
def test_task_options_when_given_in_any_form_then_are_taken_out(line: str, options: dict[str, str]) -> None:
    rest, taken = take_task_options(["train", "a.py:T", *line.split()])
    assert taken == options
    assert rest[:2] == ["train", "a.py:T"]


def test_task_option_when_a_bare_flag_stands_before_the_task_then_does_not_eat_it() -> None:
    rest, taken = take_task_options(["train", "--task.pretrained", "a.py:T"])
    assert (rest, taken) == (["train", "a.py:T"], {"pretrained": "true"})


def test_task_option_when_given_twice_then_is_refused() -> None:
    with pytest.raises(Misuse, match=r"--task\.hidden is given twice"):
        take_task_options(["--task.hidden", "1", "--task.hidden", "2"])


def test_short_negative_when_the_task_has_that_option_then_sets_it(api: SimpleNamespace, task_file: str) -> None:
    assert main(["train", task_file, "--no-pretrained"]) == 0
    assert api.calls[0][2]["task_options"] == {"pretrained": "false"}


def test_help_when_a_task_is_named_then_shows_its_options(task_file: str, capsys: Any) -> None:
    assert main(["train", task_file, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Options of Small" in out
    assert "--task.hidden INT         units of the hidden layer [default: 64]" in out
    assert "--task.pretrained CHOICE  [choices: true, false] [default: true]" in out


# --- what is refused


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trian", "unknown command 'trian': did you mean train? known: train, "),
        ("absent.py:T", "unknown command 'absent.py:T': write `dure train absent.py:T`"),
        ("absent.py --nproc 2", "unknown command 'absent.py': write `dure run absent.py`"),
        ("--versio", "unknown flag '--versio': did you mean --version? known: --version, --help"),
        ("train a.py:T --epoch 3", "unknown flag '--epoch': use --epochs"),
        ("train a.py:T --no-such", "unknown flag '--no-such': "),
        ("runs --jsn", "unknown flag '--jsn': did you mean --json? known: --json, --runs-dir, --help"),
        ("runs x", "'x' is one argument too many: see `dure runs --help`"),
        ("train a.py:T --epochs", "flag --epochs has no value: see `dure train --help`"),
        ("train a.py:T --seed 1 --seed 2", "flag --seed is given twice: see `dure train --help`"),
        ("eval", "RUN is missing: see `dure eval --help`"),
        ("eval runs/x --which worst", 'Choose from: "best", "last": see `dure eval --help`'),
        ("strategies dpp", "unknown strategy 'dpp': did you mean dp? known: dp, ddp, "),
        ("runs --runs-dir /no/such", "/no/such is no folder: start a run"),
    ],
)
def test_line_when_it_cannot_be_then_one_sentence_and_exit_2(
    line: str, sentence: str, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.py").write_text(TASK_FILE.replace("Small", "T"))
    assert main(line.replace("a.py", str(tmp_path / "a.py")).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dure: ")
    assert err.count("\n") == 1
    assert sentence in err


@pytest.mark.parametrize(
    ("error", "code"),
    [(Misuse("a"), 2), (EnvironmentLacks("b"), 3), (Interrupted("c", 143), 143), (KeyboardInterrupt(), 130)],
)
def test_failure_when_json_is_asked_for_then_stdout_stays_empty(
    api: SimpleNamespace, capsys: Any, error: BaseException, code: int
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    api.train = fail
    assert main(["train", "a.py:T", "--json"]) == code
    out, err = capsys.readouterr()
    assert (out, err.startswith("dure: ")) == ("", True)


def test_faults_when_several_then_each_has_its_line(api: SimpleNamespace, capsys: Any) -> None:
    api.train = api.record("train", SpecInvalid(["one", "two"]))
    assert main(["train", "a.py:T"]) == 2
    assert capsys.readouterr().err == "dure: 2 settings are invalid:\n  one\n  two\n"


# --- what is printed


def test_train_when_json_then_stdout_is_the_summary_alone(api: SimpleNamespace, capsys: Any) -> None:
    assert main(["train", "a.py:T", "--json"]) == 0
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (SUMMARY.to_json(), "")


def test_json_when_a_number_is_not_finite_then_is_null(api: SimpleNamespace, capsys: Any) -> None:
    api.evaluate = api.record(
        "evaluate", {"checkpoint": "samples-1", "metrics": {"loss": {"value": float("nan"), "count": 0}}}
    )
    assert main(["eval", "runs/x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["loss"]["value"] is None


def test_train_when_quiet_then_prints_nothing(api: SimpleNamespace, capsys: Any) -> None:
    assert main(["train", "a.py:T", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_show_spec_when_asked_then_says_where_values_come_from(api: SimpleNamespace, capsys: Any) -> None:
    flags = {"task": "a.py:T", "task_options": {"hidden": "3"}}
    resolved = resolve(flags=flags, environ={"DURE_SEED": "3"}, config=None, task_defaults={}, strategies=STRATEGIES)
    api.resolve_settings = api.record("resolve_settings", resolved)
    assert main(["train", "a.py:T", "--show-spec"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "3", "environment", "DURE_SEED"] in lines
    assert ["task.hidden", "3", "flag", "--task.hidden"] in lines
    assert main(["train", "a.py:T", "--show-spec", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["spec"]["seed"], document["origin"]["seed"]) == (3, "environment DURE_SEED")


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("verb", ["--help", "train --help", "strategies", "runs", "eval runs/x"])
def test_output_when_the_terminal_is_narrow_then_no_line_is_wider(
    api: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any, verb: str, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(verb.split()) == 0
    assert max((len(line) for line in capsys.readouterr().out.splitlines()), default=0) <= int(columns)


def test_strategies_when_json_then_is_one_document_of_all(capsys: Any) -> None:
    assert main(["strategies", "--json"]) == 0
    names = [info["name"] for info in json.loads(capsys.readouterr().out)["strategies"]]
    assert {"single", "dp", "balanced_dp", "ddp"} <= set(names)


def test_strategies_when_markdown_then_is_a_page_of_all(capsys: Any) -> None:
    assert main(["strategies", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n## {name}\n" in page and f"| [`{name}`](#{name}) |" in page for name in STRATEGIES)
    assert main(["strategies", "--markdown", "--json"]) == 2


def test_runs_when_there_are_none_then_is_no_mistake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": []}


# --- the program


def _dure(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dure", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, check=False)


@pytest.mark.slow
def test_talk_when_torch_cannot_be_imported_then_works(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this command must not import torch')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    for arguments in (["--help"], ["--version"], ["strategies"], ["runs", "--json"], ["train", "--help"], ["trian"]):
        answer = _dure(*arguments, PYTHONPATH=path)
        assert (answer.returncode, "torch" in answer.stderr) == (2 if arguments == ["trian"] else 0, False)


@pytest.mark.parametrize("name", VERBS)
def test_verb_when_listed_then_its_summary_is_its_own_first_line(name: str) -> None:
    module = importlib.import_module(f"dure.cli.{VERBS[name].module}")
    _, command = module.read([name])
    assert (inspect.getdoc(command) or "").splitlines()[0] == VERBS[name].summary


def test_help_when_timed_then_is_there_at_once() -> None:
    times: list[float] = []
    # the same command takes a third longer whenever the processor is shared: the least of five is its own time
    while not times or (min(times) >= LIMIT_SECONDS and len(times) < 5):
        before = os.times()
        assert _dure("--help").returncode == 0
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(times) < LIMIT_SECONDS


def test_output_when_no_terminal_or_no_color_then_is_plain() -> None:
    assert "\x1b" not in _dure("strategies", NO_COLOR="1").stdout + _dure("strategies").stdout


def test_output_when_its_reader_goes_away_then_nothing_is_said() -> None:
    command = f"{sys.executable} -m dure strategies --json | true"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert answer.stderr == ""


def test_help_when_the_terminal_is_not_utf8_then_is_shown_all_the_same() -> None:
    answer = _dure("--help", PYTHONIOENCODING="ascii")
    assert (answer.returncode, "strategies" in answer.stdout, answer.stderr) == (0, True, "")


@pytest.mark.parametrize(
    "moment",
    ["weakref.finalize(main, ctrl_c)", "app.is_reporter = ctrl_c"],
    ids=["a library's finalizer", "the message of an error"],
)
def test_ctrl_c_when_the_command_is_over_then_there_is_no_traceback(moment: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys, weakref
from dure.cli import app, main
def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
{moment}
sys.argv = ["dure", "export", "nowhere"]
sys.exit(main())
"""
    words = [sys.executable, "-c", script]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (-signal.SIGINT, False)


def in_a_shell(words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    line = f"exec {shlex.quote(sys.executable)} -m dure {words}"
    return subprocess.run(["sh", "-c", line], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=60)


@pytest.mark.parametrize("words", ["strategies >&-", "strategies --json >&-", "strategies >&- <&-"])
def test_command_when_started_with_closed_streams_then_works_without_them(words: str, tmp_path: Path) -> None:
    done = in_a_shell(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full to meet a full disk")
@pytest.mark.parametrize("words", ["strategies --json", "strategies", "--help"])
def test_command_when_its_result_has_no_room_then_one_sentence_says_so(words: str, tmp_path: Path) -> None:
    done = in_a_shell(f"{words} >/dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr == "dure: the result cannot be written to stdout (No space left on device): send it elsewhere\n"


def test_strategies_when_none_is_named_then_an_overview_to_choose_from_comes_last(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["strategies"]) == 0
    last = capsys.readouterr().out.splitlines()[-40:]
    assert [line.split()[0] for line in last if line.split()[1:2] in (["yes"], ["no"])] == list(STRATEGIES)
    assert main(["strategies", "ddp"]) == 0
    assert "right when" not in capsys.readouterr().out.splitlines()[-1]


def test_help_when_the_terminal_is_of_the_usual_size_then_it_fits_two_screens(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 48
    assert max(map(len, shown)) <= 80
    words = " ".join(shown)
    assert all(flag in words for flag in ("--epochs", "--strategy", "--nproc", "--resume", "--name"))
    assert all(flag in words for flag in ("--strategy NAME", "--help-all"))
    assert "--fsdp." not in words.partition("In a TOML")[0].replace("--strategy", "")
    assert "--hang-after" not in words


@pytest.mark.parametrize("words", ["--strategy fsdp", "--strategy=fsdp", ""])
def test_help_when_a_strategy_is_named_then_shows_its_options_and_those_of_no_other(words, monkeypatch, capsys):
    if not words:
        monkeypatch.setenv("DURE_STRATEGY", "fsdp")
    assert main(["train", *words.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Options of strategy fsdp" in out
    assert all(flag in out for flag in ("--fsdp.units", "--no-fsdp.reshard-after-forward", "--fsdp.cpu-offload"))
    assert "--ddp." not in out


def test_help_of_everything_then_has_every_flag(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--help-all"]) == 0
    out = capsys.readouterr().out
    names = [*setting_names(), *option_names(STRATEGIES)]
    assert [flag_name(name) for name in names if flag_name(name) not in out] == []
    assert "Old names" not in out


def test_error_when_the_terminal_is_gone_then_the_exit_code_is_the_same(monkeypatch, tmp_path):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sys, "stderr", Gone())
    assert main(["runs", "--runs-dir", str(tmp_path / "none"), "--nope"]) == 2


@pytest.mark.parametrize(
    ("error", "file", "told"),
    [
        ("ImportError('failed to map segment')", "__init__.py", "failed to map segment"),
        # torch reads the variables of the environment at this time
        ("ValueError('TORCH_DISTRIBUTED_DEBUG must be OFF.')", "distributed/__init__.py", "TORCH_DISTRIBUTED_DEBUG mu"),
    ],
)
def test_command_when_torch_cannot_be_loaded_then_one_sentence_says_so(
    error: str, file: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_torch = compile(f"raise {error}", f"/v/torch/{file}", "exec")
    monkeypatch.setattr("dure.cli.app._run", lambda tokens: exec(import_torch))
    assert main(["train"]) == EnvironmentLacks.exit_code
    assert capsys.readouterr().err.startswith(f"dure: torch cannot be loaded ({told}")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_error_when_space_quota_or_file_size_is_used_up_then_is_a_full_disk(number: int) -> None:
    assert DiskFull.is_reported_by(OSError(number, os.strerror(number)))
