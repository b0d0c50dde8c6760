"""One trial of an optimiser: it steps stand-ins for some of its parameters, all together and in parts."""

import copy
import io
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dure.data.randomness import GeneratorStates
from dure.errors import message_of
from dure.strategies.contract.precision import is_about_closure
from dure.strategies.division.held_models import held_model
from dure.strategies.division.late_steps import StepCounters
from dure.strategies.division.stand_ins import StandIn
from dure.strategies.state.objects.object_state import ObjectState
from dure.torchcompat.optimizers import step_without_hooks
from dure.torchcompat.tensors import local_tensor, own_attributes

_AS_IT_IS = nullcontext()
NEEDS_CLOSURE = "its step asks for a closure that computes the loss of the whole model again"
_SCALES = (1.0, 0.01, 100.0)
"""Sizes of gradients in turn, different for neighbours: some optimisers act only if a norm, or a maximum, exceeds a
bound.
"""
STEPS_PER_FACTOR = 4
"""Steps with each of a trial's factors."""


class TriedOptimizer:
    """Optimiser as the task built it, which steps copies of its state and is restored."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups = list(optimizer.param_groups)
        self.state = optimizer.state
        self.trained = [[p for p in group["params"] if p.requires_grad] for group in self.groups]
        self.devices = [parameter.device for group in self.trained for parameter in group]
        self.step_alone = step_without_hooks(optimizer)  # hooks act on the model, which must not change
        self.is_sparse = False
        """True if gradients are sparse, as those of a sparse embedding."""
        self._attributes = dict(vars(optimizer))
        self._beneath = ObjectState({"optimizer": optimizer})

    def put_back_attributes(self) -> None:
        """Restore the attributes of the optimiser, and what they hold."""
        vars(self.optimizer).clear()
        vars(self.optimizer).update(self._attributes)
        self._beneath.put_back()

    def take_copies(self) -> None:
        """Set copies of the optimiser's attributes, such as a count of its calls, which steps change instead."""
        self.put_back_attributes()
        vars(self.optimizer).clear()
        vars(self.optimizer).update({name: _copied(value) for name, value in self._attributes.items()})


class _Calls(TorchFunctionMode):
    """Record of operations: their names, and the fractions among their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record an operation; integers among its arguments may be sizes."""
        named = sorted((kwargs or {}).items())
        fractions = [value for value in (*args, *(value for _, value in named)) if isinstance(value, float)]
        self.found.append((getattr(function, "__name__", ""), fractions))
        return function(*args, **(kwargs or {}))


