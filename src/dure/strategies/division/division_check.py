"""Comparison of one call of a model, computed whole and divided, on replicas that are discarded.

Sizes can coincide: an attention mask may be as long as the batch, a statistic as long as a device's part of it. Also, a
model may mix samples in a way that no size shows. In both cases the output for the whole batch differs from that for
its parts.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.data.randomness import GeneratorStates, kept_global_randomness
from dure.errors import TaskInvalid, message_of
from dure.strategies.contract.batch_layout import are_equal
from dure.strategies.contract.batches import map_tensors, to_device
from dure.strategies.division.gathering import gather
from dure.strategies.state.containers import Path, are_same, items_of
from dure.strategies.state.forward_state import ForwardAttributes
from dure.strategies.state.module_replicas import replicate
from dure.strategies.state.not_gathered import NotGathered
from dure.strategies.state.objects.object_state import ObjectState
from dure.torchcompat.modules import BatchNorm

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""
_MOST_ROUNDING = 0.125
"""Relative difference that does not count as rounding even in half precision."""


@dataclass
class Comparison:
    """Values of one kind (the output, or one attribute) for which joining the parts needs care."""

    shared: set[Path] = field(default_factory=set)
    """Values without samples, though as long as a device's part."""
    wrong: set[Path] = field(default_factory=set)
    """Values that differ from those of one device."""


@dataclass
class Verdict:
    """Findings of the comparison of one call."""

    output: Comparison = field(default_factory=Comparison)
    attributes: dict[str, Comparison] = field(default_factory=dict)
    """Comparisons by the attribute's name in the model."""
    is_compared: bool = False
    """True if the numbers could be compared, and not only their shapes: random numbers differ."""


def compare_division(
    model: nn.Module,
    devices: Sequence[torch.device],
    whole: Call,
    parts: Sequence[Call],
    counts: Sequence[int],
) -> Verdict:
    """Run a call whole and divided.

    Modes, generators, buffers and attributes of the model are restored.

    Args:
        model: Model on the first device, called in its own mode, and in evaluation mode if it draws random numbers.
        devices: One for each part.
        whole: Arguments of the call.
        parts: Arguments of each device's part, on the first device.
        counts: Samples of each part.

    Raises:
        TaskInvalid: The model accepts the whole but not a part.
        Exception: The model's own, if it fails on the whole.
    """
    trial = _Trial(model, devices, counts)
    verdict, is_compared = trial.run(whole, parts, is_training=None)
    if not is_compared:
        # differences by dropout and BatchNorm's statistics are declared: without them the rest can be compared
        try:
            quiet, is_compared = trial.run(whole, parts, is_training=False)
        except Exception:  # only the training mode matters
            return verdict
        verdict.output.wrong |= quiet.output.wrong if is_compared else set()
    verdict.is_compared = is_compared
    return verdict


