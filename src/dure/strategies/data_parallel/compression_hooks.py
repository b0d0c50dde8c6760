"""Compression as communication hooks of torch's DDP: torch's own where it has one, otherwise dure's.

Torch's fp16, bf16 and PowerSGD hooks work on any backend. Its quantisation hooks fail on gloo, so int8 and top-k are
dure's.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dure.strategies.data_parallel.compression import UNIT, Compression, open_compression

Hook = Callable[[object, dist.GradBucket], "torch.futures.Future[Tensor]"]

POWERSGD_START = 2
"""Uncompressed steps before PowerSGD begins: its minimum, because DDP may reorder its buckets in the first."""


def hook_compression(
    engine: DistributedDataParallel, name: str, *, fraction: float, rank: int, can_undo: bool
) -> Compression:
    """Register a compression with a DDP engine, once and before its first real backward.

    Args:
        engine: The wrapped module.
        name: `fp16`, `bf16`, `powersgd`, `topk` or `int8`.
        fraction: Fraction of the elements that `topk` sends.
        rank: Rank of PowerSGD's approximation.
        can_undo: Whether steps may be skipped, see `Compression.undo_step`.
    """
    group = engine.process_group
    compression: Compression
    if name == "powersgd":
        compression = PowerSGD(group, rank, can_undo=can_undo)
    elif name in ("fp16", "bf16"):
        compression = TorchCast(group, torch.float16 if name == "fp16" else torch.bfloat16)
    else:
        compression = open_compression(name, group, fraction=fraction, can_undo=can_undo)
    engine.register_comm_hook(None, _hook_of(compression))
    return compression


def _hook_of(compression: Compression) -> Hook:
    def hook(state: object, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        if isinstance(compression, HookedCompression):
            return compression.start(bucket)
        compression.reduce_mean(bucket.buffer(), bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # torch checks the annotations of a hook
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return hook


class HookedCompression(Compression):
    """Hook of torch; its result is a future, so that backward goes on."""

    @abstractmethod
    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Start to reduce a bucket."""

    def _reduce(self, vector: Tensor, key: int) -> int:
        raise TypeError("torch's hooks reduce buckets of DDP, not vectors")


class TorchCast(HookedCompression):
    """Torch's fp16 and bf16 hooks."""

    def __init__(self, process_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(process_group)
        self._dtype = dtype
        self._hook = default_hooks.fp16_compress_hook if dtype == torch.float16 else default_hooks.bf16_compress_hook

    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Record the error of the cast, and call torch's hook."""
        buffer = bucket.buffer()
        if self.measures_error:
            scaled = buffer / self.world_size
            self.note_error(scaled, scaled - scaled.to(self._dtype))
        self.note_sent(4 * (self.world_size - 1) * buffer.numel() // self.world_size, buffer)
        return self._hook(self.process_group, bucket)  # type: ignore[arg-type]


class PowerSGD(HookedCompression):
    """Torch's PowerSGD hook (Vogels et al. 2019): each gradient matrix as a product of two thin ones.

    The error that torch carries over, and that the records contain, is this rank's gradient less the approximated mean
    of all ranks. With different samples on every rank it is large even if nothing is lost.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int, *, can_undo: bool = False) -> None:
        """Start without errors and factors.

        Args:
            process_group: Group whose ranks reduce.
            rank: Rank of the approximation.
            can_undo: Keep the state from before a step until the next one begins.
        """
        super().__init__(process_group)
        self._state = powerSGD_hook.PowerSGDState(
            process_group, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
        self._can_undo = can_undo
        self._before: tuple[dict[str, dict[int, Tensor]], int, Any] | None = None

    def begin_step(self, unit: float | None = None) -> None:
        """Keep the state for `undo_step`."""
        super().begin_step(unit)
        if self._can_undo:
            kept = {name: dict(tensors) for name, tensors in self._kept().items()}
            # the hook replaces errors, but writes into the factors, which are small
            for name in ("p", "q"):
                kept[name] = {index: tensor.clone() for index, tensor in kept[name].items()}
            self._before = kept, self._state.iter, self._state.rng.get_state()

    def _rescale(self, factor: float) -> None:
        for index, error in self._state.error_dict.items():
            self._state.error_dict[index] = error * factor

    def undo_step(self) -> None:
        """Restore the errors, the factors, the number of steps and the generator from before the step."""
        super().undo_step()
        assert self._before is not None, "a step can only be undone if the state from before it was kept"
        kept, self._state.iter, generator = self._before
        self._state.rng.set_state(generator)
        for name, tensors in self._kept().items():
            tensors.clear()
            tensors.update(kept[name])

    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Call torch's hook, and record the error that it keeps for the next step."""
        state, buffer, index = self._state, bucket.buffer(), bucket.index()
        self._fit(index, buffer)
        num_buffer = buffer.numel()
        wanted = buffer.detach().clone() if self.measures_error else buffer
        if self.measures_error and index in state.error_dict:
            wanted += state.error_dict[index]
        is_plain = state.iter < POWERSGD_START
        before = state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        num_sent = num_buffer if is_plain else state.total_numel_after_compression - before
        self.note_sent(2 * (self.world_size - 1) * num_sent * buffer.element_size() // self.world_size, buffer)

        # its callbacks communicate: waiting for them keeps the order of the buckets' calls the same on every rank
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(future.wait())
        if self.measures_error:
            self.note_error(wanted, torch.zeros_like(wanted) if is_plain else state.error_dict[index])
        return done

    def rank_state(self) -> dict[str, Tensor]:
        """Return errors, the last factors, their rank and the number of steps."""
        state = self._state
        kept = {"iteration": torch.tensor(state.iter), "rank": torch.tensor(state.matrix_approximation_rank)}
        if self.unit is not None:
            kept[UNIT] = torch.tensor(self.unit, dtype=torch.float64)
        for name, tensors in self._kept().items():
            kept |= {f"{name}.{index}": tensor for index, tensor in tensors.items()}
        return kept

    def _fit(self, index: int, buffer: Tensor) -> None:
        """Move a bucket's state to its device, because a checkpoint's is on the host; drop that of another bucket."""
        error = self._state.error_dict.get(index)
        is_other = error is not None and error.shape != buffer.shape
        for tensors in self._kept().values():
            if is_other:
                tensors.pop(index, None)
            elif index in tensors:
                tensors[index] = tensors[index].to(buffer.device)

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Load this state, unless it is of another compression or of an approximation of another rank."""
        rank = self._state.matrix_approximation_rank
        if "iteration" not in state or int(state.get("rank", rank)) != rank:
            return
        self._state.iter = int(state["iteration"])
        self.unit = float(state[UNIT]) if UNIT in state else None
        for name, tensors in self._kept().items():
            tensors.clear()
            own = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
            tensors.update({int(key.rpartition(".")[2]): value.clone() for key, value in own.items()})

    def _kept(self) -> dict[str, dict[int, Tensor]]:
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}