class StepTrial:
    """Trial in which an optimiser steps stand-ins for some of its parameters."""

    def __init__(
        self,
        subject: TriedOptimizer,
        chosen: list[StandIn],
        num_steps: int,
        *,
        is_first: bool = False,
        has_values: bool = True,
        dtype: torch.dtype | None = None,
        landmarks: list[int] | None = None,
        factors: Sequence[float | None] = (),
    ) -> None:
        """Create stand-ins and their gradients.

        Args:
            subject: The optimiser.
            chosen: Parameters, in the order of their groups.
            num_steps: Number of steps.
            is_first: True for stand-ins that are plain tensors; False for parameters with the classes and plain
                attributes of the model's.
            has_values: False for stand-ins on the meta device.
            dtype: Dtype of all stand-ins; None for those of the parameters.
            landmarks: Step counts to which the optimiser's counters are set on the way.
            factors: Factors on halves of gradients in the last steps; None for no gradient.
        """
        self._factors = factors
        self._landmarks = landmarks
        self._dtype = dtype
        self._subject = subject
        self._optimizer = subject.optimizer
        self._num_steps = num_steps
        self._is_first = is_first
        self._has_values = has_values
        self.parameters = [each.parameter for each in chosen]
        self._group_of = [each.group for each in chosen]
        self._states = [subject.state.get(parameter, {}) for parameter in self.parameters]
        generator = torch.Generator().manual_seed(0)
        self._values = [self._drawn(each, generator) for each in chosen]
        self._gradients = [
            [
                _unevenly(
                    self._drawn(each, generator) * _SCALES[(number + position) % len(_SCALES)],
                    *self._unevenness(number, position),
                )
                for position, each in enumerate(chosen)
            ]
            for number in range(num_steps)
        ]
        self._has_rebound = False
        self._attributes_after: set[str] = set()
        """Names of the attributes that the last steps gave to parameters."""

    def _unevenness(self, number: int, position: int) -> tuple[int, float | None]:
        """Return the dimension along which the second half of a gradient differs in a step, and the factor on it.

        Odd factors are on every other parameter only, and come last: they may hide differences before.
        """
        odd = number - self._num_steps + STEPS_PER_FACTOR * len(self._factors)
        if odd < 0 or (odd + position) % 2:
            return number % 4, 0.01
        return odd // 2 % 2, self._factors[odd // STEPS_PER_FACTOR]

    def _drawn(self, stand_in: StandIn, generator: torch.Generator) -> Tensor:
        parameter = stand_in.parameter
        dtype = parameter.dtype if self._dtype is None else self._dtype
        if not self._has_values:
            return torch.empty(stand_in.shape, dtype=dtype, device="meta")
        device = "cpu" if parameter.is_meta else parameter.device
        return torch.randn(stand_in.shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def reason(self) -> str | None:
        everything = range(len(self.parameters))
        if name := self._list_beside_state():
            return f"it keeps tensors in a list of its own ({name}), in the order of all parameters"
        if name := self._held_optimizer():
            return f"it steps by another optimiser ({name}), which has all parameters"
        if name := held_model(self._optimizer):
            return f"it holds a model, or parameters, beside its groups ({name}), which its step may use or change"
        generators = GeneratorStates.now(*self._subject.devices)
        try:
            together = self._step(everything)
        except Exception as error:
            if is_about_closure(error):
                return NEEDS_CLOSURE
            if "sparse" in str(error).lower() and not self._subject.is_sparse:
                self._subject.is_sparse = True  # it accepts no other gradients (SparseAdam)
                return self.reason()
            return f"its step failed in a trial with {type(error).__name__}: {message_of(error)}"
        if self._has_rebound:
            return "it gives parameters other memory (`p.data = ...`) where it should change them (`p.copy_(...)`)"
        if not GeneratorStates.now(*self._subject.devices).is_same_as(generators):
            return "it draws random numbers, which come in the order of all parameters"
        if everything and all(torch.equal(together[position], self._values[position]) for position in everything):
            return f"{self._num_steps} steps of a trial changed nothing, which shows nothing of what they would change"
        extra = [key for key in self._optimizer.state if not isinstance(key, Tensor)]
        if extra or len(self._optimizer.state_dict()) > 2:
            return "it keeps state of the whole beside that of the parameters"
        return self.reason_of_parts(together)

    def is_possible(self) -> bool:
        """Return whether the steps can be taken: setting counters may contradict other state."""
        try:
            self._step(range(len(self.parameters)))
        except Exception:
            return False
        return True

    def reason_of_parts(self, together: dict[int, Tensor] | None = None) -> str | None:
        """Return the reason why parts of the stand-ins do not step as all of them do.

        Args:
            together: Final values when all of them step, if known.
        """
        everything = range(len(self.parameters))
        if together is None:
            try:
                together = self._step(everything)
            except Exception as error:
                return f"its step failed in a trial with {type(error).__name__}: {message_of(error)}"
        # neighbours are separated, and later those at a distance of two
        pairs = [number for number in everything if number % 4 < 2]
        others = [number for number in everything if number % 4 >= 2]
        for part in (everything[::2], everything[1::2], *((pairs, others) if not self._is_first else ())):
            try:
                alone = self._step(part)
            except Exception as error:
                return f"over a part of the parameters it fails with {type(error).__name__}: {message_of(error)}"
            if not all(_is_same(alone[position], together[position]) for position in part):
                return "what it does to one parameter depends on the others"
        return None

    def _list_beside_state(self) -> str | None:
        """Return the name of an attribute that lists a tensor for each parameter and so depends on their order."""
        num_parameters = sum(len(group["params"]) for group in self._subject.groups)
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
        """Return the reason why halves of the stand-ins, cut in either dimension, do not step as the wholes do."""
        everything = range(len(self.parameters))
        try:
            together = self._step(everything)  # as in the step above
        except Exception as error:
            return f"its step failed in a trial with {type(error).__name__}: {message_of(error)}"
        for half in (_Half(dim, number) for dim in (0, 1) for number in (0, 1)):
            try:
                alone = self._step(everything, half)
            except Exception as error:
                return f"over a part of a parameter it fails with {type(error).__name__}: {message_of(error)}"
            if not all(_nearly_equal(alone[position], half.of(together[position])) for position in everything):
                return "what it does to one element depends on the others of its tensor"
        return None

    def reason_of_classes(self) -> str | None:
        """Return the reason why plain parameters do not step as those of the model's own classes do."""
        own = {type(parameter).__name__ for parameter in self.parameters if _own_class(parameter) is not None}
        everything = range(len(self.parameters))
        if not own:
            return None
        together = self._step(everything)
        try:
            plain = self._step(everything, has_classes=False)
        except Exception as error:
            return f"over plain parameters it fails with {type(error).__name__}: {message_of(error)}"
        if all(_is_same(plain[position], together[position]) for position in everything):
            return None
        return f"it goes by the class of a parameter ({', '.join(sorted(own))}), and parts of one are plain parameters"

    def reason_of_settings(self) -> str | None:
        """Return the reason why ranks with parts of the stand-ins would have other settings of groups, or None.

        A checkpoint has one rank's, though the steps of all may be right.
        """
        if name := self._depending_on_part(lambda: [_numbers(group) for group in self._optimizer.param_groups]):
            return f"it sets {name} of a parameter group by the parameters that it steps"
        return None

    def reason_of_containers(self) -> str | None:
        """Return the reason why ranks with parts of the stand-ins would have other attributes, or None.

        A checkpoint has one rank's, though the steps of all may be right.
        """
        if name := self._depending_on_part(lambda: [_sizes_of_attributes(self._optimizer)]):
            return f"it keeps values of its parameters in an attribute ({name}) and not in its state"
        if name := self._depending_on_part(
            lambda: [_sizes_of_settings(group) for group in self._optimizer.param_groups]
        ):
            return f"it keeps values of its parameters in a group ({name}) and not in its state"
        return None

    def _depending_on_part(self, found: Callable[[], list[dict[str, Any]]]) -> str | None:
        """Return a name under which something else is found after steps of a part of the stand-ins than of all."""
        everything = range(len(self.parameters))
        self._step(everything)
        together = found()
        for part in (everything[::2], everything[1::2]):
            self._step(part)
            for one, other in zip(together, found(), strict=True):
                if names := [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]:
                    return min(names)
        return None

    def reason_of_attributes(self) -> str | None:
        """Return the reason why an optimiser needs the model's own parameters, to which it gives attributes, or None.

        No checkpoint has the attributes of other objects in their place.
        """
        self._step(range(len(self.parameters)))
        if self._attributes_after:
            return f"it keeps values in attributes of the parameters ({min(self._attributes_after)}), not in its state"
        return None

    def traced(self) -> list[Any] | None:
        """Return the operations of the steps; None if these need values."""
        calls = _Calls()
        try:
            self._step(range(len(self.parameters)), within=calls)
        except Exception:
            return None
        return calls.found

    def _step(
        self,
        positions: Iterable[int],
        half: "_Half | None" = None,
        *,
        has_classes: bool = True,
        within: AbstractContextManager[Any] = _AS_IT_IS,
    ) -> dict[int, Tensor]:
        """Return the final values of the stand-ins at these positions, or of a half of each, if no others are stepped.

        Args:
            positions: Numbers of stand-ins.
            half: Half of each; None for the whole.
            has_classes: Whether whole stand-ins have the classes of the model's parameters.
            within: Context of the steps.
        """
        cut = (lambda tensor: tensor) if half is None else half.of
        chosen = {position: cut(self._values[position]).clone().requires_grad_() for position in positions}
        self._subject.take_copies()
        if not self._is_first:
            for position, tensor in chosen.items():
                chosen[position] = _like_parameter(
                    tensor, self.parameters[position], has_class=has_classes and half is None
                )
        self._optimizer.param_groups = [
            {
                **_settings(group),
                "params": [chosen[position] for position in chosen if self._group_of[position] == index],
            }
            for index, group in enumerate(self._subject.groups)
        ]
        self._optimizer.state = defaultdict(dict)
        for position, parameter in chosen.items():
            if self._states[position]:
                shape = self._values[position].shape
                small = _small_state(self._states[position], self.parameters[position], shape)
                self._optimizer.state[parameter] = {
                    key: cut(value).to(parameter.device, copy=True)
                    if isinstance(value, Tensor) and value.shape == shape
                    else value
                    for key, value in small.items()
                }
        attributes = {position: dict(own_attributes(parameter)) for position, parameter in chosen.items()}
        counters = StepCounters(self._landmarks) if self._landmarks else None
        # what an optimiser says of its thousandth step is not true, and its warnings come in training too
        silence = _AS_IT_IS if counters is None else redirect_stdout(io.StringIO())
        with within, silence, warnings.catch_warnings(action="ignore"):
            for number, gradients in enumerate(self._gradients):
                if counters is not None:
                    counters.before_step(self._optimizer, number)
                for position, parameter in chosen.items():
                    whole = gradients[position]
                    if whole is None:
                        parameter.grad = None
                        continue
                    gradient = cut(whole).clone()
                    parameter.grad = _of_all_rows(gradient) if self._subject.is_sparse and gradient.dim() else gradient
                places = [parameter.data_ptr() for parameter in chosen.values()]
                self._subject.step_alone()
                self._has_rebound |= places != [parameter.data_ptr() for parameter in chosen.values()]
        self._attributes_after = {
            name
            for position, parameter in chosen.items()
            for name, value in own_attributes(parameter).items()
            if name not in attributes[position] or attributes[position][name] is not value
        }
        return {position: parameter.detach() for position, parameter in chosen.items()}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _own_class(parameter: Tensor) -> type | None:
    """Return the class of a parameter if the task defines it, or None."""
    cls = type(parameter)
    return None if cls.__module__.startswith("torch.") or not isinstance(parameter, nn.Parameter) else cls


def _like_parameter(tensor: Tensor, parameter: Tensor, *, has_class: bool) -> Tensor:
    """Return a tensor as a parameter with the plain attributes, and optionally the class, of one of the model's."""
    made = nn.Parameter(tensor.detach())
    cls = _own_class(parameter)
    if has_class and cls is not None:
        with suppress(TypeError):  # classes with another layout
            made.__class__ = cls
    plain = (bool, int, float, str, type(None))
    vars(made).update({name: value for name, value in own_attributes(parameter).items() if isinstance(value, plain)})
    return made


@dataclass(frozen=True, slots=True)
class _Half:
    """Half of a tensor, the first or the second along a dimension; a tensor that cannot be halved is kept whole."""

    dim: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return that half of a tensor."""
        if self.dim >= tensor.dim() or tensor.size(self.dim) < 2:
            return tensor
        return tensor.chunk(2, self.dim)[self.number]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and texts in a group's settings."""
    plain = {name: value.item() if _is_number(value) else value for name, value in group.items()}
    return {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str)}


