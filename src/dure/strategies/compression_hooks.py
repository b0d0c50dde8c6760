"""Compression as communication hooks of torch's DDP: torch's own where it has one, ours for the rest.

Torch's fp16, bf16 and PowerSGD hooks work on any backend; its quantisation hooks fail on gloo, so int8 and the largest
few are ours.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dure.strategies.compression import Compression, open_compression

Hook = Callable[[object, dist.GradBucket], "torch.futures.Future[Tensor]"]

POWERSGD_START = 2
"""Plain steps before PowerSGD begins: the fewest that it takes, for DDP may order its buckets anew in the first."""


def hook_compression(engine: DistributedDataParallel, name: str, *, fraction: float, rank: int) -> Compression:
    """Register a compression with a DDP engine, once and before its first real backward.

    Args:
        engine: The wrapped module.
        name: `fp16`, `bf16`, `powersgd`, `topk` or `int8`.
        fraction: Of the elements that `topk` sends.
        rank: Of PowerSGD's approximation.
    """
    group = engine.process_group
    compression: Compression
    if name == "powersgd":
        compression = PowerSGD(group, rank)
    elif name in ("fp16", "bf16"):
        compression = TorchCast(group, torch.float16 if name == "fp16" else torch.bfloat16)
    else:
        compression = open_compression(name, group, fraction=fraction)
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

    # torch asks for the annotations of a hook
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    return hook


class HookedCompression(Compression):
    """One of torch's own hooks: it answers while backward goes on."""

    @abstractmethod
    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Begin to reduce a bucket."""

    def _reduce(self, vector: Tensor, key: int) -> int:
        raise TypeError("torch's hooks reduce buckets of DDP, not vectors")


class TorchCast(HookedCompression):
    """Torch's fp16 and bf16 hooks."""

    def __init__(self, process_group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(process_group)
        self._dtype = dtype
        self._hook = default_hooks.fp16_compress_hook if dtype == torch.float16 else default_hooks.bf16_compress_hook

    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Note the error of the cast, and let torch do it."""
        scaled = bucket.buffer() / self.world_size
        self.note_error(scaled, scaled - scaled.to(self._dtype))
        self.note_sent(4 * (self.world_size - 1) * scaled.numel() // self.world_size, scaled)
        return self._hook(self.process_group, bucket)  # type: ignore[arg-type]


class PowerSGD(HookedCompression):
    """Torch's PowerSGD hook (Vogels et al. 2019): each gradient matrix as a product of two thin ones.

    The error that torch carries over, and that the records show, is this rank's gradient less the approximated mean
    of all ranks': with different samples on every rank it is large even where nothing is lost.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(process_group)
        self._state = powerSGD_hook.PowerSGDState(
            process_group, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )

    def start(self, bucket: dist.GradBucket) -> "torch.futures.Future[Tensor]":
        """Let torch do it, and note the error that it keeps for the next step."""
        state, buffer, index = self._state, bucket.buffer(), bucket.index()
        num_buffer = buffer.numel()
        wanted = buffer.detach().clone()
        if index in state.error_dict:
            wanted += state.error_dict[index]
        is_plain = state.iter < POWERSGD_START
        before = state.total_numel_after_compression
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        num_sent = num_buffer if is_plain else state.total_numel_after_compression - before
        self.note_sent(2 * (self.world_size - 1) * num_sent * buffer.element_size() // self.world_size, buffer)

        # its callbacks communicate: waiting for them keeps the buckets' calls in the same order on every rank
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(future.wait())
        self.note_error(wanted, torch.zeros_like(wanted) if is_plain else state.error_dict[index])
        return done

    def rank_state(self) -> dict[str, Tensor]:
        """Return errors, the last factors and how many steps were plain."""
        kept = {"iteration": torch.tensor(self._state.iter)}
        for name, tensors in self._kept().items():
            kept |= {f"{name}.{index}": tensor for index, tensor in tensors.items()}
        return kept

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Take them over."""
        if not state:
            return
        self._state.iter = int(state["iteration"])
        for name, tensors in self._kept().items():
            tensors.clear()
            own = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
            tensors.update({int(key.rpartition(".")[2]): value.clone() for key, value in own.items()})

    def _kept(self) -> dict[str, dict[int, Tensor]]:
        state = self._state
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}
