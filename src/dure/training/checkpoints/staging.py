"""Staging buffer for a rank's share of a checkpoint, in memory that is kept from one save to the next.

New memory costs a page fault for each page first touched, which is more than the copying itself. It is therefore
allocated once, with huge pages if the system has them, and touched in advance if there is time.

Tensors that only the optimiser's step changes are copied during the next forward and backward; all others at once.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from dure.host.device_kinds import copies_beside
from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.rank_shard import RankShard

_ALIGNMENT = 64
_BLOCK_BYTES = 2 * 2**20
"""Bytes that a thread copies at a time: about half a millisecond, the longest wait of one thread for another at the
end."""
_SMALL_BYTES = 2**18
"""Size below which handing a tensor to another thread costs more than copying it."""
_MOST_HELPERS = 3

Block = tuple[int, int, int]
"""Target address, source address and bytes."""


class StagingBuffer:
    """Memory for one copy of a rank's share, and the threads that fill it.

    Threads take blocks from one list until it is empty, so that a thread without a core delays no other. Torch's own
    threads meet at a barrier for each tensor: on two busy cores that took 64 to 790 ms for 100 MB, against 28 to 60 ms
    for a single thread.
    """

    def __init__(self, num_threads: int) -> None:
        """Prepare the buffer; no memory is allocated yet.

        Args:
            num_threads: Number of threads, including the calling one.
        """
        self.is_beside = False
        """True to copy steady tensors during training, until `complete`; False to copy everything at once."""
        self.beside_bytes = 0
        """Bytes of the last copy that were left to be copied during training."""
        self._waiting: Iterator[Block] = iter(())
        self._helping: Future[None] | None = None
        self._begun: list[tuple[Tensor, int]] = []
        """Tensors copied during training, each with its version at the start of the copy."""
        self._room = torch.empty(0, dtype=torch.uint8)
        self._targets: list[Tensor] = []
        self._num_helpers = min(num_threads - 1, _MOST_HELPERS)
        self._helpers: ThreadPoolExecutor | None = None
        self._touching: Future[None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are kept."""
        return self._room.numel()

    def missing_bytes(self, share: RankShard) -> int:
        """Return the bytes that a copy needs beyond the memory that is kept."""
        sources = share.tensors()
        return 0 if self._fits(sources) else max(0, _needed_bytes(sources) - self.num_bytes)

    def prepare(self, share: RankShard) -> None:
        """Allocate the memory for a copy, and let a thread touch it."""
        sources = share.tensors()
        if self._fits(sources):
            return
        self._lay_out(sources)
        self._touching = self._pool().submit(_touch, self._room.data_ptr(), self.num_bytes)

    def of(self, share: RankShard) -> RankShard:
        """Return a share that is a copy once `complete` was called; valid until the next copy."""
        self.complete()
        sources = share.tensors()
        if not self._fits(sources):
            self._lay_out(sources)
        self._copy(sources, {id(tensor) for tensor in steady_tensors(share)} if self.is_beside else set())
        targets = iter(self._targets)

        def placed(value: Tensor | TensorShard) -> Tensor | TensorShard:
            return replace(value, tensor=next(targets)) if isinstance(value, TensorShard) else next(targets)

        return replace(
            share,
            parts={part: {name: placed(v) for name, v in tensors.items()} for part, tensors in share.parts.items()},
            per_rank={name: next(targets) for name in share.per_rank},
        )

    @property
    def is_complete(self) -> bool:
        """Return whether all copied tensors may change."""
        return self._helping is None

    def complete(self) -> bool:
        """Copy the rest, and return whether no tensor has changed since the copy began."""
        if self._helping is None:
            return True
        _copy_from(self._waiting)
        if not self._helping.cancel():
            self._helping.result()
        self._helping = None
        begun, self._begun = self._begun, []
        return all(source._version == version for source, version in begun)

    def close(self) -> None:
        """Release memory and threads; copies remain valid for their holders."""
        self.complete()
        if self._helpers is not None:
            self._helpers.shutdown()
        self._helpers = None
        self._room, self._targets = torch.empty(0, dtype=torch.uint8), []

    def _fits(self, sources: list[Tensor]) -> bool:
        """Return whether the last copy was of tensors with the same dtypes and shapes."""
        return len(sources) == len(self._targets) and all(
            source.dtype == target.dtype and source.shape == target.shape
            for source, target in zip(sources, self._targets, strict=True)
        )

    def _await_touching(self) -> None:
        if self._touching is not None:
            self._touching.result()  # it writes zeros
            self._touching = None

    def _lay_out(self, sources: list[Tensor]) -> None:
        self._await_touching()
        self._targets = []
        if _needed_bytes(sources) > self.num_bytes:
            self._room = torch.empty(0, dtype=torch.uint8)  # free the old memory before allocating the new
            is_pinned = any(copies_beside(source.device.type) for source in sources)
            self._room = _new_room(_needed_bytes(sources), is_pinned=is_pinned)
        begin = 0
        for source in sources:
            end = begin + source.nbytes
            self._targets.append(self._room[begin:end].view(source.dtype).view(source.shape))
            begin = aligned(end)

    def _copy(self, sources: list[Tensor], steady: set[int]) -> None:
        """Copy tensors; leave large ones whose ids are in `steady` to a thread."""
        self._await_touching()
        large: list[Block] = []
        later: list[Block] = []
        devices = set()
        for source, target in zip(sources, self._targets, strict=True):
            is_here = source.device.type == "cpu"
            if not is_here or not source.is_contiguous() or source.is_conj() or source.is_neg():
                if not is_here:
                    devices.add(source.device)
                target.copy_(source.detach(), non_blocking=not is_here)
            elif source.nbytes < _SMALL_BYTES:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            elif id(source) in steady and not source.is_inference():
                later += _blocks(target.data_ptr(), source.data_ptr(), source.nbytes)
                self._begun.append((source, source._version))
            else:
                large += _blocks(target.data_ptr(), source.data_ptr(), source.nbytes)
        self.beside_bytes = sum(size for _, _, size in later)
        self._copy_blocks(large)
        _await(devices)
        if later:
            # one thread nearly saturates the memory bandwidth; `complete` helps it
            self._waiting = iter(later)
            self._helping = self._pool().submit(_copy_from, self._waiting)

    def _copy_blocks(self, blocks: list[Block]) -> None:
        waiting = iter(blocks)
        num_helpers = min(self._num_helpers, len(blocks) - 1)
        helping = [self._pool().submit(_copy_from, waiting) for _ in range(num_helpers)]
        _copy_from(waiting)
        for help_ in helping:
            # a helper that has not started would find nothing to copy
            if not help_.cancel():
                help_.result()

    def _pool(self) -> ThreadPoolExecutor:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(max(self._num_helpers, 1), thread_name_prefix="dure-copy")
        return self._helpers


