"""Copies from accelerators into pinned memory of the host, while the accelerators compute.

What only the optimiser's step changes is copied while the next forward and backward run, in a stream of its own. All
else, which a forward may change, is copied before anything that is launched later.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.torchcompat import copy_all


def can_copy_beside(tensor: Tensor) -> bool:
    """Return whether a tensor is on an accelerator that copies while it computes."""
    return tensor.device.type == "cuda"


class DeviceCopies:
    """Streams that copy, and what they are copying."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._done: list[torch.Event] = []
        self._steady: list[tuple[Tensor, int]] = []
        """Tensors copied during training, with torch's count of their changes when that began."""
        self._sources: list[Tensor] = []
        """Tensors that are kept until they are copied: their memory would be given to others."""

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is being copied."""
        return not self._done

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor], steady: Sequence[bool]) -> None:
        """Begin to copy.

        Args:
            targets: On the host; where they are not pinned, the host waits.
            sources: On accelerators, one or several.
            steady: Which of these change only after `complete`.
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
        """Wait until all is copied, and return whether what is steady stayed as it was."""
        for event in self._done:
            event.synchronize()
        is_same = all(source._version == version for source, version in self._steady)
        self._done, self._steady, self._sources = [], [], []
        return is_same


def _copy_in(stream: torch.Stream, pairs: list[tuple[Tensor, Tensor]]) -> None:
    with stream, torch.no_grad():
        copy_all([target for target, _ in pairs], [source for _, source in pairs], non_blocking=True)
