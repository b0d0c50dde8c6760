"""Tests of the delivery to a tracker that is well, down, or hangs."""

import threading
from pathlib import Path

import pytest

from dure.records.run_dir import RunDir
from dure.tracking import delivery as module
from dure.tracking.delivery import Delivered, Delivery
from dure.tracking.tracker import Subject
from tests.tracking.test_points import _step


class _Fake:
    """Tracker that fails a number of times, or hangs until it is released."""

    def __init__(self, failures=0, hangs=False):
        self.failures, self.hangs, self.released = failures, hangs, threading.Event()
        self.begun, self.points, self.statuses = [], [], []

    def begin(self, subject, identity):
        self.begun.append(identity)
        return "its-id"

    def write(self, points):
        if self.hangs:
            self.released.wait(30)
        if self.failures:
            self.failures -= 1
            try:
                raise ConnectionError("no route\nto the server")
            except ConnectionError as error:
                raise RuntimeError("a long story " * 100) from error
        self.points += points

    def end(self, status):
        self.statuses.append(status)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_INTERVAL_SECONDS", 0.01)
    run = RunDir.create(tmp_path, "run")
    run.records_path(0).write_text("".join(_step(step, 10.0 + step) for step in range(1, 6)))

    def start(fake, before=None):
        monkeypatch.setattr(module, "make_tracker", lambda name: fake)
        warnings, saved = [], []
        subject = Subject(folder=Path(run.path), name="run", parameters={})
        delivery = Delivery(
            "mlflow", subject, before or Delivered(), global_batch_size=8, warn=warnings.append,
            save=lambda: saved.append(delivery.to_json()),
        )  # fmt: skip
        delivery.start()
        return delivery, warnings, saved

    return start


def test_delivery_when_the_tracker_is_well_then_it_has_every_point_and_the_status(start):
    fake = _Fake()
    delivery, warnings, saved = start(fake)
    delivery.end("completed")
    assert delivery.wait(5)
    assert ([point.step for point in fake.points], fake.statuses, warnings) == ([1, 2, 3, 4, 5], ["completed"], [])
    assert saved[-1] == {"identity": "its-id", "times": (15.0, 0.0)}


def test_delivery_when_a_run_goes_on_then_its_identity_and_only_new_points_are_handed_over(start):
    fake = _Fake()
    delivery, _, _ = start(fake, Delivered(identity="earlier", times=(13.0, 0.0)))
    delivery.end("failed")
    assert delivery.wait(5)
    assert (fake.begun, [point.step for point in fake.points], fake.statuses) == (["earlier"], [4, 5], ["failed"])


def test_delivery_when_the_tracker_fails_for_a_while_then_one_sentence_is_printed_and_nothing_lost(start):
    fake = _Fake(failures=3)
    delivery, warnings, _ = start(fake)
    delivery.end("completed")
    assert delivery.wait(10)
    assert [point.step for point in fake.points] == [1, 2, 3, 4, 5]
    (warning,) = warnings
    assert warning.startswith("mlflow does not take what the run logs (ConnectionError: no route to the server)")


def test_delivery_when_the_tracker_hangs_then_the_points_that_it_lacks_are_counted(start):
    fake = _Fake(hangs=True)
    delivery, _, saved = start(fake)
    delivery.end("completed")
    assert not delivery.wait(0.2)
    assert delivery.count_left() == 5
    assert saved[-1]["times"] == (0.0, 0.0)
    fake.released.set()
    assert delivery.wait(5)


def test_delivery_when_another_host_goes_on_then_the_run_is_not_ended(start):
    fake = _Fake()
    delivery, _, _ = start(fake)
    delivery.end("left")
    assert delivery.wait(5)
    assert (len(fake.points), fake.statuses) == (5, [])
