"""Parameters, optimiser states and Python objects from one rank to all."""

import importlib.util
import pickle
from collections.abc import Iterable
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
    """Overwrite an optimiser's state and options with those of a rank.

    A new optimiser has no state: it gets one by a step with gradients of zero.

    Args:
        optimizer: Optimiser, distributed or not.
        root_rank: Rank of the source.
        model: Model; needed if it has sparse embeddings.

    Raises:
        ValueError: The optimiser is L-BFGS.

    Communication: one broadcast for each tensor of the state, fused, and one object.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: its structure differs between ranks")
    has_state = bool(optimizer.state_dict()["state"])
    if not has_state:
        _create_state(optimizer, _sparse_parameters(model))
    state = optimizer.state_dict()
    tensors: list[Any] = []
    values: dict[str, Any] = {}
    for index, group in enumerate(state["param_groups"]):
        values |= {f"option.{index}.{key}": value for key, value in group.items() if key != "params"}
    for number, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors.append((f"state.{number}.{key}", value))
            else:
                values[f"state.{number}.{key}"] = value
    broadcast_parameters(sorted(tensors), root_rank)
    received = broadcast_object(values, root_rank, name="optimizer_state")
    for name, value in received.items():
        what, number, key = name.split(".", 2)
        if what == "option":
            optimizer.param_groups[int(number)][key] = value
    for number, entries in state["state"].items():
        for key in entries:
            name = f"state.{number}.{key}"
            if name in received:
                entries[key] = received[name]
    if any(name.startswith("state.") for name in received):
        for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
            saved.update({key: value for key, value in own.items() if key != "params"})
        optimizer.load_state_dict(state)


def _sparse_parameters(model: Any) -> set[int]:
    modules = [] if model is None else model.modules()
    return {id(module.weight) for module in modules if isinstance(module, torch.nn.Embedding) and module.sparse}


def _create_state(optimizer: torch.optim.Optimizer, sparse: set[int]) -> None:
    """Make a step that only creates the state: gradients are zero, and parameters are restored after it."""
    parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    before = [each.detach().clone() for each in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse:
            parameter.grad = parameter.grad.to_sparse()
    step = getattr(optimizer, "step_locally", optimizer.step)
    step()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a rank's object on all ranks. Objects are pickled: ranks of one run trust each other.

    Args:
        obj: Object; only that of the source matters.
        root_rank: Global rank of the source.
        name: Name by which ranks are matched; by default the object's type.
        process_set: Ranks that take part.

    Communication: two broadcasts, blocking.
    """
    name = name or type(obj).__name__
    data = _dumped(obj) if rank() == root_rank else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([data.numel()]), root_rank, f"{name}.sz", process_set)
    if rank() != root_rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if rank() == root_rank else _loaded(data)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, by rank. Objects are pickled: ranks of one run trust each other.

    Args:
        obj: Object.
        name: Name by which ranks are matched; by default the object's type.
        process_set: Ranks that take part.

    Communication: two allgathers, blocking.
    """
    name = name or type(obj).__name__
    data = _dumped(obj)
    lengths = allgather(torch.tensor([data.numel()]), f"{name}.sz", process_set).tolist()
    parts = allgather(data, f"{name}.t", process_set).split(lengths)
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
