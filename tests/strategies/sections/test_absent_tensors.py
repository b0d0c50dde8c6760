"""Absent tensors: who may use them while code of the task runs in some thread."""

import threading

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.sections.absent_tensors import guarded, made_absent


@pytest.fixture
def absent():
    return made_absent(nn.Parameter(torch.ones(2)), "0.weight")


def in_thread(call):
    found = []

    def run():
        try:
            found.append(call())
        except TaskInvalid as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


class Section:
    """Code of the task that runs in another thread until it is let go."""

    def __enter__(self):
        self._has_begun, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._has_begun.wait(10)
        return self

    def _run(self):
        with guarded():
            self._has_begun.set()
            self._ends.wait(10)

    def __exit__(self, *_):
        self._ends.set()
        self._thread.join()


def test_use_in_code_of_the_task_then_it_is_refused(absent):
    with pytest.raises(TaskInvalid, match=r"weights of 0\.weight are on another rank"), guarded():
        absent.clone()
    absent.clone()


@pytest.mark.parametrize(
    "raised", [None, RuntimeError("while copying the parameter")], ids=["nothing", "another error"]
)
def test_use_that_code_of_the_task_catches_then_it_is_refused_all_the_same(absent, raised):
    def catches():
        try:
            absent.clone()
        except TaskInvalid:
            if raised is not None:
                raise raised from None
        with guarded():  # the model is called later in the same loss
            pass

    with pytest.raises(TaskInvalid, match=r"weights of 0\.weight are on another rank"), guarded():
        catches()
    with guarded():
        pass


def test_use_in_a_thread_of_the_engine_then_it_is_refused(absent):
    with guarded():
        assert isinstance(in_thread(absent.clone), TaskInvalid)
    assert not isinstance(in_thread(absent.clone), TaskInvalid)


def test_copy_in_the_main_thread_while_another_computes_a_section_then_it_is_made(absent):
    with Section():
        absent.clone()


def test_guards_of_two_threads_that_end_in_the_order_they_began_in_then_none_is_left(absent):
    def uses():
        with guarded():
            section.__exit__()
            absent.clone()

    with Section() as section:
        with pytest.raises(TaskInvalid, match="on another rank"):
            uses()
        absent.clone()
        assert not isinstance(in_thread(absent.clone), TaskInvalid)
