"""Cases of strategies with shards: a strategy on forked ranks, and counts of what it holds and sends."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group as resolve_process_group
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dure.comm.groups import ProcessGroup
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.table import STRATEGIES, load_strategy
from tests.specs import spec_of

CPU = torch.device("cpu")


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def prepared(
    name: str,
    group: ProcessGroup,
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor] = mean_square,
    build_optimizer: Callable[[nn.Module], Optimizer] = adamw,
    precision: str = "fp32",
    example: Tensor | None = None,
    **options: Any,
) -> Any:
    """Return a strategy over a model, ready to step; `example` is for those that try the model before."""
    cls = load_strategy(name)
    settings = spec_of(name, precision=precision, **options)
    strategy = cls(StrategyContext(STRATEGIES[name], group, (CPU,), Precision(precision, "cpu"), settings))
    if example is not None:
        strategy.example = lambda num_samples: example[:num_samples]
    strategy.prepare(model, build_optimizer, loss)
    return strategy


def backward(strategy: Any, *batches: Any) -> None:
    """Compute gradients of microbatches, each of as many samples as it has rows."""
    samples = sum(len(batch) for batch in batches) * strategy.share.count
    microbatches = [Microbatch(batch=batch, num_samples=len(batch)) for batch in batches]
    strategy.forward_backward(microbatches, global_samples=samples, requests=Requests())
    strategy.sync_gradients()


def num_bytes(tensors: Any) -> int:
    """Walk tensors and return the bytes of this rank's parts."""
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


def held_bytes(strategy: Any) -> dict[str, int]:
    """Return this rank's bytes of parameters, of gradients, and of what the optimiser keeps of elements."""
    states = [value for state in strategy.optimizer.state.values() for value in state.values()]
    return {
        "parameters": num_bytes(strategy.model.parameters()),
        "gradients": num_bytes(p.grad for p in strategy.trainable),
        "state": num_bytes(value for value in states if isinstance(value, Tensor) and value.dim()),
    }


class SentBytes(TorchDispatchMode):
    """Counts what this rank sends, by what it hands to the process group, as bandwidth-optimal collectives send it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _SAME.get(func.overloadpacket.__name__, func.overloadpacket.__name__.strip("_"))
        found = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and name in _FORMULAS:
            self._note(name, _FORMULAS[name](args))
        elif func.namespace == "_c10d_functional" and name in _FORMULAS:
            self._note(name, _FUNCTIONAL[name](args, found))
        return found

    def _note(self, name: str, num_bytes: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.num_bytes += num_bytes


def _size(tensor: Any) -> int:
    tensor = tensor[0] if isinstance(tensor, list | tuple) else tensor
    return tensor.numel() * tensor.element_size()


def _of_all_reduce(args: Any) -> int:
    return _in_a_ring(args[0], torch.distributed.ProcessGroup.unbox(args[1]).size())


def _of_functional_all_reduce(args: Any, found: Any) -> int:
    return _in_a_ring(args[0], resolve_process_group(args[2]).size())


def _in_a_ring(tensor: Any, num_ranks: int) -> int:
    return 2 * (num_ranks - 1) * _size(tensor) // num_ranks


_FORMULAS: dict[str, Callable[[Any], int]] = {
    "allreduce": _of_all_reduce,
    "allgather_base": lambda args: _size(args[0]) - _size(args[1]),  # the whole, and this rank's part
    "reduce_scatter_base": lambda args: _size(args[1]) - _size(args[0]),
}

_SAME = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "allgather_base",
    "reduce_scatter_tensor": "reduce_scatter_base",
}
"""DTensor's names for these collectives."""

_FUNCTIONAL: dict[str, Callable[[Any, Any], int]] = {
    "allreduce": _of_functional_all_reduce,
    "allgather_base": lambda args, found: _size(found) - _size(args[0]),
    "reduce_scatter_base": lambda args, found: _size(args[0]) - _size(found),
}
