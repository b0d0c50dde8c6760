"""Optimiser state by the names of the model's parameters instead of torch's numbers.

Torch numbers parameters in the order in which the optimiser got them. Names are valid under another order, another
strategy and another number of ranks, and a reader of the checkpoint can assign state to parameters.
"""

import functools
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dure.errors import CheckpointMismatch, TaskInvalid
from dure.strategies.state.tensor_shard import SavedTensor, TensorShard, own_shard

EXECUTION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable", "param_names"})
"""Keys of a group that decide how a step is computed, but not its result. They are taken from the current optimiser, so
that a device may change.
"""

STEP_KEY = "step"
"""Key of the step count, which torch's own optimisers keep in float32 on a device of their choice."""


def optimizer_to_names(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimiser's state with the model's parameter names instead of numbers.

    Args:
        model: The model itself, not wrapped: its names are the names of the checkpoint.
        optimizer: Optimiser over parameters of `model`.

    Returns:
        `state` by parameter name, `groups` with their names under `params`, and under `shared_state` and `other`
        additional state of some optimisers. Tensors are the live ones, not copies.

    Raises:
        TaskInvalid: The optimiser holds a parameter that is not one of the model's, or state of a tensor in no group.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stray := [key for key in optimizer.state if isinstance(key, Tensor) and id(key) not in held]:
        raise TaskInvalid(
            f"the optimiser keeps state of a tensor of shape {tuple(stray[0].shape)} that is in none of its parameter "
            "groups, so no checkpoint could name it: key such state by a string, or delete it with the parameter"
        )
    saved = optimizer.state_dict()
    if not {"state", "param_groups"} <= saved.keys():
        raise TaskInvalid(
            f"{type(optimizer).__name__}.state_dict() has {', '.join(map(str, saved)) or 'nothing'} in the place of "
            "state and param_groups, so no checkpoint could name what is in it: return what torch.optim.Optimizer "
            "does, and keep further optimisers as attributes of the task"
        )
    names = _names_by_number(model, optimizer, saved)
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    state = {names[number]: value for number, value in saved["state"].items() if number in names}
    # some optimisers keep state for all parameters in addition to that of each
    shared_state = {key: value for key, value in saved["state"].items() if key not in names}
    other = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    return {"state": state, "groups": groups, "shared_state": shared_state, "other": other}


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of an optimiser's parameters, group by group."""
    groups: list[list[str]] = [group["params"] for group in optimizer_to_names(model, optimizer)["groups"]]
    return groups


def optimizer_from_names(
    model: nn.Module,
    optimizer: Optimizer,
    data: Mapping[str, Any],
    *,
    whole: Sequence[Collection[str]] | None = None,
    cuts: Mapping[str, TensorShard] | None = None,
) -> None:
    """Load a result of `optimizer_to_names` into an optimiser, bit for bit.

    Args:
        model: The model itself, not wrapped.
        optimizer: Built as the saved one was: the same groups of the same parameters, in any order.
        data: The saved state; its tensors, including `SavedTensor`s, may be on any device. They are copied, and
            released one by one.
        whole: The `group_names` of the optimiser of which this is one rank's part: state of the others is ignored.
        cuts: Shards of the saved parameters that the model's parameters are, by name, if these do not show it
            themselves.

    Raises:
        CheckpointMismatch: The groups are not the saved ones.
        TaskInvalid: The optimiser holds a parameter that is not one of the model's.
    """
    template = optimizer.state_dict()
    names = _names_by_number(model, optimizer, template)
    canonical = _canonical_names(model)
    groups = _matching_groups(data["groups"], template["param_groups"], names, canonical, whole)
    numbers = {name: number for number, name in names.items()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    copies = _Copies()
    others = {key: value for key, value in template["state"].items() if key not in names}
    state: dict[Any, Any] = copies.of(dict(data.get("shared_state", {})), others)
    for key, value in data["state"].items():
        name = canonical.get(key)
        if name not in numbers and whole is not None:
            continue
        if name not in numbers:
            raise CheckpointMismatch(f"it has optimiser state of {key}, which this optimiser does not train")
        shard = own_shard(parameters[name]) if cuts is None else cuts[name]
        state[numbers[name]] = copies.of_parameter(parameters[name], shard, value)
    other = copies.of(dict(data.get("other", {})), template)
    groups = [copies.of(group, now) for group, now in zip(groups, template["param_groups"], strict=True)]
    _load(optimizer, {**other, "state": state, "param_groups": groups})
    for number, value in state.items():
        if number in names:
            _restore_exactly(optimizer.state[parameters[names[number]]], value)


def _load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a result of `state_dict`, also into a class that keeps other state than the one from which it is derived.

    A subclass of AdamW with a step of its own may keep no `step`, for which AdamW's `__setstate__` looks.
    """
    try:
        optimizer.load_state_dict(state)
    except KeyError:
        own: Any = optimizer
        own.__setstate__ = functools.partial(Optimizer.__setstate__, optimizer)
        try:
            optimizer.load_state_dict(state)
        finally:
            del own.__setstate__


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of every parameter by every one of its names: tied parameters have several."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _names_by_number(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, str] = {}
    for live, packed in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for parameter, number in zip(live["params"], packed["params"], strict=True):
            if id(parameter) not in names:
                raise TaskInvalid(
                    f"build_optimizer gave the optimiser a parameter of shape {tuple(parameter.shape)} that is not one"
                    " of the model's, so no checkpoint could name it: make it a part of the model"
                )
            found[number] = names[id(parameter)]
    return found


def _matching_groups(
    saved: list[dict[str, Any]],
    template: list[dict[str, Any]],
    names: Mapping[int, str],
    canonical: Mapping[str, str],
    whole: Sequence[Collection[str]] | None,
) -> list[dict[str, Any]]:
    if len(saved) != len(template):
        raise CheckpointMismatch(f"its optimiser has {len(saved)} parameter groups and this one has {len(template)}")
    matched = []
    for index, (old, new) in enumerate(zip(saved, template, strict=True)):
        had = {canonical.get(name, name) for name in old["params"]}
        has = {names[number] for number in new["params"]} if whole is None else set(whole[index])
        if had != has:
            few = ", ".join(sorted(had ^ has)[:5])
            raise CheckpointMismatch(
                f"parameter group {index} of its optimiser has {len(had)} parameters and this one's has {len(has)}; "
                f"not in both: {few}"
            )
        kept = {key: new[key] for key in EXECUTION_KEYS if key in new}
        values = {key: value for key, value in old.items() if key not in EXECUTION_KEYS}
        matched.append({**new, **values, **kept, "params": new["params"]})
    return matched


class _Copies:
    """Copies of saved state, in which identical tensors stay identical."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Tensor]] = {}
        """Copies by the ids of their sources, which are kept alive."""

    def of_parameter(self, parameter: Tensor, shard: TensorShard, value: Any, key: Any = None) -> Any:
        """Copy a parameter's state to its device, with its strides if the shape is the same.

        A fused step refuses state whose memory format (channels_last, for example) is not the parameter's, and a file
        stores none.

        Args:
            parameter: Parameter to which the state belongs.
            shard: Shard of the saved parameter that it is.
            value: The state, or a part of it.
            key: Key of the value in the state.
        """
        if not isinstance(value, Tensor | SavedTensor):
            return _mapped(value, lambda item, key: self.of_parameter(parameter, shard, item, key))
        if tuple(value.shape) == shard.shape and key != STEP_KEY:
            return self._once(value, lambda saved: _placed_like(parameter, shard, saved))
        device = torch.device("cpu") if key == STEP_KEY else parameter.device
        return self._once(value, lambda saved: saved.whole().to(device, copy=True))

    def of(self, value: Any, now: Any = None) -> Any:
        """Copy state that belongs to no parameter, with tensors on the devices of the current ones."""
        if isinstance(value, Tensor | SavedTensor):
            device = now.device if isinstance(now, Tensor) else torch.device("cpu")
            return self._once(value, lambda saved: saved.whole().to(device, copy=True))
        found = now if isinstance(now, Mapping) else {}
        return _mapped(value, lambda item, key: self.of(item, found.get(key)))

    def _once(self, value: Tensor | SavedTensor, copy: Callable[[SavedTensor], Tensor]) -> Tensor:
        if id(value) not in self._made:
            saved = value if isinstance(value, SavedTensor) else _as_saved(value)
            self._made[id(value)] = value, copy(saved)
            saved.release()
        return self._made[id(value)][1]


def _as_saved(value: Tensor) -> SavedTensor:
    return SavedTensor(dtype=value.dtype, shape=tuple(value.shape), shards=[own_shard(value)])


def _placed_like(parameter: Tensor, shard: TensorShard, saved: SavedTensor) -> Tensor:
    like = torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    saved.fill(own_shard(like).tensor, shard.rectangle)
    return like


def _mapped(value: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a dictionary, list or tuple of the same type with every item changed; anything else unchanged."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, change(item, key)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(change(item, None) for item in value)
    return value


def _restore_exactly(loaded: Any, saved: Any) -> None:
    """Undo torch's conversions of loaded state.

    It casts tensors to their parameter's dtype, which would round float32 state of bfloat16 parameters. It also turns
    ordered dictionaries into plain ones, and strings into the text of a generator object. Only the step count is left
    as torch converts it.
    """
    if isinstance(loaded, dict) and isinstance(saved, Mapping):
        loaded.update({key: value for key, value in saved.items() if key != STEP_KEY})


def settings_of(optimizer: Optimizer) -> list[list[Any]]:
    """Return the settings of an optimiser's groups, such as learning rates, and the number of parameters of each.

    They serve only for comparison with those of another call.
    """
    return [
        [
            *group,
            len(group["params"]),
            # a function call for each number would take most of the time
            *(item if type(item) in _PLAIN else _comparable(item) for key, item in group.items() if key != "params"),
        ]
        for group in optimizer.param_groups
    ]


def has_plain_settings(optimizer: Optimizer) -> bool:
    """Return whether no setting of an optimiser's groups can change in place."""
    return all(
        _is_plain(value) for group in optimizer.param_groups for name, value in group.items() if name != "params"
    )


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def plain_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimiser's groups as JSON, to compare over ranks; None for values without numbers."""
    return [
        {name: _plain_setting(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def first_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the numbers in the state that an optimiser has from the start, for each parameter, for comparison.

    For a tensor of the parameter's shape, which may be a part here, that is the common value of all elements. It is
    None if there is none.
    """
    if not optimizer.state:
        return []
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        {str(key): _first_value(value, parameter) for key, value in optimizer.state.get(parameter, {}).items()}
        for parameter in parameters
    ]


def has_other_values(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether two results of `first_state` have different numbers for the same parameter."""
    return any(
        value is not None and theirs.get(key) is not None and theirs[key] != value
        for own, theirs in zip(one, other, strict=False)
        for key, value in own.items()
    )


def _first_value(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not parameter.dim():
        return _plain_setting(value)
    local = (value.to_local() if isinstance(value, DTensor) else value).detach().flatten()
    is_one = not local.is_meta and local.numel() > 1 and bool((local == local[0]).all())
    return str(local[0].item()) if is_one else None


def order_digest(model: nn.Module, optimizer: Optimizer) -> str:
    """Return a digest of the order in which an optimiser has the parameters of a model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    return hashlib.blake2b(json.dumps(order).encode(), digest_size=16).hexdigest()


def difference_of_settings(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], where: str, elsewhere: str
) -> str | None:
    """Return the first setting that differs between two results of `plain_settings`, or None.

    Args:
        one: Settings by group.
        other: Settings to compare with.
        where: Words for the origin of the first.
        elsewhere: Words for the origin of the second.
    """
    if len(one) != len(other):
        return f"the optimiser has {len(one)} groups {where} and {len(other)} {elsewhere}"
    for number, (group, others) in enumerate(zip(one, other, strict=True)):
        of_group = f" in group {number}" if len(one) > 1 else ""
        for name in {**group, **others}:
            if group.get(name) != others.get(name):
                return (
                    f"{name} of the optimiser is {group.get(name)} {where} and {others.get(name)} {elsewhere}{of_group}"
                )
    return None


def _plain_setting(value: Any) -> Any:
    if isinstance(value, Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        return str(local.tolist()) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return [_plain_setting(item) for item in value]
    return str(value) if isinstance(value, bool | int | float | str) else None


def _comparable(value: Any) -> Any:
    """Return a value that differs once a setting was changed, even in place."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value if isinstance(value, _PLAIN) else id(value)


_PLAIN = (type(None), bool, int, float, str)
