"""Files and environment around a trial: what the user's code wrote is as before, and nothing else is touched."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from dure.strategies.state.objects.surroundings import Surroundings


def written(file: Path) -> None:
    file.write_text("new")


def appended(file: Path) -> None:
    with file.open("a") as stream:
        stream.write("more")


def appended_then_written(file: Path) -> None:
    appended(file)
    written(file)
    appended(file)


def saved_by_numpy(file: Path) -> None:
    np.savetxt(file, np.zeros(3))


@pytest.mark.parametrize("write", [written, appended, appended_then_written, saved_by_numpy])
@pytest.mark.parametrize("content", [None, "old"], ids=["new", "there"])
def test_file_when_it_was_written_then_it_is_as_before(write, content, tmp_path):
    file = tmp_path / "file.txt"
    if content is not None:
        file.write_text(content)
    surroundings = Surroundings()
    with surroundings.watched():
        write(file)
    assert surroundings.written() == ["file file.txt"]
    assert surroundings.put_back() == []
    assert (file.read_text() if file.exists() else None) == content


def test_file_of_another_thread_then_it_stays(tmp_path):
    surroundings = Surroundings()
    with surroundings.watched():
        thread = threading.Thread(target=written, args=[tmp_path / "file"])
        thread.start()
        thread.join()
    assert surroundings.written() == surroundings.put_back() == []
    assert (tmp_path / "file").read_text() == "new"


def test_file_that_a_library_keeps_for_itself_then_it_stays(tmp_path):
    surroundings = Surroundings()
    library = {"__name__": "torch.some_cache"}
    exec("def keep(file):\n    with open(file, 'w') as stream:\n        stream.write('cached')", library)
    with surroundings.watched():
        library["keep"](tmp_path / "file")
    surroundings.put_back()
    assert (tmp_path / "file").read_text() == "cached"


def test_environment_when_it_was_changed_then_it_is_as_before(monkeypatch):
    monkeypatch.setenv("ZOO_KEPT", "1")
    monkeypatch.setenv("ZOO_REMOVED", "1")
    surroundings = Surroundings()
    with surroundings.watched():
        os.environ.update(ZOO_KEPT="2", ZOO_NEW="3")
        del os.environ["ZOO_REMOVED"]
    assert surroundings.written() == [f"os.environ['ZOO_{name}']" for name in ("KEPT", "NEW", "REMOVED")]
    surroundings.put_back()
    assert [os.environ.get(f"ZOO_{name}") for name in ("KEPT", "NEW", "REMOVED")] == ["1", None, "1"]