class _Trial:
    def __init__(self, model: nn.Module, devices: Sequence[torch.device], counts: Sequence[int]) -> None:
        self._model = model
        self._devices = devices
        self._counts = counts
        self._is_differentiating = False
        """True once the model failed without gradients; they are avoided until then to save memory."""

    def run(self, whole: Call, parts: Sequence[Call], *, is_training: bool | None) -> tuple[Verdict, bool]:
        """Run both in a mode; None for the model's own. Return the differences, and whether numbers were compared."""
        with _kept_generators(self._model, self._devices) as has_drawn:
            alone = self._whole(whole, is_training)
            together = []
            for index, part in enumerate(parts):
                try:
                    together.append(self._run_on(index, part, is_training))
                except Exception as error:
                    raise TaskInvalid(
                        f"the model runs on a batch and not on the part of one device ({type(error).__name__}: "
                        f"{message_of(error)}): an argument that has as many rows as the batch has samples is not "
                        "divided by them, or a size is given; use balanced_dp or ddp"
                    ) from error
            is_compared = not (has_drawn() or self._has_statistics(is_training))
        return self._compared(alone, together, are_numbers_compared=is_compared), is_compared

    def _whole(self, call: Call, is_training: bool | None) -> Any:
        try:
            return self._run_on(0, call, is_training)
        except Exception:
            if not torch.is_grad_enabled() or self._is_differentiating:
                raise
        # a model may differentiate itself, such as one that returns forces
        self._is_differentiating = True
        return self._run_on(0, call, is_training)

    def _run_on(self, index: int, call: Call, is_training: bool | None) -> tuple[Any, dict[str, Any]]:
        (replica,) = replicate(self._model, [self._devices[index]], linked=False)
        if is_training is not None:
            replica.model.train(is_training)
        before = ForwardAttributes(replica.model)
        args, kwargs = to_device(map_tensors(call, lambda tensor: tensor.detach().clone()), self._devices[index])
        with warnings.catch_warnings(), torch.set_grad_enabled(self._is_differentiating):
            # activation checkpointing, for example, warns about inputs without gradients
            warnings.simplefilter("ignore")
            output = replica.model.forward(*args, **kwargs)
        (attributes,) = before.changes([None])
        return output, replica.originals_in(attributes)

    def _has_statistics(self, is_training: bool | None) -> bool:
        return any(
            isinstance(module, BatchNorm)
            and ((module.training if is_training is None else is_training) or not module.track_running_stats)
            for module in self._model.modules()
        )

    def _compared(self, alone: Any, together: list[Any], *, are_numbers_compared: bool) -> Verdict:
        home = self._devices[0]
        outputs = [output for output, _ in together]
        verdict = Verdict()
        joined = gather(outputs, home, self._counts)
        _compare(alone[0], joined, outputs[0], (), verdict.output, are_numbers_compared)
        for name, value in alone[1].items():
            values = [attributes.get(name) for _, attributes in together]
            try:
                joined = gather(values, home, self._counts)
            except TaskInvalid:
                continue  # found again when it is joined for the loss
            found = verdict.attributes.setdefault(name, Comparison())
            _compare(value, joined, values[0], (), found, are_numbers_compared)
        return verdict


def _compare(whole: Any, joined: Any, part: Any, path: Path, found: Comparison, are_numbers_compared: bool) -> None:
    """Record the paths at which the joined parts differ from the whole."""
    if type(joined) is NotGathered:
        return
    if type(whole) is not type(joined):
        found.wrong.add(path)
        return
    items = None if isinstance(whole, Tensor) else items_of(whole)
    if items is not None:
        others, of_part = items_of(joined) or {}, items_of(part) or {}
        if others.keys() != items.keys():
            found.wrong.add(path)
            return
        for key, item in items.items():
            of_key = of_part.get(key, others[key])
            _compare(item, others[key], of_key, (*path, key), found, are_numbers_compared)
        return
    if isinstance(whole, Tensor | np.ndarray):
        # rows would be fewer in a part
        if _are_alike(whole, part, are_numbers_compared):
            found.shared.add(path)
            return
        if _are_alike(whole, joined, are_numbers_compared):
            return
    elif are_same(whole, joined) or not isinstance(whole, int | float | complex | str | bytes | np.generic):
        return
    found.wrong.add(path)


def _are_alike(one: Any, other: Any, are_numbers_compared: bool) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not are_numbers_compared:
        return True
    if not isinstance(one, Tensor) or not (one.is_floating_point() or one.is_complex()) or one.is_nested:
        return are_equal(one, other)
    one, other = (tensor.to_dense() if tensor.layout is not torch.strided else tensor for tensor in (one, other))
    if not one.numel() or bool(one.isnan().any()):
        return True
    # sums in another order differ by a few epsilon, mixed samples by their own magnitude
    tolerance = min(16 * torch.finfo(one.dtype).eps ** 0.5, _MOST_ROUNDING)
    return bool((one - other.to(one.device)).abs().max() <= tolerance * one.abs().max())


@contextmanager
def _kept_generators(model: nn.Module, devices: Sequence[torch.device]) -> Iterator[Callable[[], bool]]:
    """Restore all generators, a model's own included; yield a function that returns whether one was drawn from."""
    own = ObjectState({"model": model})
    with kept_global_randomness(*devices):
        before = GeneratorStates.now(*devices)
        try:
            yield lambda: bool(own.drawn()) or not GeneratorStates.now(*devices).is_same_as(before)
        finally:
            own.put_back()
