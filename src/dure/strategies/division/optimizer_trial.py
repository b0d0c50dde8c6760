"""Trials of optimisers: given a part of its parameters, does one do to each what it would have done?"""

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.data.randomness import GeneratorStates, kept_global_randomness
from dure.strategies.division.held_models import held_model
from dure.strategies.division.step_hooks import fault_of_hooks
from dure.torchcompat import local_tensor, step_without_hooks

NEEDS_CLOSURE = "its step asks for a closure that computes the loss of the whole model again"
_PER_GROUP = 2
_MOST_PER_DIMENSION = 4
_NUM_STEPS = 12
"""Steps of a trial: some optimisers act on a sense of the whole only after a few."""
_SCALES = (1.0, 0.01, 100.0)
"""Sizes of gradients in turn, other ones for neighbours: some act only where a norm, or the largest, passes a bound."""


def reason_not_to_divide(optimizer: Optimizer) -> str | None:
    """Return why an optimiser needs all parameters together, or None when parts of it can step on their own.

    It is tried out: small stand-ins for a few parameters of each group are stepped together and in two parts, and
    must come out the same to the bit. The optimiser is left as it was.

    Args:
        optimizer: As the task built it; its parameters may be on the meta device.
    """
    return _try(optimizer, lambda trial: trial.reason())


def faults_of_parts(optimizer: Optimizer, cannot: str) -> list[str]:
    """Return why ranks cannot step parts of a model by themselves, a sentence each.

    Args:
        optimizer: As the task built it; its parameters may be on the meta device.
        cannot: Clause about one that needs all parameters together, such as `cannot step each stage by itself`.
    """
    if fault := fault_of_hooks(optimizer):
        return [fault]
    reason = _reason_of_keys(optimizer) or reason_not_to_divide(optimizer)
    if reason is None:
        return []
    return [
        f"the optimiser {type(optimizer).__name__} {cannot}, because {reason}: use one that steps each parameter by "
        "itself, such as AdamW or SGD, or --strategy ddp"
    ]


def _reason_of_keys(optimizer: Optimizer) -> str | None:
    """Return why an optimiser that keeps things by parameter needs all of them; None for one that does not."""
    for name, value in vars(optimizer).items():
        if name != "state" and isinstance(value, Mapping) and any(isinstance(key, Tensor) for key in value):
            return f"it keeps values of all parameters in an attribute ({name}) and not in its state"
    return None


def reason_not_to_cut(optimizer: Optimizer) -> str | None:
    """Return why an optimiser needs parameters whole, or None when parts of each can step on their own.

    The stand-ins are stepped whole, and cut in two along their first dimension, the halves apart from each other.

    Args:
        optimizer: As the task built it; its parameters may be on the meta device.
    """
    return _try(optimizer, lambda trial: trial.reason() or trial.reason_of_halves())


def _try(optimizer: Optimizer, find_reason: "Callable[[_Trial], str | None]") -> str | None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return NEEDS_CLOSURE
    trial = _Trial(optimizer)
    before = dict(vars(optimizer))
    try:
        with kept_global_randomness(*trial.devices), torch.enable_grad():
            return find_reason(trial)
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(before)


