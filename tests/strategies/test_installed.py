"""Strategies that packages of others bring: by an entry point, with options of their own, and nothing installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dure.errors import SpecInvalid
from dure.records.run_dir import RunDir
from dure.spec import resolve
from dure.strategies.installed import Strategies
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, largest_difference, records_of, weights_of

OUTSIDE = Path(__file__).parents[1] / "outside"
TASK = f"{Path(__file__).parents[1] / 'conformance/tasks.py'}:Regression"
STEPS = ("--samples", "28", "--global-batch-size", "7", "--device", "cpu", "--threads", "1", "--quiet")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Give a folder as `pip install --target` leaves one, and a way to run dure that finds it."""
    site = tmp_path / "site"
    shutil.copytree(OUTSIDE, site)

    class Package:
        folder = tmp_path

        @staticmethod
        def found() -> Strategies:
            """Return the table as a process with that folder on its path has it."""
            monkeypatch.syspath_prepend(site)
            monkeypatch.delitem(sys.modules, "toy_options", raising=False)
            return Strategies(STRATEGIES[name] for name in STRATEGIES.own)

        @staticmethod
        def brings(**entries: str) -> None:
            """Write the entries, each to its name: `toy="toy_options:INFO"`."""
            info = site / "toy-1.0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
            lines = [f"{name} = {value}" for name, value in entries.items()]
            (info / "entry_points.txt").write_text("\n".join(["[dure.strategies]", *lines, ""]))

        @staticmethod
        def dure(*words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
            path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
            return subprocess.run(
                [sys.executable, "-m", "dure", *map(str, words)],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **environment},
            )

    found = Package()
    found.site = site
    found.brings(toy="toy_options:row")
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strategy_of_a_package_then_it_trains_as_one_process_and_its_option_is_set_in_every_way(package):
    (package.folder / "run.toml").write_text('strategy = "toy"\n[toy]\npieces = 3\n[fsdp]\nunits = "0"\n')
    two, runs = ("train", TASK, *STEPS, "--nproc", "2"), package.folder / "runs"
    assert package.dure("train", TASK, *STEPS, "--name", "one").returncode == 0
    one = weights_of(runs / "one")
    for name, words, environment, pieces in (
        ("flag", (*two, "--strategy", "toy", "--toy.pieces", "2"), {}, 2),
        ("toml", (*two, "--config", "run.toml"), {}, 3),
        ("variable", (*two, "--config", "run.toml"), {"DURE_TOY__PIECES": "4"}, 4),
    ):
        done = package.dure(*words, "--name", name, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        assert records_of(runs / name)[-1]["measured"]["pieces"] == pieces
        assert RunDir.open(runs / name).read_spec().options == {"pieces": pieces}
        assert largest_difference(weights_of(runs / name), one) < TO_ROUNDING


@pytest.mark.slow
def test_strategy_of_a_package_then_lists_and_help_know_it(package):
    rows = json.loads(package.dure("strategies", "--json").stdout)["strategies"]
    assert [row["name"] for row in rows] == [*STRATEGIES, "toy"]
    assert "\n## toy\n" in package.dure("strategies", "--markdown").stdout
    assert "--toy.pieces INT" in package.dure("train", "--strategy", "toy", "--help").stdout
    assert "--toy.pieces INT" in package.dure("train", "--help-all").stdout
    said = package.dure("train", TASK, "--toy.pices", "2").stderr
    assert said.startswith("dure: unknown flag '--toy.pices': did you mean --toy.pieces")


@pytest.mark.slow
def test_strategy_whose_class_cannot_be_imported_then_the_run_says_so_before_any_process_starts(package):
    (package.site / "toy_strategy.py").unlink()
    done = package.dure("train", TASK, *STEPS, "--nproc", "2", "--strategy", "toy")
    assert done.returncode == 3
    assert "strategy toy cannot be used, because toy_strategy:Toy cannot be imported" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (package.folder / "runs").exists()


# --- the table


def fault_of(strategies, strategy, **flags):
    with pytest.raises(SpecInvalid, match=r".") as caught:
        settle(strategies, strategy, **flags)
    (fault,) = caught.value.faults
    return fault


def settle(strategies, strategy, **flags):
    flags = {"task": "a.py:T", "strategy": strategy, **flags}
    return resolve(flags=flags, environ={}, config=None, task_defaults={}, strategies=strategies)


def test_strategy_of_a_package_then_suggestions_and_refusals_know_it(package):
    assert "did you mean toy?" in fault_of(package.found(), "tooy")
    assert fault_of(package.found(), "ddp", toy={"pieces": 2}) == (
        "flag --toy.pieces: strategy ddp has no option pieces: choose --strategy toy, or leave it out"
    )
    assert settle(package.found(), "toy", toy={"pieces": 2}).notes == ()


@pytest.mark.parametrize(
    ("entries", "name", "said"),
    [
        ({"toy": "no_such_module:row"}, "toy", "No module named 'no_such_module'"),
        ({"toy": "toy_options:no_such"}, "toy", "module 'toy_options' has no attribute 'no_such'"),
        (
            {"toy": "toy_options:NUMBER"},
            "toy",
            "toy_options:NUMBER gives a int, and not a StrategyInfo or a function that returns one",
        ),
        (
            {"toy": "toy_options:ToyOptions"},
            "toy",
            "toy_options:ToyOptions gives a ToyOptions, and not a StrategyInfo or a function that returns one",
        ),
        ({"toy": "toy_options:OTHER_NAME"}, "toy", "its row is called another"),
        (
            {"seed": "toy_options:SEED"},
            "seed",
            "its name is that of a setting, or not made of lower-case letters, digits and single _",
        ),
        ({"toy": "toy_options:UNKNOWN_SETTING"}, "toy", "its row names no_such as a setting, which is none"),
        ({"toy": "toy_options:NO_OPTIONS"}, "toy", "toy_options:NUMBER is no class of dure.spec.StrategyOptions"),
    ],
)
def test_entry_that_cannot_be_used_then_one_sentence_says_why_where_it_is_asked_for(entries, name, said, package):
    package.brings(**entries)
    found = package.found()
    sentence = f"strategy {name} of the package toy cannot be used ({said}): update or uninstall the package toy"
    assert (found.faults, list(found)) == ({name: sentence}, list(STRATEGIES))
    assert fault_of(found, name) == f"flag --strategy: {sentence}"
    assert settle(found, "ddp").notes == ()  # who does not ask for it is not disturbed


def test_entry_with_the_name_of_dures_own_then_that_is_used_and_a_sentence_says_so(package):
    package.brings(ddp="toy_options:row", toy="toy_options:row")
    found = package.found()
    assert found["ddp"] is STRATEGIES["ddp"]
    assert settle(found, "toy").notes == ()
    assert settle(found, "ddp").notes == (
        "the package toy brings a strategy ddp, which is dure's own name: update or uninstall the package toy",
    )


def test_list_of_strategies_when_an_entry_cannot_be_used_then_it_says_so(package):
    package.brings(toy="no_such_module:row")
    done = package.dure("strategies", "toy")
    assert (done.returncode, "No module named 'no_such_module'" in done.stderr) == (2, True)
    done = package.dure("strategies", "--json")
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 1)
