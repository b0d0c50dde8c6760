"""Copies of values that are divided over a tensor group."""

import threading

import torch

from dure.strategies.tensor_parallel import boundary
from dure.strategies.tensor_parallel.boundary import has_copies, mark_as_copy


def test_copy_when_a_thread_of_the_collective_holds_it_for_some_time_then_the_value_has_none():
    value = torch.ones(3)
    held = [mark_as_copy(torch.ones(3), value)]
    thread = threading.Timer(0.05, held.clear)
    thread.start()
    assert not has_copies(value)
    thread.join()


def test_copy_when_the_model_keeps_a_view_of_it_then_the_value_has_one(monkeypatch):
    monkeypatch.setattr(boundary, "_RELEASE_SECONDS", 0.1)
    value = torch.ones(3)
    view = mark_as_copy(torch.ones(3), value)[:1]
    assert has_copies(value)
    del view
    assert not has_copies(value)
