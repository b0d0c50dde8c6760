"""Inspection of the task's loss on a few samples before training, for traits that make dividing a batch matter.

Nothing is concluded from the classes of modules. The loss is called in a `Trial`, which leaves no trace, and all
changes are recorded: generators, buffers, parameters, plain state. A call on eight samples, and calls on the same eight
in three parts, show whether it is a mean over samples.
"""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.errors import message_of
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.state.batchnorm import learns_statistics, statistics_of
from dure.strategies.state.hooks import gradient_hooks
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.shared_storage import recomputed_weights
from dure.strategies.state.trial import Trial, is_equal, is_same_value, sharing_state
from dure.torchcompat.modes import entered_autocasts
from dure.training.inspection.additivity import WIDE_SAMPLES, Additivity, tolerance_of
from dure.training.inspection.call_watches import ChangesOutsideForward, FedState, ModuleCalls
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.first_loss import FirstLoss
from dure.training.inspection.loss_calls import NUM_SAMPLES, Tried, aside, perturb
from dure.training.inspection.whole_batch import DividedModel, WholeBatch

_MOST_SECONDS = 5.0
"""Seconds in which the whole inspection should end; if it takes longer, later calls are not tried."""
_SLOWEST_CALL_SECONDS = 4.0
"""Seconds of a call on half of the first samples beyond which no further call is made."""
_LATER_CALLS = 12
"""Calls made before the loss is inspected again, because its behaviour may change after a few."""
_PERIOD = 16
"""Number of successive calls in each of which a loss that counts its calls is compared with its parts."""
_LATER_GROUPS = 3
"""Further groups of samples on which a loss is compared with its parts: the first ones may not be typical."""
_FEW = NUM_SAMPLES * (1 + _LATER_GROUPS)
"""Number of samples on which all traits of a loss are inspected."""
_GRADIENT_SCALES = (2.0**-8, 2.0**8)
"""Factors on a loss for which gradients are compared."""
_QUANTILES = (0.03, 0.5)
"""Quantiles of the constants that replace random numbers: a rare event either happens or does not."""
_LATER_SECONDS = 2.0
"""Seconds within which the calls for the later inspection must begin."""


class CallSummary(NamedTuple):
    """Summary of calls of a loss: equal ones suggest that it has not changed its behaviour."""

    kind: tuple[Any, ...]
    """Names of everything that the calls change, and further findings on them."""
    figures: tuple[str, ...]
    """Loss and norms of its gradients."""


class _NeedsFewer(Exception):
    """Exception after which the loss is called on fewer samples."""


