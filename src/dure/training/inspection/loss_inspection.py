"""Inspection of the task's loss on a few samples before training, for traits that make dividing a batch matter.

Nothing is concluded from the classes of modules. The loss is called in a `Trial`, which leaves no trace, and all
changes are recorded: generators, buffers, parameters, plain state. A call on eight samples, and calls on the same eight
in three parts, show whether it is a mean over samples.
"""

import contextlib
import copy
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure import torchcompat
from dure.records.sums import Sum, exact_sum
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.strategy import LossFunction
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.shared_storage import recomputed_weights
from dure.strategies.state.trial import Trial, is_equal
from dure.training.inspection.call_watches import FedState, StateOfForward, StateOfModules
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.constant_draws import ConstantDraws, TooManyDraws
from dure.training.inspection.first_loss import FirstLoss
from dure.training.inspection.model_outputs import OutputsAsLoss

NUM_SAMPLES = 8
_PART_ENDS = (1 / 8, 1 / 2, 1)
"""Ends of the parts into which a group of samples is divided, as fractions."""
_MOST_SECONDS = 5.0
"""Seconds in which the whole inspection should end; if it takes longer, later calls are not tried."""
_SLOWEST_CALL_SECONDS = 4.0
"""Seconds of a call on half of the first samples beyond which no further call is made."""
_LATER_CALLS = 12
"""Calls made before the loss is inspected again, because its behaviour may change after a few."""
_LATER_GROUPS = 3
"""Further groups of samples on which a loss is compared with its parts: the first ones may not be typical."""
_FEW = NUM_SAMPLES * (1 + _LATER_GROUPS)
"""Number of samples on which all traits of a loss are inspected."""
_WIDE_SAMPLES = 256
"""Number of later samples on which only losses are compared, for rare cases: a mask that omits one in a hundred."""
_WIDE_GROUP = 64
"""Maximum number of these samples at once."""
_WIDE_SECONDS = 1.0
"""Seconds within which their comparisons must begin."""
_LATE_SECONDS = 0.1
"""Seconds within which comparisons of further samples must begin, each time losses are compared during the run."""
_GRADIENT_SCALES = (2.0**-8, 2.0**8)
"""Factors on a loss for which gradients are compared."""
_QUANTILES = (0.03, 0.5)
"""Quantiles of the constants that replace random numbers: a rare event either happens or does not."""
_LATER_SECONDS = 2.0
"""Seconds within which the calls for the later inspection must begin."""
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""Relative rounding of a loss in parts, by its dtype; half precision and autocast round more."""
_OTHER_TOLERANCE = 5e-2
_ROUNDED = 1e3
"""Size below which a gradient counts as rounding, in units of the eps of its dtype times the largest gradient norm."""


class CallSummary(NamedTuple):
    """Summary of calls of a loss: equal ones suggest that it has not changed its behaviour."""

    kind: tuple[Any, ...]
    """Names of what the calls change, and other answers to questions about them."""
    figures: tuple[str, ...]
    """Loss and norms of its gradients."""


class LossInspection:
    """Calls of a task's loss on its first samples."""

    def __init__(
        self,
        loss: LossFunction,
        model: nn.Module,
        fetch: Callable[[Sequence[int]], Any],
        objects: Mapping[str, object],
        autocast: Callable[[], AbstractContextManager[Any]],
        *,
        is_exact: bool,
        is_divided: bool = True,
        is_alone: bool = False,
        most_at_once: int = _WIDE_GROUP,
        has_random_batches: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the inspection.

        Args:
            loss: Loss of the task.
            model: Whole model, on the device of the batches.
            fetch: Returns the batch of some of the first samples, by their places in the order of training.
            objects: Objects in which the loss may keep state, by name.
            autocast: Context of a forward pass.
            is_exact: Whether forward passes are in full precision.
            is_divided: Whether the loss will see batches in parts; only then is it inspected again later.
            is_alone: Whether the other ranks make no calls meanwhile, so that a collective of the loss would block.
            most_at_once: Number of samples per call in training, for which there is memory.
            has_random_batches: Returns whether `fetch` has drawn random numbers for a batch, besides those of samples.
        """
        self._loss = loss
        self._model = model
        self._fetch = fetch
        self._objects = objects
        self._autocast = autocast
        self._is_exact = is_exact
        self.is_divided = is_divided
        """True if the loss will see batches in parts."""
        self._is_alone = is_alone
        self._most_at_once = most_at_once
        self._has_random_batches = has_random_batches
        self.watches_writes = True
        """True if writes to parameters are seen operation by operation, which some losses do not take."""
        self.first_loss = FirstLoss()
        """Result of the first call."""
        self._forward = StateOfForward(model, objects)
        """Changes by the model's own calls in the last call of the loss."""
        self._quantiles: tuple[float, ...] = ()
        """Quantiles of the constants with which a loss that draws is compared; empty if a call takes too long."""

    def traits(self, num_samples: int) -> LossTraits:
        """Call the loss and return its traits; errors of the loss are not raised, because training will raise them.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        try:
            with self._without_collectives():
                return self._traits(num_samples)
        except CollectiveCalled as called:
            return LossTraits(reason_unknown="the loss calls other ranks", collective=called.name)

    def _traits(self, num_samples: int) -> LossTraits:
        started = time.monotonic()
        few = min(num_samples, NUM_SAMPLES)
        half = _num_first(few)
        if opaque := self._opaque():
            return LossTraits(reason_unknown=f"{opaque[0]} is an iterator, whose position could not be put back")
        try:
            first = self._first(range(half))
        except Exception as error:
            why = f"the loss failed with {type(error).__name__} when it was tried"
            return LossTraits(reason_unknown=why, has_failed=True)
        self.first_loss = self._first_loss(first)
        seconds = time.monotonic() - started
        is_quick, is_slow = seconds * 6 < _MOST_SECONDS, seconds > _SLOWEST_CALL_SECONDS
        self._quantiles = _QUANTILES[: is_quick + (seconds * 30 < _MOST_SECONDS)]
        unknown = f"one call of it on {half} samples takes {seconds:.0f} s, too long to try it on parts"
        try:
            started = time.monotonic()
            second = self._tried(range(half, few), as_in_training=True) if few > half and not is_slow else first
            seconds_each = (time.monotonic() - started) / max(1, few - half)
            tried = range(few if is_quick else half)
            not_additive = self._additivity(tried) if len(tried) > 1 and not is_slow else None
            later = self._later(num_samples) if is_quick and self.is_divided else _Later()
            remembered = self._remembered(range(half), range(half, few), first) if few > half and not is_slow else ()
        except Exception as error:  # more samples at once may need more memory than there is
            why = f"the loss failed with {type(error).__name__} when it was tried on {few} samples"
            return LossTraits(reason_unknown=why, draws=first.trial.has_drawn)
        buffers = [tried.buffers(self._model) for tried in (first, second)]
        if is_quick and any(_is_same_in(buffers, name) for name in buffers[0]):
            buffers += self._buffers_of_pairs(range(few))
        state = first.trial.state, second.trial.state
        if second is not first and self._has_copies():
            places = range(half), range(half, few)
            moved = [self._tried(each, as_in_training=True, perturbs=True) for each in places]
            state = {**moved[0].trial.state, **state[0]}, {**moved[1].trial.state, **state[1]}
        not_additive = (
            not_additive
            or later.not_additive
            or (self._wide(_FEW, min(num_samples, _FEW + _WIDE_SAMPLES), seconds_each)[0] if is_quick else None)
        )
        derived = recomputed_weights(self._model)
        takes_several = half > 1 and not is_slow and math.isfinite(first.value.total)
        fails_alone, model_fails_alone = self._failure_of_one(range(half)) if takes_several else (None, False)
        hooked = tuple(dict.fromkeys((*first.trial.hooked, *second.trial.hooked)))
        return LossTraits(
            reason_unknown=unknown if is_slow and self.is_divided else None,
            draws=first.trial.has_drawn or later.draws,
            model_draws=first.forward.has_drawn or (later.draws and not first.trial.has_drawn),
            not_additive=not_additive,
            model_not_additive=not_additive is not None and not self._is_model_additive(num_samples, len(tried)),
            learned_buffers=tuple(name for name in buffers[0] if not _is_same_in(buffers, name)),
            counted_buffers=tuple(name for name in buffers[0] if _is_same_in(buffers, name)),
            model_buffers=tuple(dict.fromkeys((*first.forward.buffers, *second.forward.buffers))),
            changed_parameters=tuple(dict.fromkeys((*first.trial.parameters, *later.parameters))),
            rebound_parameters=tuple(dict.fromkeys((*first.trial.rebound, *later.rebound))),
            learned_writes=tuple(
                name
                for name, value in first.trial.parameters.items()
                if second is not first and not is_equal(value, second.trial.parameters.get(name, value.new_empty(0)))
            ),
            repeated_writes=tuple(self._repeated_writes(range(half))) if first.trial.parameters else (),
            learned_state=tuple(path for path in state[0] if path not in derived and not _is_same_in(state, path)),
            counted_state=tuple(path for path in state[0] if path not in derived and _is_same_in(state, path)),
            forward_state=tuple(first.forward.changed),
            hooked_parameters=tuple(dict.fromkeys((*gradient_hooks(self._model), *hooked))),
            hooked_by_loss=hooked,
            fails_alone=fails_alone,
            model_fails_alone=model_fails_alone,
            nonlinear_gradients=self.is_divided and not is_slow and self._is_nonlinear(range(half), first),
            sets_gradients=first.has_gradients,
            module_state=later.module_state,
            fed_state=later.fed,
            left_state=tuple(dict.fromkeys((*first.trial.left, *second.trial.left, *later.left))),
            outer_state=tuple(dict.fromkeys((*first.trial.outer, *second.trial.outer, *later.outer, *remembered))),
            uses_gradients=not is_slow and self._uses_gradients(range(half), first),
        )

    def traits_now(self, num_samples: int) -> LossTraits:
        """Return the traits of the loss in the current state of its objects, without a change to `first_loss`.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        first_loss, quantiles = self.first_loss, self._quantiles
        try:
            return self.traits(num_samples)
        finally:
            self.first_loss, self._quantiles = first_loss, quantiles

    def call_summary(self, num_samples: int) -> CallSummary:
        """Call the loss on the first samples, without and with gradients of parameters, and summarise the calls.

        Args:
            num_samples: Number of available samples, at least 1.

        Raises:
            Exception: The loss raised it.
        """
        places = range(_num_first(min(num_samples, NUM_SAMPLES)))
        with self._without_collectives():
            first = self._first(places)
            trial = first.trial
            changed = trial.buffers, trial.parameters, trial.state, trial.rebound, trial.left, trial.outer
            kind = (
                trial.has_drawn,
                first.has_gradients,
                self._uses_gradients(places, first),
                *(tuple(sorted(names)) for names in (*changed, trial.hooked, first.forward.changed, first.gradients)),
            )
        figures = (first.value.total, first.value.items, *(float(each.norm()) for each in first.gradients.values()))
        return CallSummary(kind, tuple(map(repr, figures)))

    def not_additive_now(self, num_samples: int) -> str | None:
        """Return the figures of a loss whose parts do not add up in the current state of its objects, or None.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        try:
            with self._without_collectives():
                return self._additivity(range(min(num_samples, NUM_SAMPLES))) if num_samples > 1 else None
        except (Exception, CollectiveCalled):
            return None  # more samples at once may need more memory than there is

    def call_once(self, num_samples: int) -> None:
        """Call the loss on the samples of `first_loss` only; errors of the loss are not raised.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        if not self._opaque():
            with contextlib.suppress(Exception, CollectiveCalled), self._without_collectives():
                self.first_loss = self._first_loss(self._first(range(_num_first(min(num_samples, NUM_SAMPLES)))))

    def _without_collectives(self) -> AbstractContextManager[None]:
        return no_collectives() if self._is_alone else contextlib.nullcontext()

    def _opaque(self) -> Sequence[str]:
        return ObjectState({**self._objects, "model": self._model}).opaque

    def _first(self, places: Sequence[int]) -> "_Tried":
        try:
            return self._tried(places, as_in_training=True)
        except Exception:
            self.watches_writes = False
            return self._tried(places, as_in_training=True)

    def _first_loss(self, first: "_Tried") -> FirstLoss:
        value = first.value.total
        gradient = math.hypot(*(float(each.norm()) for each in first.gradients.values()))
        return FirstLoss(
            value=value if math.isfinite(value) else None,
            gradient=gradient if math.isfinite(gradient) else None,
            tolerance=self._tolerance(first.value.dtype),
        )

    def _buffers_of_pairs(self, places: range) -> list[dict[str, Tensor]]:
        """Return the changed buffers after a call on each pair of samples, up to the first pair that the loss fails on.

        A buffer that moves by one of a few steps, such as the sign of a difference, may move alike on large groups.
        """
        found = []
        for begin in places[:-1:2]:
            try:
                found.append(self._tried(range(begin, begin + 2), as_in_training=True).buffers(self._model))
            except Exception:
                break
        return found

    def _has_copies(self) -> bool:
        """Return whether objects seem to hold copies of parameters, as a teacher does that starts as its student."""
        own = {id(parameter): parameter for parameter in self._model.parameters()}
        held = ObjectState(self._objects).first.values()
        modules = [module for module in held if isinstance(module, nn.Module)]
        tensors: list[Tensor] = [each for module in modules for each in module.parameters()]
        tensors += [each for each in held if isinstance(each, Tensor)]
        first = {_beginning(parameter) for parameter in own.values()} - {None}
        return any(id(each) not in own and _beginning(each) in first for each in tensors)

    def _failure_of_one(self, places: range) -> tuple[str | None, bool]:
        """Return why the loss takes no single sample, or None, and whether it is the model that does not.

        Args:
            places: Samples for which the loss is finite if it is called on all of them.
        """
        value = 0.0
        for place in places:
            try:
                value = self._tried(range(place, place + 1), as_in_training=True).value.total
            except Exception as error:
                return f"{type(error).__name__}: {error}".splitlines()[0][:200], self._forward.is_inside
            if math.isfinite(value):
                return None, False
        return f"its value is {value:g}", False

    def _repeated_writes(self, places: Sequence[int]) -> Iterator[str]:
        """Yield the parameters that a second call of the loss changes after the first."""
        batches = self._fetch(places), self._fetch(places)
        with silent(), Trial(self._model, self._objects, seed=0, watches_writes=False), self._autocast():
            self._model.train()
            perturb(self._model)  # a teacher may start as a copy of its student
            self._loss(self._model, batches[0])
            once = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
            try:
                self._loss(self._model, batches[1])
            except Exception:
                return  # training will raise it
            for name, parameter in self._model.named_parameters():
                if name in once and not is_equal(parameter.detach(), once[name]):
                    yield name

    def _is_nonlinear(self, places: Sequence[int], first: "_Tried") -> bool:
        """Return whether the gradients of a scaled loss differ from the scaled gradients of the loss."""
        for scale in _GRADIENT_SCALES:
            try:
                scaled = self._tried(places, as_in_training=True, scale=scale).gradients
            except Exception:
                return False  # training will raise it
            for name, gradient in first.gradients.items():
                other = scaled.get(name)
                size, tolerance = float(gradient.norm()), 10 * self._tolerance(gradient.dtype)
                if other is not None and not float((other / scale - gradient).norm()) <= tolerance * size:
                    return True
        return False

    def _uses_gradients(self, places: Sequence[int], first: "_Tried") -> bool:
        """Return whether the loss changes existing gradients of parameters, depends on them, or fails with them."""
        try:
            beside = self._tried(places, as_in_training=True, gradients=first.gradients)
        except Exception:
            return True
        if beside.has_changed_gradients:
            return True
        if not self._is_other(first.value, beside.value):
            return False
        try:
            return not self._is_other(first.value, self._tried(places, as_in_training=True).value)
        except Exception:
            return False  # it differs and fails irregularly

    def _remembered(self, places: range, others: range, first: "_Tried") -> Sequence[str]:
        """Return the functions whose caches change the loss if they were filled by other samples."""
        if not first.trial.filled:
            return ()
        with Trial(self._model, self._objects, seed=0, watches_writes=False):
            self._tried(others, as_in_training=True, keeps_caches=True)
            after = self._tried(places, as_in_training=True)
        return first.trial.filled if self._is_other(first.value, after.value) else ()

    def _is_other(self, one: "_Value", other: "_Value") -> bool:
        is_close = math.isclose(one.total, other.total, rel_tol=self._tolerance(one.dtype))
        return not is_close and math.isfinite(one.total + other.total)

    def _later(self, num_samples: int) -> "_Later":
        """Inspect the loss again, on other samples and after several calls."""
        deadline = time.monotonic() + _LATER_SECONDS
        groups = [
            range(begin, min(begin + NUM_SAMPLES, num_samples))
            for begin in range(NUM_SAMPLES, NUM_SAMPLES * (1 + _LATER_GROUPS), NUM_SAMPLES)
            if begin + 1 < num_samples
        ] or [range(min(num_samples, NUM_SAMPLES))]
        batches: list[Any] = []
        found: dict[str, Any] = {}
        while len(batches) < _LATER_CALLS and time.monotonic() < deadline:
            batches.append(self._fetch(groups[len(batches) % len(groups)]))  # changes made by reading stay
        written = Trial(self._model, self._objects, seed=1, watches_writes=False)
        with silent(), written:
            self._model.train()
            fed = FedState(self._model, self._objects)
            for batch in batches:
                if time.monotonic() > deadline:
                    break
                with torch.enable_grad(), self._autocast(), StateOfModules(self._model) as modules, fed:
                    self._loss(self._model, batch)
                found |= modules.changed()
            draws = self._tried(groups[0], as_in_training=True).trial.has_drawn
            not_additive = None
            for places in groups:
                if not_additive is not None or time.monotonic() > deadline:
                    break
                not_additive = self._additivity(places)
        return _Later(
            draws,
            not_additive,
            tuple(found),
            tuple(written.parameters),
            tuple(written.rebound),
            tuple(written.left),
            tuple(sorted(fed.names)),
            tuple(written.outer),
        )

    def _is_model_additive(self, num_samples: int, size: int) -> bool:
        """Return whether the model's outputs for the first samples, and for the last, depend on no other samples.

        Args:
            num_samples: Number of available samples.
            size: Number of samples of each of the two batches.
        """
        outputs = copy.copy(self)
        outputs._loss = OutputsAsLoss(self._loss)
        ends = range(size), range(num_samples - size, num_samples)
        try:
            return all(outputs._additivity(places) is None for places in ends)
        except Exception:
            return False

    def _additivity(self, places: range) -> str | None:
        """Return the figures of a loss whose parts do not add up, or None."""
        whole, *parts = (self._tried(part, as_in_training=False) for part in (places, *_parts_of(places)))
        if any(one.trial.has_drawn for one in (whole, *parts)) or self._has_random_batches():
            return self._additivity_of_constants(places)
        difference = self._difference(whole.value, [part.value for part in parts])
        return difference or self._difference_of_gradients(whole, parts)

    def _additivity_of_constants(self, places: range) -> str | None:
        """Return the figures of a loss whose parts do not add up even with constant draws, or None."""
        for quantile in self._quantiles:
            if (tried := self._tried_with_constants(places, quantile)) is None:
                continue
            whole, *parts = tried
            if any(one.trial.has_drawn for one in (whole, *parts)):
                return None  # by other means than torch's, so that the loss differs each time
            difference = self._difference(whole.value, [part.value for part in parts])
            if difference := difference or self._difference_of_gradients(whole, parts):
                return f"{difference} (with constants for its random numbers)"
        return None

    def _tried_with_constants(self, places: range, quantile: float) -> "list[_Tried] | None":
        """Try the loss of samples, and of their parts; return None if it fails, because it expects random numbers."""
        try:
            return [
                self._tried(part, as_in_training=False, draws=ConstantDraws(quantile))
                for part in (places, *_parts_of(places))
            ]
        except (Exception, TooManyDraws):
            return None

    def late_difference(self, begin: int, num_samples: int) -> tuple[str | None, int]:
        """Compare the losses of samples with those of their parts, and gradients of the first of them, during the run.

        Args:
            begin: Place of the first sample.
            num_samples: Number of available samples.

        Returns:
            Figures of a difference, or None, and the place after the last sample inspected.
        """
        started = time.monotonic()
        try:
            with self._without_collectives():
                if figures := self._late_gradients(begin, num_samples):
                    return figures, begin
                return self._wide(begin, num_samples, 0.0, started)
        except CollectiveCalled:
            return None, num_samples  # the other ranks make that call in their steps

    def _late_gradients(self, begin: int, num_samples: int) -> str | None:
        """Return the figures of a loss whose gradients, or values, do not add up over parts of a few samples, or None.

        Gradients of all samples and of one part are in memory at a time.
        """
        places = range(begin, min(begin + min(NUM_SAMPLES, self._most_at_once), num_samples))
        if not self.is_divided or len(places) < 2 or self._has_random_batches():
            return None
        try:
            whole, left = self._differentiated(places)
            largest = max((float(gradient.norm()) for gradient in left.values()), default=0.0)
            scales = {name: float(gradient.norm()) for name, gradient in left.items()}
            values = []
            for part in _parts_of(places):
                value, gradients = self._differentiated(part)
                values.append(value)
                for name in left.keys() & gradients.keys():
                    scales[name] += float(gradients[name].norm())
                    left[name] -= gradients.pop(name)
        except Exception:
            return None  # it draws, training will raise it, or there is not enough memory
        if figures := self._difference(whole, values):
            return figures
        tolerance = 10 * self._tolerance(whole.dtype)
        for name, gradient in left.items():
            figures = _figures_of_gradient(
                name, float(gradient.norm()), scales[name], largest, gradient.dtype, tolerance, len(values)
            )
            if figures is not None:
                return figures
        return None

    def _differentiated(self, places: Sequence[int]) -> "tuple[_Value, dict[str, Tensor]]":
        """Return the loss of some samples and its gradients, without hooks on gradients that parameters accumulate.

        A reducer has such hooks, and would wait for other ranks.

        Raises:
            ValueError: The loss draws random numbers.
        """
        batch = self._fetch(places)
        trial = Trial(self._model, self._objects, seed=2, watches_writes=self.watches_writes, keeps_gradients=False)
        with silent(), trial:
            self._set_modes(as_in_training=False)
            with torch.enable_grad(), self._autocast():
                result = self._loss(self._model, batch)
            total = _summed(result, len(places))
            trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
            gradients = {
                name: gradient.to_dense().clone()
                for name, gradient in zip(trained, found, strict=True)
                if gradient is not None
            }
        if trial.has_drawn:
            raise ValueError("a loss that draws is another one each time")
        return _Value.of(result, len(places)), gradients

    def _wide(self, begin: int, end: int, seconds_each: float, started: float | None = None) -> tuple[str | None, int]:
        """Compare the loss of more samples with those of their parts, without gradients, while time remains.

        Args:
            begin: Place of the first sample.
            end: Place after the last sample.
            seconds_each: Maximum seconds per sample.
            started: Time from which the seconds are counted; None for now.

        Returns:
            The same as `late_difference`.
        """
        started = time.monotonic() if started is None else started
        affordable = int(_WIDE_SECONDS / (3 * max(seconds_each, 1e-9)))
        size = min(_WIDE_GROUP, self._most_at_once, affordable)
        if not self.is_divided or size < 2 or self._has_random_batches():
            return None, begin
        at, doubtful = begin, range(0)
        try:
            with silent(), Trial(self._model, self._objects, seed=2, keeps_gradients=False):
                self._set_modes(as_in_training=False)
                while at < end - 1 and not doubtful:
                    most_seconds = _WIDE_SECONDS if at < begin + _WIDE_SAMPLES else _LATE_SECONDS
                    if time.monotonic() - started > most_seconds:
                        break
                    places = range(at, min(at + size, end))
                    at = places.stop
                    whole, *parts, again = [self._value(part) for part in (places, *_parts_of(places), places)]
                    if self._is_other(whole, again):
                        break  # it draws, or depends on its own state, both of which are detected elsewhere
                    if self._difference(whole, parts):
                        doubtful = places
            if doubtful:
                # again, each call from the same state: a counter of calls may have reached another phase in between
                whole, *parts = map(self._value_apart, (doubtful, *_parts_of(doubtful)))
                return self._difference(whole, parts), at
        except Exception:
            return None, at  # training will raise it, or there is not enough memory
        return None, at

    def _value_apart(self, places: Sequence[int]) -> "_Value":
        """Return the loss of some samples, without gradients and in a trial of its own."""
        with silent(), Trial(self._model, self._objects, seed=2, keeps_gradients=False):
            self._set_modes(as_in_training=False)
            return self._value(places)

    def _difference(self, whole: "_Value", parts: "Sequence[_Value]") -> str | None:
        """Return the figures of a loss that differs from that of its parts, or None."""
        if not (math.isfinite(whole.total) and math.isfinite(whole.items) and whole.items):
            return None
        total, count = exact_sum(part.total for part in parts), exact_sum(part.items for part in parts)
        tolerance = self._tolerance(whole.dtype)
        scale = exact_sum(abs(part.total) for part in parts)
        if abs(whole.total - total) <= tolerance * scale and abs(whole.items - count) <= tolerance * abs(count):
            return None
        return (
            f"it is {whole.total / whole.items:.6g} for {whole.num_samples} samples at once, and "
            f"{total / count if count else math.nan:.6g} for the same samples in {len(parts)} parts"
        )

    def _tolerance(self, dtype: torch.dtype) -> float:
        rounding = _TOLERANCES.get(dtype, _OTHER_TOLERANCE) if self._is_exact else _OTHER_TOLERANCE
        return max(rounding, tolerance_of(self._model, is_exact=self._is_exact))

    def _difference_of_gradients(self, whole: "_Tried", parts: "Sequence[_Tried]") -> str | None:
        """Return the figures of gradients that do not add up although the losses do, or None."""
        tolerance = 10 * self._tolerance(whole.value.dtype)  # a gradient is rounded more often than the loss
        largest = max((float(gradient.norm()) for gradient in whole.gradients.values()), default=0.0)
        for name, gradient in whole.gradients.items():
            others = [part.gradients[name] for part in parts if name in part.gradients]
            scale = float(gradient.norm()) + sum(float(other.norm()) for other in others)
            difference = float((gradient - sum(others)).norm()) if others else float(gradient.norm())
            figures = _figures_of_gradient(name, difference, scale, largest, gradient.dtype, tolerance, len(parts))
            if figures is not None:
                return figures
        return None

    def _tried(
        self,
        places: Sequence[int],
        *,
        as_in_training: bool,
        gradients: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
        draws: AbstractContextManager[Any] | None = None,
        keeps_caches: bool = False,
        perturbs: bool = False,
    ) -> "_Tried":
        draws = draws or contextlib.nullcontext()
        with draws:
            batch = self._fetch(places)
        trial = Trial(self._model, self._objects, seed=0, watches_writes=self.watches_writes, keeps_caches=keeps_caches)
        with silent(), trial, draws:
            self._set_modes(as_in_training=as_in_training)
            if perturbs:
                perturb(self._model)
            for name, parameter in self._model.named_parameters():
                parameter.grad = gradients[name].clone() if gradients and name in gradients else None
            self._forward = StateOfForward(self._model, self._objects)
            with torch.enable_grad(), self._autocast(), self._forward as forward:
                result = self._loss(self._model, batch)
            found = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
            tried = _Tried(
                trial,
                _Value.of(result, len(places)),
                {},
                forward,
                has_gradients=gradients is None and bool(found),
                has_changed_gradients=gradients is not None and not _are_equal(found, gradients),
            )
            # in training mode too, because hooks and recomputation may draw
            tried.gradients.update(self._gradients(result, len(places), scale))
            return tried

    def _set_modes(self, *, as_in_training: bool) -> None:
        """Put the model into training mode, without BatchNorm and dropout unless everything is to be as in training."""
        self._model.train()
        if not as_in_training:
            for module in self._model.modules():
                if isinstance(module, (torchcompat.BatchNorm, torchcompat.Dropout)):
                    module.eval()

    def _value(self, places: Sequence[int]) -> "_Value":
        """Return the loss of some samples; called within a trial."""
        batch = self._fetch(places)
        with torch.enable_grad(), self._autocast():
            return _Value.of(self._loss(self._model, batch), len(places))

    def _gradients(self, result: Any, num_samples: int, scale: float) -> dict[str, Tensor]:
        """Return the gradients of a loss summed over its items and scaled; none if it has none."""
        total = _summed(result, num_samples) * scale
        for parameter in self._model.parameters():
            parameter.grad = None
        try:
            total.backward()  # into `.grad`, because recomputation supports nothing else
        except Exception:
            return {}  # training will raise it
        named = self._model.named_parameters()
        return {name: p.grad.detach().to_dense().clone() for name, p in named if p.grad is not None}


def _summed(result: Any, num_samples: int) -> Any:
    """Return the loss of some samples summed over its items."""
    return result.total if isinstance(result, Sum) else result * num_samples


def _figures_of_gradient(
    name: str, difference: float, scale: float, largest: float, dtype: torch.dtype, tolerance: float, num_parts: int
) -> str | None:
    """Return the figures of a parameter's gradients that do not add up over parts, or None.

    Args:
        name: Name of the parameter.
        difference: Norm of the difference between the gradient for all samples at once and the sum over parts.
        scale: Sum of the norms of all these gradients.
        largest: Largest norm of a gradient for all samples at once.
        dtype: Data type of the gradient.
        tolerance: Relative difference that counts as rounding.
        num_parts: Number of parts.
    """
    if scale < _ROUNDED * torch.finfo(dtype).eps * largest:
        return None  # it is zero: a layer before a softmax, or before a norm that subtracts its mean
    if not (math.isfinite(difference) and difference > tolerance * scale):
        return None
    return (
        f"the gradient of {name} for all samples at once differs by {difference / scale:.2g} of its size "
        f"from the sum over {num_parts} parts"
    )


def _beginning(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return shape, dtype and first values of a tensor; None if no parameter can equal it."""
    if tensor.layout != torch.strided or not tensor.is_floating_point() or not tensor.numel():
        return None
    return (tensor.shape, tensor.dtype, *tensor.detach().flatten()[:NUM_SAMPLES].tolist())


def perturb(model: nn.Module) -> None:
    """Change all parameters slightly by random factors; called within a trial."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + 0.01 * torch.rand_like(parameter))


def tolerance_of(model: nn.Module, *, is_exact: bool) -> float:
    """Return the relative rounding of a loss, which is that of the least precise numbers it is computed from.

    Args:
        model: Model with the numbers.
        is_exact: Whether forward passes are in full precision.
    """
    numbers = {p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()}
    found = max((_TOLERANCES.get(dtype, _OTHER_TOLERANCE) for dtype in numbers), default=0.0)
    return found if is_exact else _OTHER_TOLERANCE


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(is_equal(tensor, others[name]) for name, tensor in some.items())


class _Later(NamedTuple):
    """Findings of the later inspection of a loss."""

    draws: bool = False
    not_additive: str | None = None
    module_state: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()


class _Value(NamedTuple):
    """Loss of some samples."""

    total: float
    items: float
    """Items over which the total is summed."""
    dtype: torch.dtype
    num_samples: int

    @classmethod
    def of(cls, result: Any, num_samples: int) -> "_Value":
        """Convert the return value of the task's loss."""
        is_sum = isinstance(result, Sum)
        loss = torch.as_tensor(result.total if is_sum else result).detach()
        count = float(result.count) if is_sum else float(num_samples)
        return cls(float(loss.double()) * (1.0 if is_sum else num_samples), count, loss.dtype, num_samples)


class _Tried(NamedTuple):
    """One call of the loss."""

    trial: Trial
    value: _Value
    gradients: dict[str, Tensor]
    forward: StateOfForward
    """Changes by the model's own calls."""
    has_gradients: bool
    """True if parameters without gradients had some when the loss returned."""
    has_changed_gradients: bool
    """True if existing gradients of parameters were different when the loss returned."""

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the changed buffers, except those of BatchNorm, which has its own trait."""
        known = {
            f"{path}.{name}" if path else name
            for path, module in model.named_modules()
            if isinstance(module, torchcompat.BatchNorm)
            for name, _ in module.named_buffers(recurse=False)
        }
        return {name: value for name, value in self.trial.buffers.items() if name not in known}


def _num_first(num_samples: int) -> int:
    """Return the size of the first of two groups of samples, different from that of the second if there are enough.

    Unequal sizes distinguish state that counts samples from state that counts calls.
    """
    return (num_samples + 1) // 2 + (num_samples >= 6)


def _parts_of(places: range) -> list[range]:
    """Split a group of samples into three unequal parts, or fewer if it is small."""
    ends = [places.start + max(1, round(len(places) * share)) for share in _PART_ENDS]
    starts = [places.start, *ends[:-1]]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


def _is_same_in(groups: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a value of the first group of samples changed to the same value on all others."""
    one, *others = groups
    if all(other is one for other in others) or any(name not in other for other in others):
        return False  # a single call does not show it
    is_tensor = isinstance(one[name], Tensor)
    return all(is_equal(one[name], other[name]) if is_tensor else bool(one[name] == other[name]) for other in others)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard what a loss prints in a trial; it is shown once, in the step that it belongs to."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
