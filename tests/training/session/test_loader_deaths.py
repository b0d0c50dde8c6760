"""Deaths of loader processes, and batches that never arrive, are raised where a batch is awaited."""

import multiprocessing
import os
import signal
import time
from pickle import PicklingError

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from dure.failures.report import describe_failure
from dure.training.session.loader import FetchRequest, Loader, SampleFetch
from dure.training.session.loader_deaths import LoaderDeaths

ENDED = r"DataLoader worker \(pid.* (exited unexpectedly|is killed by signal)"


class Slow(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.1 * (index > 8))
        return torch.ones(2)


@pytest.fixture
def batches():
    fetch = SampleFetch(Slow(), torch.stack, seed=0)
    requests = [FetchRequest(0, np.arange(begin, begin + 8)) for begin in range(0, 64, 8)]
    return Loader(fetch, torch.device("cpu"), num_workers=1).batches(requests)


def end_loader():
    (loader,) = multiprocessing.active_children()
    loader.kill()
    while psutil.Process(loader.pid).status() != psutil.STATUS_ZOMBIE:  # `join` would take the zombie away from torch
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGCHLD)  # however late that of the kernel is delivered


def test_death_between_two_batches_is_raised_with_the_next(batches):
    next(batches)
    end_loader()
    time.sleep(0.05)  # by itself torch raises here
    with pytest.raises(RuntimeError, match=ENDED) as raised:
        next(batches)
    raised.value.__traceback__ = raised.value.__traceback__.tb_next  # this test stands where dure's own code does
    assert describe_failure(raised.value, rank=0, step=3).origin == "library"  # after dure's own there is no restart


def test_death_while_a_batch_is_awaited_is_raised_at_once(batches):
    next(batches)
    (loader,) = multiprocessing.active_children()
    before = signal.signal(signal.SIGALRM, lambda *_: loader.kill())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=ENDED):
        next(batches)
    signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - begun < 4  # torch looks every five seconds


class NoSharedMemory(torch.Tensor):
    """Tensor that cannot be moved to shared memory."""

    def __reduce_ex__(self, protocol):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.parametrize(
    ("collate", "message", "advice"),
    [
        (lambda samples: (torch.stack(samples), lambda: None), "[Cc]an't (get|pickle) local", None),
        (lambda samples: torch.stack(samples).as_subclass(NoSharedMemory), "unable to allocate", "--shm-size=8g"),
    ],
)
def test_batch_that_cannot_be_handed_over_is_raised(collate, message, advice):
    fetch = SampleFetch(Slow(), collate, seed=0)
    batches = Loader(fetch, torch.device("cpu"), num_workers=1).batches([FetchRequest(0, np.arange(4))])
    with pytest.raises((AttributeError, RuntimeError, PicklingError), match=message) as raised:
        next(batches)
    record = describe_failure(raised.value, rank=0, step=3)
    assert next(batches, None) is None  # so that the loader process ends
    assert "while handing over a batch from a loader process" in record.message
    assert (record.advice is None) if advice is None else (advice in record.advice)


def test_handler_that_the_task_sets_and_that_calls_the_one_before_is_called_once():
    calls = []
    before = signal.signal(signal.SIGCHLD, lambda *_: calls.append("torch's"))
    deaths = LoaderDeaths()
    deaths.watch()
    own = signal.getsignal(signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, lambda *given: (calls.append("the task's"), own(*given)))
    deaths.watch()
    os.kill(os.getpid(), signal.SIGCHLD)
    signal.signal(signal.SIGCHLD, before)
    assert calls == ["the task's", "torch's"]