def _sizes_of_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the number of values in each of an optimiser's own attributes, and the shapes of the tensors in it."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, held in ObjectState({"optimizer": optimizer}).first.items():
        name = path.removeprefix("optimizer.").partition(".")[0].partition("[")[0]
        found[name].append(str(list(held.shape)) if isinstance(held, Tensor) else "")
    return {name: sorted(sizes) for name, sizes in found.items()}


def _sizes_of_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of values in each container of a group's settings, and the shapes of the tensors in it."""
    return {name: _sizes(value) for name, value in group.items() if name not in ("params", "param_names")}


def _sizes(value: Any, levels: int = 8) -> Any:
    if isinstance(value, Tensor):
        return list(value.shape)
    if not isinstance(value, dict | list | tuple) or not levels:  # one may contain itself
        return None
    return [_sizes(item, levels - 1) for item in (value.values() if isinstance(value, dict) else value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's settings with a learning rate: a warm-up may begin at zero."""
    settings = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names")})
    if "lr" in settings and not settings["lr"]:
        settings["lr"] = settings.get("initial_lr") or 0.01
    return settings


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are bitwise equal; NaN equals NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal to a few roundings: the remainder after full vectors may round differently."""
    few = 8 * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=few, atol=few, equal_nan=True)


def _unevenly(gradient: Tensor, dim: int, factor: float | None) -> Tensor | None:
    """Return a gradient with a factor on its second half along a dimension; unchanged if it has no such dimension."""
    if factor is None:
        return None
    if dim >= gradient.dim() or gradient.size(dim) < 2:
        return gradient
    first, *others = gradient.chunk(2, dim)
    return torch.cat([first, *(factor * other for other in others)], dim)


def _of_all_rows(gradient: Tensor) -> Tensor:
    """Return a sparse gradient that has all rows, even those of zeros: another part of the row may have others."""
    rows = torch.arange(len(gradient), device=gradient.device)[None]
    return torch.sparse_coo_tensor(rows, gradient, gradient.shape, check_invariants=False)


def _small_state(state: Mapping[str, Any], parameter: Tensor, shape: torch.Size) -> dict[str, Any]:
    """Cut the state from an optimiser's constructor (Adagrad) to the shape of a stand-in."""
    small = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and (local := local_tensor(value)) is not value:
            # of a shard, which may be empty, one value represents all
            sizes = shape if value.shape == parameter.shape else value.shape
            value = local.flatten()[:1].clone().expand(sizes).clone() if local.numel() else local.new_zeros(sizes)
        elif isinstance(value, Tensor):
            value = value[tuple(map(slice, shape))] if value.shape == parameter.shape else value
            value = torch.zeros(value.shape, dtype=value.dtype) if value.is_meta else value.clone()
        else:
            value = copy.deepcopy(value)
        small[key] = value
    return small