class LossInspection:
    """Inspection of a task's loss by calls on its first samples."""

    def __init__(
        self,
        additivity: Additivity,
        *,
        parts: Sequence[int] = (),
        model_parts: Sequence[int] = (),
        is_alone: bool = False,
    ) -> None:
        """Prepare the inspection.

        Args:
            additivity: Comparisons of the loss with its parts, with the calls of the loss.
            parts: Samples of each part of a step's batch; empty if they are not known.
            model_parts: Samples of each part of one call of the model; empty if its calls are not divided.
            is_alone: Whether the other ranks make no calls meanwhile, so that a collective of the loss would block.
        """
        self.calls = additivity.calls
        self.is_divided = additivity.is_divided
        """True if the loss will see batches in parts; only then is it inspected again later."""
        self._additivity = additivity
        self._whole_batch = WholeBatch(additivity, parts)
        self._divided_model = DividedModel(additivity, model_parts)
        self._is_alone = is_alone
        self._most = NUM_SAMPLES
        """Number of samples of a group; fewer if there is no memory for so many at once."""
        self.first_loss = FirstLoss()
        """Result of the first call."""

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
        except _NeedsFewer:
            pass  # its frames hold memory until here
        return self.traits(num_samples)

    def _take_fewer_after(self, error: Exception) -> None:
        """Begin again on fewer samples if there was no memory for as many, and training has fewer at once.

        Raises:
            _NeedsFewer: The loss is to be called on fewer samples.
        """
        fewer = max(2, self._additivity.most_at_once)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) and fewer < self._most:
            self._most = fewer
            raise _NeedsFewer

    def _traits(self, num_samples: int) -> LossTraits:
        started = time.monotonic()
        few = min(num_samples, self._most)
        half = _num_first(few)
        if opaque := self._opaque():
            return LossTraits(reason_unknown=f"{opaque[0]} is an iterator, whose position could not be put back")
        try:
            with entered_autocasts() as autocasts:
                first = self._first(range(half))
        except Exception as error:
            self._take_fewer_after(error)
            why = f"the loss failed with {type(error).__name__} when it was tried"
            return LossTraits(reason_unknown=why, has_failed=True)
        self.first_loss = self._first_loss(first)
        seconds = time.monotonic() - started
        is_quick, is_slow = seconds * 6 < _MOST_SECONDS, seconds > _SLOWEST_CALL_SECONDS
        takes_several = half > 1 and not is_slow and math.isfinite(first.value.total)
        self._additivity.quantiles = _QUANTILES[: is_quick + (seconds * 30 < _MOST_SECONDS)]
        unknown = f"one call of it on {half} samples takes {seconds:.0f} s, too long to try it on parts"
        try:
            started = time.monotonic()
            second = self.calls.tried(range(half, few), as_in_training=True) if few > half and not is_slow else first
            seconds_each = (time.monotonic() - started) / max(1, few - half)
            if second is not first:
                second.gradients.clear()  # on a device they may take a good part of its memory
            tried = range(few if is_quick else half)
            not_additive = self._additivity.difference_of(tried) if len(tried) > 1 and not is_slow else None
            later = self._later(num_samples) if is_quick and self.is_divided else _Later()
            remembered = self._remembered(range(half), range(half, few), first) if few > half and not is_slow else ()
        except Exception as error:
            self._take_fewer_after(error)
            fails_alone, model_fails_alone = self._failure_of_one(range(half)) if takes_several else (None, False)
            if fails_alone is not None and self._additivity.smallest_part == 1:
                self._additivity.smallest_part = 2
                return self._traits(num_samples)
            why = f"the loss failed with {type(error).__name__} when it was tried on {few} samples"
            return LossTraits(
                reason_unknown=why,
                draws=first.trial.has_drawn,
                fails_alone=fails_alone,
                model_fails_alone=model_fails_alone,
            )
        buffers = [tried.buffers(self.calls.model) for tried in (first, second)]
        if is_quick and any(_is_same_in(buffers, name) for name in buffers[0]):
            buffers += self._buffers_of_pairs(range(few))
        state = first.trial.state, second.trial.state
        if second is not first and self._has_copies():
            places = range(half), range(half, few)
            moved = [self.calls.tried(each, as_in_training=True, perturbs=True) for each in places]
            for each in moved:
                each.gradients.clear()
            state = {**moved[0].trial.state, **state[0]}, {**moved[1].trial.state, **state[1]}
            one, other = (each.buffers(self.calls.model) for each in moved)
            # they were not called on pairs of samples: there the values for the first group stand for them
            buffers = [
                {**of_copies, **each} for of_copies, each in zip([one, other, *[one] * few], buffers, strict=False)
            ]
        # set in a call that is not the first, by samples or not
        known = {*statistics_of(self.calls.model), *first.trial.buffers, *second.trial.buffers, *buffers[0]}
        late = tuple(name for name in later.buffers if name not in known)
        not_additive = (
            not_additive
            or later.not_additive
            or (
                self._additivity.difference_of_many(_FEW, min(num_samples, _FEW + WIDE_SAMPLES), seconds_each)[0]
                or self._whole_batch.difference(num_samples)
                or (self._additivity.difference_of_repeated(half) if self.is_divided else None)
                if is_quick
                else None
            )
        )
        of_model = self._divided_model.difference(0, num_samples)[0] if is_quick else None
        derived = recomputed_weights(self.calls.model)
        paths = tuple(path for path in {**state[0], **state[1]} if path not in derived)
        counted = tuple(path for path in paths if _is_same_in(state, path))
        names = dict.fromkeys(itertools.chain.from_iterable(buffers))
        fails_alone, model_fails_alone = self._failure_of_one(range(half)) if takes_several else (None, False)
        hooked = tuple(dict.fromkeys((*first.trial.hooked, *second.trial.hooked)))
        return LossTraits(
            reason_unknown=unknown if is_slow and self.is_divided else None,
            draws=first.trial.has_drawn or later.draws,
            model_draws=first.forward.has_drawn or (later.draws and not first.trial.has_drawn),
            has_dropout=first.has_dropout,
            autocasts=bool(autocasts),
            loss_rounding=self._loss_rounding(first.value.dtype),
            not_additive=not_additive or of_model,
            model_not_additive=of_model is not None
            or later.model_not_additive
            or (not_additive is not None and not self._additivity.is_model_additive(num_samples, len(tried))),
            learned_buffers=(*(name for name in names if not _is_same_in(buffers, name)), *late),
            counted_buffers=tuple(name for name in names if _is_same_in(buffers, name)),
            learns_statistics=learns_statistics(
                self.calls.model, {*first.trial.buffers, *second.trial.buffers, *later.buffers}
            ),
            model_buffers=tuple(dict.fromkeys((*first.forward.buffers, *second.forward.buffers, *late))),
            changed_parameters=tuple(dict.fromkeys((*first.trial.parameters, *later.parameters))),
            rebound_parameters=tuple(dict.fromkeys((*first.trial.rebound, *later.rebound))),
            learned_writes=tuple(
                name
                for name, value in first.trial.parameters.items()
                if second is not first and not is_equal(value, second.trial.parameters.get(name, value.new_empty(0)))
            ),
            repeated_writes=tuple(self._repeated_writes(range(half))) if first.trial.parameters else (),
            learned_state=tuple(path for path in paths if path not in counted),
            counted_state=counted,
            cached_state=tuple(self._caches_among(counted, range(half), range(few), first)),
            forward_state=tuple(first.forward.changed),
            hooked_parameters=tuple(dict.fromkeys((*gradient_hooks(self.calls.model), *hooked))),
            hooked_by_loss=hooked,
            fails_alone=fails_alone,
            model_fails_alone=model_fails_alone,
            sparse_gradients=tuple(name for name in first.gradients if name in first.sparse),
            dense_gradients=tuple(self._dense_gradients(first)),
            nonlinear_gradients=self.is_divided and not is_slow and self._is_nonlinear(range(half), first),
            sets_gradients=first.has_gradients,
            module_state=later.module_state,
            fed_state=later.fed,
            varying_modules=later.varying_modules,
            left_state=tuple(dict.fromkeys((*first.trial.left, *second.trial.left, *later.left))),
            outer_state=tuple(dict.fromkeys((*first.trial.outer, *second.trial.outer, *later.outer, *remembered))),
            uses_gradients=not is_slow and self._uses_gradients(range(half), first),
        )

    def traits_now(self, num_samples: int) -> LossTraits:
        """Return the traits of the loss in the current state of its objects, without a change to `first_loss`.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        first_loss, quantiles = self.first_loss, self._additivity.quantiles
        try:
            return self.traits(num_samples)
        finally:
            self.first_loss, self._additivity.quantiles = first_loss, quantiles

    def call_summary(self, num_samples: int) -> CallSummary:
        """Call the loss on the first samples, without and with gradients of parameters, and summarise the calls.

        Args:
            num_samples: Number of available samples, at least 1.

        Raises:
            Exception: The loss raised it.
        """
        places = range(_num_first(min(num_samples, self._most)))
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
                return self._additivity.difference_of(range(min(num_samples, self._most))) if num_samples > 1 else None
        except (Exception, CollectiveCalled):
            return None  # more samples at once may need more memory than there is

    def late_difference(
        self, begin: int, num_samples: int, most_seconds: float = 0.0, gradients_at: int | None = None
    ) -> tuple[str | None, int]:
        """Compare the losses of samples with those of their parts during the run, as `Additivity.late_difference`."""
        if self._opaque():  # it may be of a later time than the inspection before training
            return None, num_samples
        try:
            with self._without_collectives(), sharing_state():
                figures, end = self._additivity.late_difference(begin, num_samples, most_seconds, gradients_at)
                return figures or self._whole_batch.difference(num_samples, is_training=True), end
        except CollectiveCalled:
            return None, num_samples  # the other ranks make that call in their steps

    def late_difference_of_model(self, begin: int, num_samples: int) -> tuple[str | None, int]:
        """Compare the model's outputs for batches with those for their parts during the run, as `late_difference`."""
        if self._opaque():
            return None, num_samples
        with self._without_collectives(), sharing_state():
            return self._divided_model.difference(begin, num_samples, is_training=True)

    def call_once(self, num_samples: int) -> None:
        """Call the loss on the samples of `first_loss` only; errors of the loss are not raised.

        Args:
            num_samples: Number of available samples, at least 1.
        """
        if not self._opaque():
            with contextlib.suppress(Exception, CollectiveCalled), self._without_collectives():
                self.first_loss = self._first_loss(self._first(range(_num_first(min(num_samples, self._most)))))

    def _without_collectives(self) -> AbstractContextManager[None]:
        return no_collectives() if self._is_alone else contextlib.nullcontext()

    def _opaque(self) -> Sequence[str]:
        return ObjectState({**self.calls.objects, "model": self.calls.model}).opaque

    def _first(self, places: Sequence[int]) -> Tried:
        try:
            return self.calls.tried(places, as_in_training=True)
        except Exception:
            self.calls.watches_writes = False
            return self.calls.tried(places, as_in_training=True)

    def _first_loss(self, first: Tried) -> FirstLoss:
        value = first.value.total
        gradient = math.hypot(*(float(each.norm()) for each in first.gradients.values()))
        return FirstLoss(
            num_samples=first.value.num_samples,
            value=value if math.isfinite(value) else None,
            gradient=gradient if math.isfinite(gradient) else None,
            tolerance=self._additivity.tolerance(first.value.dtype),
        )

    def _loss_rounding(self, dtype: torch.dtype) -> float:
        rounding = self._additivity.tolerance(dtype)
        return rounding if rounding > tolerance_of(self.calls.model, is_exact=self._additivity.is_exact) else 0.0

    def _dense_gradients(self, first: Tried) -> Iterator[str]:
        """Yield the parameters of layers with `sparse=True` whose gradients are dense."""
        for prefix, module in self.calls.model.named_modules():
            if getattr(module, "sparse", False) is True:
                names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False)]
                yield from (name for name in names if name in first.gradients and name not in first.sparse)

    def _buffers_of_pairs(self, places: range) -> list[dict[str, Tensor]]:
        """Return the changed buffers after a call on each pair of samples, up to the first pair that the loss fails on.

        A buffer that moves by one of a few steps, such as the sign of a difference, may move alike on large groups.
        """
        found = []
        for begin in places[:-1:2]:
            try:
                found.append(self.calls.tried(range(begin, begin + 2), as_in_training=True).buffers(self.calls.model))
            except Exception:
                break
        return found

    def _has_copies(self) -> bool:
        """Return whether objects or buffers seem to be copies of parameters, as a teacher may be."""
        own = {id(parameter): parameter for parameter in self.calls.model.parameters()}
        held = ObjectState(self.calls.objects).first.values()
        modules = [module for module in held if isinstance(module, nn.Module)]
        tensors: list[Tensor] = [each for module in modules for each in module.parameters()]
        tensors += [each for each in held if isinstance(each, Tensor)]
        first = {_beginning(parameter) for parameter in own.values()} - {None}
        # a buffer in which all values are equal is no copy, but statistics in their initial state
        buffers = {
            each for buffer in self.calls.model.buffers() if (each := _beginning(buffer)) and len({*each[2:]}) > 1
        }
        return bool(first & buffers) or any(id(each) not in own and _beginning(each) in first for each in tensors)

    def _failure_of_one(self, places: range) -> tuple[str | None, bool]:
        """Return why the loss fails on a single sample, or None, and whether the model itself fails.

        Args:
            places: Samples for which the loss is finite if it is called on all of them.
        """
        value = 0.0
        for place in places:
            try:
                value = self.calls.tried(range(place, place + 1), as_in_training=True).value.total
            except Exception as error:
                return f"{type(error).__name__}: {message_of(error)}".splitlines()[0][
                    :200
                ], self.calls.forward.is_inside
            if math.isfinite(value):
                return None, False
        return f"its value is {value:g}", False

    def _repeated_writes(self, places: Sequence[int]) -> Iterator[str]:
        """Yield the parameters that a second call of the loss changes after the first."""
        batches = self.calls.fetch(places), self.calls.fetch(places)
        with (
            aside(),
            Trial(self.calls.model, self.calls.objects, seed=0, watches_writes=False),
            self.calls.autocast(),
        ):
            self.calls.model.train()
            perturb(self.calls.model)  # a teacher may start as a copy of its student
            self.calls.loss(self.calls.model, batches[0])
            once = {name: parameter.detach().clone() for name, parameter in self.calls.model.named_parameters()}
            try:
                self.calls.loss(self.calls.model, batches[1])
            except Exception:
                return  # training will raise it
            for name, parameter in self.calls.model.named_parameters():
                if name in once and not is_equal(parameter.detach(), once[name]):
                    yield name

    def _is_nonlinear(self, places: Sequence[int], first: Tried) -> bool:
        """Return whether the gradients of a scaled loss differ from the scaled gradients of the loss."""
        for scale in _GRADIENT_SCALES:
            try:
                scaled = self.calls.tried(places, as_in_training=True, scale=scale).gradients
            except Exception:
                return False  # training will raise it
            for name, gradient in first.gradients.items():
                other = scaled.get(name)
                if other is not None and self._is_other_gradient(gradient, other / scale):
                    return True
        return False

    def _is_other_gradient(self, one: Tensor, other: Tensor) -> bool:
        """Return whether a gradient differs from another by more than rounding."""
        tolerance = 10 * self._additivity.tolerance(one.dtype)
        return not float((other - one).norm()) <= tolerance * float(one.norm())

    def _uses_gradients(self, places: Sequence[int], first: Tried) -> bool:
        """Return whether the loss changes existing gradients of parameters, depends on them, or fails with them."""
        try:
            with_gradients = self.calls.tried(places, as_in_training=True, gradients=first.gradients)
        except Exception:
            return True
        if with_gradients.has_changed_gradients:
            return True
        if not self._additivity.is_other(first.value, with_gradients.value):
            return False
        try:
            return not self._additivity.is_other(first.value, self.calls.tried(places, as_in_training=True).value)
        except Exception:
            return False  # its value varies, and it fails irregularly

    def _remembered(self, places: range, others: range, first: Tried) -> Sequence[str]:
        """Return the functions whose caches change the loss if filled by other samples or with earlier weights."""
        if not first.trial.filled:
            return ()
        for filling, moves_weights in ((others, False), (places, True)):
            with Trial(self.calls.model, self.calls.objects, seed=0, watches_writes=False):
                with Trial(self.calls.model, self.calls.objects, seed=0, watches_writes=False, keeps_caches=True):
                    if moves_weights:
                        perturb(self.calls.model, only_trained=True)  # what frozen layers gave is no fault
                    self.calls.tried(filling, as_in_training=True, keeps_caches=True)
                after = self.calls.tried(places, as_in_training=True)
            if self._additivity.is_other(first.value, after.value):
                return first.trial.filled
        return ()

    def _caches_among(self, paths: Sequence[str], places: range, others: range, first: Tried) -> Sequence[str]:
        """Return the state that no further call changes, if another first call has the same loss and gradients.

        Further calls are on pairs of samples: state of two values, such as a sign, may be alike for large groups. They
        are made with other weights, which state such as a teacher follows, although it may begin as a copy of them.
        """
        paths = [path for path in paths if path in first.trial.state]  # those of other weights alone follow these
        if not (paths and self.is_divided):
            return ()
        try:
            with aside(), Trial(self.calls.model, self.calls.objects, seed=0, watches_writes=False):
                self.calls.set_modes(as_in_training=True)
                self.calls.value(places)
                again = self.calls.tried(places, as_in_training=True)
                pairs = [range(begin, begin + 2) for begin in others[:-1:2]]
                further = [
                    again,
                    *(self.calls.tried(each, as_in_training=True, perturbs=True) for each in pairs),
                ]
        except Exception:
            return ()  # training will raise it
        if self._additivity.is_other(first.value, again.value) or first.gradients.keys() != again.gradients.keys():
            return ()
        if any(self._is_other_gradient(gradient, again.gradients[name]) for name, gradient in first.gradients.items()):
            return ()
        return [path for path in paths if not any(path in each.trial.state for each in further)]

    def _later(self, num_samples: int) -> "_Later":
        """Inspect the loss again, on other samples and after several calls."""
        deadline = time.monotonic() + _LATER_SECONDS
        groups = [
            range(begin, min(begin + self._most, num_samples))
            for begin in range(self._most, self._most * (1 + _LATER_GROUPS), self._most)
            if begin + 1 < num_samples
        ] or [range(min(num_samples, self._most))]
        batches: list[Any] = []
        found: dict[str, Any] = {}
        while len(batches) < _LATER_CALLS and time.monotonic() < deadline:
            batches.append(self.calls.fetch(groups[len(batches) % len(groups)]))  # changes made by reading stay
        written = Trial(self.calls.model, self.calls.objects, seed=1, watches_writes=False)
        before = ObjectState({**self.calls.objects, "model": self.calls.model})
        with aside(), written:
            self.calls.model.train()
            fed = FedState(self.calls.model, self.calls.objects)
            called = ModuleCalls(self.calls.model)
            for batch in batches:
                if time.monotonic() > deadline:
                    break
                with (
                    torch.enable_grad(),
                    self.calls.autocast(),
                    ChangesOutsideForward(self.calls.model) as modules,
                    fed,
                    called,
                ):
                    self.calls.loss(self.calls.model, batch)
                found |= modules.changed()
            draws = self.calls.tried(groups[0], as_in_training=True).trial.has_drawn
            not_additive = None
            for places in groups:
                if not_additive is not None or time.monotonic() > deadline:
                    break
                not_additive = self._additivity.difference_of(places)
            if not_additive is None and before.changed():
                not_additive = self._difference_in_later_calls(batches, groups, deadline)
            is_of_model = not_additive is not None and not self._additivity.is_model_additive(
                num_samples, len(groups[0])
            )
        return _Later(
            draws,
            not_additive,
            is_of_model,
            tuple(found),
            tuple(written.parameters),
            tuple(written.rebound),
            tuple(written.left),
            tuple(sorted(fed.names)),
            tuple(written.outer),
            tuple(written.buffers),
            tuple(called.varying()),
        )

    def _difference_in_later_calls(
        self, batches: Sequence[Any], groups: Sequence[range], deadline: float
    ) -> str | None:
        """Return the figures of a loss that counts its calls, and does not add up in some of them, or None.

        One in four or in sixteen may have a term of the whole batch (lazy regularisation). Only a trial may call this.
        """
        for number in range(_PERIOD):
            if time.monotonic() > deadline:
                return None
            with torch.enable_grad(), self.calls.autocast():
                self.calls.loss(self.calls.model, batches[number % len(batches)])
            if figures := self._additivity.difference_of(groups[number % len(groups)]):
                return f"{figures} (in some of its calls)"
        return None


def _beginning(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return shape, dtype and first values of a tensor; None if no parameter can equal it."""
    if tensor.layout != torch.strided or not tensor.is_floating_point() or not tensor.numel():
        return None
    return (tensor.shape, tensor.dtype, *tensor.detach().flatten()[:NUM_SAMPLES].tolist())


class _Later(NamedTuple):
    """Findings of the later inspection of a loss."""

    draws: bool = False
    not_additive: str | None = None
    model_not_additive: bool = False
    module_state: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    outer: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    varying_modules: tuple[str, ...] = ()


def _num_first(num_samples: int) -> int:
    """Return the size of the first of two groups of samples, different from that of the second if there are enough.

    Unequal sizes distinguish state that counts samples from state that counts calls.
    """
    return (num_samples + 1) // 2 + (num_samples >= 6)


def _is_same_in(groups: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return whether a value of the first group of samples changed to the same value on all others."""
    one, *others = groups
    if all(other is one for other in others) or any(name not in each for each in groups):
        return False  # a single call does not show it
    return all(is_same_value(one[name], other[name]) for other in others)