def _copy_from(waiting: Iterator[Block]) -> None:
    for target, source, size in waiting:
        ctypes.memmove(target, source, size)  # without the GIL


def _blocks(target: int, source: int, size: int) -> Iterator[Block]:
    for begin in range(0, size, _BLOCK_BYTES):
        yield target + begin, source + begin, min(_BLOCK_BYTES, size - begin)


def _await(devices: Iterable[torch.device]) -> None:
    """Wait for the copies from each device; by default torch would wait for the current one only."""
    for device in devices:
        torch.accelerator.synchronize(device)


def _touch(address: int, size: int) -> None:
    for target, _, block in _blocks(address, address, size):
        ctypes.memset(target, 0, block)


def _new_room(num_bytes: int, *, is_pinned: bool) -> Tensor:
    if is_pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may not support them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def steady_tensors(share: RankShard) -> Iterator[Tensor]:
    """Yield the tensors in host memory that only the optimiser's step changes."""
    for tensor, is_steady in zip(share.tensors(), share.steadiness(), strict=True):
        if is_steady and tensor.device.type == "cpu":
            yield tensor


def _needed_bytes(sources: list[Tensor]) -> int:
    return sum(aligned(source.nbytes) for source in sources)


def aligned(size: int) -> int:
    """Return the offset at which the next tensor may begin."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