class _Trial:
    """Steps an optimiser over stand-ins of some of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step_alone = step_without_hooks(optimizer)  # hooks act on the model, which is not to be changed
        self._groups = list(optimizer.param_groups)
        chosen = [[p for p in group["params"] if p.requires_grad][:_PER_GROUP] for group in self._groups]
        self._parameters = [parameter for group in chosen for parameter in group]
        self.devices = [parameter.device for parameter in self._parameters]
        self._group_of = [index for index, group in enumerate(chosen) for _ in group]
        self._states = [optimizer.state.get(parameter, {}) for parameter in self._parameters]
        generator = torch.Generator().manual_seed(0)
        self._values = [_small_like(p, generator) for p in self._parameters]
        self._gradients = [
            [
                _unevenly(_small_like(p, generator) * _SCALES[(number + position) % len(_SCALES)], number % 4)
                for position, p in enumerate(self._parameters)
            ]
            for number in range(_NUM_STEPS)
        ]
        self._has_rebound = False
        self._is_sparse = False
        """True if gradients are given as those of a sparse embedding."""

    def reason(self) -> str | None:
        everything = range(len(self._parameters))
        if name := self._list_beside_state():
            return f"it keeps tensors in a list of its own ({name}), in the order of all parameters"
        if name := self._held_optimizer():
            return f"it steps by another optimiser ({name}), which has all parameters"
        if name := held_model(self._optimizer):
            return f"it holds a model, or parameters, beside its groups ({name}), which its step may use or change"
        generators = GeneratorStates.now(*self.devices)
        try:
            together = self._step(everything)
        except Exception as error:
            if "closure" in str(error).lower():
                return NEEDS_CLOSURE
            if "sparse" in str(error).lower() and not self._is_sparse:
                self._is_sparse = True  # it takes no other gradients (SparseAdam)
                return self.reason()
            return f"its step failed in a trial with {type(error).__name__}: {error}"
        if self._has_rebound:
            return "it gives parameters other memory (`p.data = ...`) where it should change them (`p.copy_(...)`)"
        if not GeneratorStates.now(*self.devices).is_same_as(generators):
            return "it draws random numbers, which come in the order of all parameters"
        if everything and all(torch.equal(together[position], self._values[position]) for position in everything):
            return f"{_NUM_STEPS} steps of a trial changed nothing, which shows nothing of what they would change"
        extra = [key for key in self._optimizer.state if not isinstance(key, Tensor)]
        if extra or len(self._optimizer.state_dict()) > 2:
            return "it keeps state of the whole beside that of the parameters"
        for part in (everything[::2], everything[1::2]):
            try:
                alone = self._step(part)
            except Exception as error:
                return f"over a part of the parameters it fails with {type(error).__name__}: {error}"
            if not all(torch.equal(alone[position], together[position]) for position in part):
                return "what it does to one parameter depends on the others"
        return None

    def _list_beside_state(self) -> str | None:
        """Return the name of an attribute that lists a tensor for each parameter, which goes by their order."""
        num_parameters = sum(len(group["params"]) for group in self._groups)
        for name, value in vars(self._optimizer).items():
            is_list = isinstance(value, list | tuple) and len(value) == num_parameters
            if is_list and all(isinstance(item, Tensor) for item in value):
                return name
        return None

    def _held_optimizer(self) -> str | None:
        """Return the name of an attribute that is, or lists, another optimiser."""
        for name, value in vars(self._optimizer).items():
            if any(isinstance(held, Optimizer) for held in (value if isinstance(value, list | tuple) else [value])):
                return name
        return None

    def reason_of_halves(self) -> str | None:
        """Return why the halves of the stand-ins, cut in either of two dimensions, do not step as the wholes do."""
        everything = range(len(self._parameters))
        together = self._step(everything)  # as it did above
        for half in (_Half(dim, number) for dim in (0, 1) for number in (0, 1)):
            try:
                alone = self._step(everything, half)
            except Exception as error:
                return f"over a part of a parameter it fails with {type(error).__name__}: {error}"
            if not all(_nearly_equal(alone[position], half.of(together[position])) for position in everything):
                return "what it does to one element depends on the others of its tensor"
        return None

    def _step(self, positions: Iterable[int], half: "_Half | None" = None) -> dict[int, Tensor]:
        """Return where the stand-ins at these positions, or a half of each, end when no others are there."""
        cut = (lambda tensor: tensor) if half is None else half.of
        chosen = {position: cut(self._values[position]).clone().requires_grad_() for position in positions}
        self._optimizer.param_groups = [
            {
                **_settings(group),
                "params": [chosen[position] for position in chosen if self._group_of[position] == index],
            }
            for index, group in enumerate(self._groups)
        ]
        self._optimizer.state = defaultdict(dict)
        for position, parameter in chosen.items():
            if self._states[position]:
                small = _small_state(self._states[position], self._parameters[position])
                shape = self._values[position].shape
                self._optimizer.state[parameter] = {
                    key: cut(value).clone() if isinstance(value, Tensor) and value.shape == shape else value
                    for key, value in small.items()
                }
        for gradients in self._gradients:
            for position, parameter in chosen.items():
                gradient = cut(gradients[position]).clone()
                parameter.grad = gradient.to_sparse(1) if self._is_sparse and gradient.dim() else gradient
            places = [parameter.data_ptr() for parameter in chosen.values()]
            self._step_alone()
            self._has_rebound |= places != [parameter.data_ptr() for parameter in chosen.values()]
        return {position: parameter.detach() for position, parameter in chosen.items()}


@dataclass(frozen=True, slots=True)
class _Half:
    """One half of a tensor, the first or the second along a dimension; the whole of one that cannot be halved."""

    dim: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return that half."""
        if self.dim >= tensor.dim() or tensor.size(self.dim) < 2:
            return tensor
        return tensor.chunk(2, self.dim)[self.number]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings with a learning rate: a warm-up may begin at zero."""
    settings = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
    if "lr" in settings and not settings["lr"]:
        settings["lr"] = settings.get("initial_lr") or 0.01
    return settings


def _nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Compare to a few roundings: what is left over at the end of a vector instruction's length may round otherwise."""
    few = 8 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=few, atol=few)


def _corner(shape: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(min(size, _MOST_PER_DIMENSION)) for size in shape)


def _small_like(parameter: Tensor, generator: torch.Generator) -> Tensor:
    shape = [min(size, _MOST_PER_DIMENSION) for size in parameter.shape]
    device = "cpu" if parameter.is_meta else parameter.device
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, parameter.dtype)


def _unevenly(gradient: Tensor, dim: int) -> Tensor:
    """Return a gradient whose second half along a dimension is smaller; the same one where it has no such dimension."""
    if dim >= gradient.dim() or gradient.size(dim) < 2:
        return gradient
    first, *others = gradient.chunk(2, dim)
    return torch.cat([first, *(0.01 * other for other in others)], dim)


def _small_state(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Cut what an optimiser's constructor has already put there (Adagrad) to the size of a stand-in."""
    small = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and (local := local_tensor(value)) is not value:
            # of a shard, which may be empty, one value stands for all
            shape = [min(size, _MOST_PER_DIMENSION) for size in value.shape]
            value = local.flatten()[:1].clone().expand(shape).clone() if local.numel() else local.new_zeros(shape)
        elif isinstance(value, Tensor):
            value = value[_corner(value.shape)] if value.shape == parameter.shape else value
            value = torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.clone()
        else:
            value = copy.deepcopy(value)
        small[key] = value
    return small
