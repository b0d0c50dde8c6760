"""Copies from accelerators into pinned host memory, while the accelerators compute.

Tensors that only the optimiser's step changes are copied on a separate stream during the next forward and backward.
Other tensors, which a forward may change, are copied before any later launch.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.host.device_kinds import copies_beside
from dure.torchcompat.tensors import copy_all


def can_copy_beside(tensor: Tensor) -> bool:
    """Return whether a tensor is on an accelerator that can copy while it computes."""
    return copies_beside(tensor.device.type)


class DeviceCopies:
    """Copy streams, and the copies in progress."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._done: list[torch.Event] = []
        self._steady: list[tuple[Tensor, int]] = []
        """Tensors copied during training, each with torch's version counter at the start of its copy."""
        self._sources: list[Tensor] = []
        """Tensors kept alive until they are copied, so that their memory is not reused."""

    @property
    def is_complete(self) -> bool:
        """Return whether no copy is in progress."""
        return not self._done

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor], steady: Sequence[bool]) -> None:
        """Start copies.

        Args:
            targets: Tensors on the host; if they are not pinned, the host waits.
            sources: Tensors on one or more accelerators.
            steady: True for each source that changes only after `complete`.
        """
        by_device: dict[torch.device, list[tuple[Tensor, Tensor, bool]]] = defaultdict(list)
        for target, source, is_steady in zip(targets, sources, steady, strict=True):
            by_device[source.device].append((target, source, is_steady))
        for device, pairs in by_device.items():
            self._begin_on(device, pairs)
        self._sources += sources
        self._steady += [(s, s._version) for s, is_steady in zip(sources, steady, strict=True) if is_steady]

    def _begin_on(self, device: torch.device, pairs: list[tuple[Tensor, Tensor, bool]]) -> None:
        computing = torch.accelerator.current_stream(device)
        copying = self._streams.setdefault(device, torch.Stream(device=device))
        copying.wait_stream(computing)
        _copy_in(copying, [(target, source) for target, source, is_steady in pairs if not is_steady])
        computing.wait_stream(copying)
        _copy_in(copying, [(target, source) for target, source, is_steady in pairs if is_steady])
        self._done.append(copying.record_event())

    def complete(self) -> bool:
        """Wait for all copies, and return whether the steady tensors stayed unchanged."""
        for event in self._done:
            event.synchronize()
        is_same = all(source._version == version for source, version in self._steady)
        self._done, self._steady, self._sources = [], [], []
        return is_same


def _copy_in(stream: torch.Stream, pairs: list[tuple[Tensor, Tensor]]) -> None:
    with stream, torch.no_grad():
        copy_all([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
