"""What every test gets: a check that it leaves nothing behind, and a skip where there is no CUDA device."""

import os
from collections.abc import Iterator

import pytest

from tests.commands import Prewarmed
from tests.leaks import clean_up, find_leaks, take_snapshot

# Set before anything imports torch: a process that has computed with several threads cannot be forked into ranks.
# The ranks set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a port, a thread, a process group or an environment variable."""
    before = take_snapshot()
    yield
    leaks = find_leaks(before)
    if leaks:
        clean_up(before)
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


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
