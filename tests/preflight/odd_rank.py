"""A rank of a preflight of which one does something on purpose: ODD_RANK is `deed:rank`, the rank a number or `all`."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dure.comm.entrypoints import preflight as preflight_worker
from dure.process.context import Place
from dure.process.jobs import PreflightJob

before_fork = preflight_worker.before_fork


def main(job: PreflightJob, place: Place) -> int:
    deed, _, rank = os.environ["ODD_RANK"].partition(":")
    if rank in ("all", str(place.rank.rank)):
        DEEDS[deed]()
    return preflight_worker.main(job, place)


def instead_of(name: str, deed: Callable[..., Any]) -> None:
    """Let a collective of this rank do something else, or something more."""
    real = getattr(dist, name)
    setattr(dist, name, lambda *args, **kwargs: deed(real, *args, **kwargs))


def send_signal(number: int) -> Callable[..., None]:
    return lambda *_args, **_kwargs: os.kill(os.getpid(), number)


def add_one(real: Callable[..., Any], tensor: Any) -> None:
    real(tensor)
    tensor[tensor.numel() // 2] += 1


def fail(*_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def be_late(real: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    time.sleep(0.3)
    real(*args, **kwargs)


DEEDS: dict[str, Callable[[], None]] = {
    "stop": lambda: instead_of("broadcast", send_signal(signal.SIGSTOP)),
    "kill": lambda: instead_of("broadcast", send_signal(signal.SIGKILL)),
    "compute wrongly": lambda: instead_of("all_reduce", add_one),
    "fail": lambda: instead_of("send", fail),
    "be late": lambda: instead_of("broadcast", be_late),
    "stop before it begins": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
