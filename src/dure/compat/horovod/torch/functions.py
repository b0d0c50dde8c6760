"""Parameters, optimiser states and Python objects from one rank to all."""

import importlib.util
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.common.basics import rank, size
from dure.compat.horovod.common.process_sets import ProcessSet, global_process_set
from dure.compat.horovod.torch.handles import synchronize
from dure.compat.horovod.torch.movements import allgather, broadcast_, broadcast_async_


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite parameters with those of a rank.

    Args:
        params: `model.state_dict()`, or a list of parameters or of pairs of a name and a parameter.
        root_rank: Rank of the source.

    Raises:
        ValueError: `params` is something else.

    Communication: one broadcast for each parameter, fused.
    """
    if isinstance(params, dict):
        named: Iterable[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; give a dict or a list")
    copies = []
    handles = []
    for name, parameter in named:
        if not isinstance(parameter, Tensor):  # such as the extra state of a module
            continue
        dense = parameter if parameter.is_contiguous() else parameter.detach().contiguous()
        if dense is not parameter:
            copies.append((parameter, dense))
        handles.append(broadcast_async_(dense, root_rank, name))
    for handle in handles:
        synchronize(handle)
    with torch.no_grad():
        for parameter, dense in copies:
            parameter.copy_(dense)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Overwrite an optimiser's state and options with those of a rank, whatever the others have.

    The structure of the state is sent first. So ranks without a state, or with another one, receive all of it, and a
    new optimiser stays one that has made no step. As with Horovod, it has gradients of zero afterwards.

    Args:
        optimizer: Optimiser, distributed or not.
        root_rank: Rank of the source.
        model: Model; needed if it has sparse embeddings.

    Raises:
        ValueError: The optimiser is L-BFGS, or has other groups of parameters than that of the source.

    Communication: one object, and one broadcast for each tensor of the state, fused.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: its structure differs between ranks")
    if not optimizer.state_dict()["state"]:
        _clear_gradients(optimizer, _sparse_parameters(model))
    if size() == 1:
        return
    is_root = rank() == root_rank
    tensors: list[Tensor] = []
    structure = broadcast_object(
        _map_leaves(optimizer.state_dict(), lambda tensor: _described(tensor, tensors)) if is_root else None,
        root_rank,
        name="optimizer_state",
    )
    if not is_root:
        structure = _map_leaves(structure, lambda slot: _placed(slot, tensors))
    parts = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    handles = [broadcast_async_(part, root_rank, f"optimizer_state.{index}") for index, part in enumerate(parts)]
    for handle in handles:
        synchronize(handle)
    if not is_root:
        _load(optimizer, structure)


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor in the structure of a state."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    """Type of its device."""


def _map_leaves(value: Any, of_leaf: Callable[[Any], Any]) -> Any:
    """Return a copy of nested containers with the tensors and slots in them replaced."""
    if isinstance(value, (Tensor, _Slot)):
        return of_leaf(value)
    if type(value) in (dict, defaultdict, OrderedDict):
        return {key: _map_leaves(each, of_leaf) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(each, of_leaf) for each in value)
    return value


def _described(tensor: Tensor, tensors: list[Tensor]) -> Any:
    """Note a tensor for its broadcast, and return its slot; sparse ones are part of the object."""
    if tensor.layout is not torch.strided:
        return tensor
    tensors.append(tensor.detach())
    return _Slot(tensor.dtype, tuple(tensor.shape), tensor.device.type)


def _placed(slot: Any, tensors: list[Tensor]) -> Any:
    """Return a tensor that receives the source's."""
    if isinstance(slot, Tensor):
        return slot
    tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device=slot.device))
    return tensors[-1]


def _load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the source's state; types of tensors are those of the source, and the groups remain the same objects."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, new in zip(groups, optimizer.param_groups, strict=True):
        group.update(new)
    optimizer.param_groups = groups
    parameters = [each for group in groups for each in group["params"]]
    for number, entries in state["state"].items():
        is_parameter = isinstance(number, int) and number < len(parameters) and isinstance(entries, dict)
        own: dict[str, Any] = optimizer.state.get(parameters[number], {}) if is_parameter else {}
        for key in own.keys() & entries.keys() if is_parameter else ():
            loaded, sent = own[key], entries[key]
            if isinstance(loaded, Tensor) and isinstance(sent, Tensor) and loaded.dtype != sent.dtype:
                own[key] = sent.to(loaded.device)  # torch has cast it to the parameter's type


def _sparse_parameters(model: Any) -> set[int]:
    modules = [] if model is None else model.modules()
    return {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding) and module.sparse}


def _clear_gradients(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """Set gradients of zero, which Horovod leaves behind."""
    for parameter in (each for group in optimizer.param_groups for each in group["params"] if each.requires_grad):
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse:
            parameter.grad = parameter.grad.to_sparse()


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a rank's object on all ranks. Objects are pickled: ranks of one run trust each other.

    Args:
        obj: Object; only that of the source matters.
        root_rank: Global rank of the source.
        name: Name by which ranks are matched; by default from the number of the call.
        process_set: Ranks that take part.

    Communication: two broadcasts, blocking.
    """
    data = _dumped(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([data.numel()]), root_rank, name and f"{name}.sz", process_set)
    if rank() != root_rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if rank() == root_rank else _loaded(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank. Objects are pickled: ranks of one run trust each other.

    Args:
        obj: Object.
        name: Name by which ranks are matched; by default from the number of the call.
        process_set: Ranks that take part.

    Communication: two allgathers, blocking.
    """
    data = _dumped(obj)
    lengths = allgather(torch.tensor([data.numel()]), name and f"{name}.sz", process_set).tolist()
    parts = allgather(data, name and f"{name}.t", process_set).split(lengths)
    assert len(parts) == (process_set.size() or size())
    return [_loaded(part) for part in parts]


def _dumped(obj: Any) -> Tensor:
    try:
        data = pickle.dumps(obj)
    except Exception:
        # functions of a script, which pickle stores by name only
        if importlib.util.find_spec("cloudpickle") is None:
            raise
        data = importlib.import_module("cloudpickle").dumps(obj)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _loaded(data: Tensor) -> Any:
    # this interface is for any object, and its bytes come from a rank of this run, which runs the same script
    return pickle.loads(data.numpy().tobytes())  # noqa: S301
