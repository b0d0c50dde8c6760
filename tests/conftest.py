"""Fixtures of every test: a check that it leaves nothing behind, and a skip where there is no CUDA device."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Prewarmed
from tests.durations import Durations
from tests.leaks import clean_up, find_leaks, take_snapshot
from tests.long_tests import listed
from tests.parts import part, select
from tests.turns import turn

# Set before anything imports torch: a process that has computed with several threads cannot be forked into ranks.
# The ranks set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# most resume in a folder of their own what a task in the repository began (tests/api/test_task_trust.py takes it away)
os.environ.setdefault("DURE_TRUST_TASK", "true")
# pytest-xdist tells its workers a width; what a command shows without a terminal is to be the same with it and without
os.environ.pop("COLUMNS", None)
# hundreds of tests start an interpreter: each would compile dure anew, and every worker of pytest the tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

with suppress(ImportError):  # the cluster's tests do without
    import hypothesis

    # by default an example that takes 200 ms fails, which on a busy machine any may
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of CI."""
    parser.addoption("--record-durations", action="store_true", help="write the tests' durations as a line of JSON")
    parser.addoption(
        "--part", type=part, metavar="K/N", help="of the slow and the fault tests only the K-th of N parts"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where that is asked for, once for all workers of pytest-xdist."""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the other parts of the tests that `-m` has selected."""
    if chosen := config.getoption("--part"):
        items[:], others = select(items, *chosen)
        config.hook.pytest_deselected(items=others)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that takes long as slow."""
    if item.nodeid in listed():
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave what the collection made out of garbage collections, which take a quarter of the time of small tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a port, a thread, a process group or an environment variable."""
    before = take_snapshot()
    yield
    leaks = find_leaks(before)
    if leaks:
        clean_up(before)
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


_TURNS = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give the workers of pytest-xdist, where it is asked for, a folder in which they take turns."""
    if _TURNS not in node.config.stash:
        node.config.stash[_TURNS] = tempfile.TemporaryDirectory(prefix="dure-tests-")
    node.workerinput["turns"] = node.config.stash[_TURNS].name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let tests that are marked `alone` have the machine for themselves, and the others share it."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with turn(Path(item.config.workerinput["turns"]), alone=item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove that folder."""
    if _TURNS in config.stash:
        config.stash[_TURNS].cleanup()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Give the run of a task, made once for all tests that compare theirs with it, and changed by none of them."""
    from tests.conformance.cases import train_case

    runs: dict[Any, Path] = {}

    def run(task: Any, strategy: str = "single", nproc: int = 1, **settings: Any) -> Path:
        key = (type(task), repr(task), strategy, nproc, repr(sorted(settings.items())))
        if key not in runs:
            runs[key] = train_case(tmp_path_factory.mktemp("trained"), task, strategy, nproc, **settings)
        return runs[key]

    return run


@pytest.fixture(scope="session")
def prewarmed() -> Iterator[Prewarmed]:
    """Give a process with torch imported, from which `dure` commands start within tenths of a second."""
    server = Prewarmed()
    yield server
    server.close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where torch sees no CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
