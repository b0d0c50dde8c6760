"""Verification of a model in sections: the task's loss and its gradients compared with those of the whole model.

It finds faults that a trace cannot see: blocks that exchange values directly, recomputation that cuts the graph, and
losses that use more of the model than its output. All sections run in one process, each without the others' weights.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.data.randomness import GeneratorStates
from dure.errors import TaskInvalid, message_of
from dure.records.sums import Sum
from dure.strategies.contract.batches import map_tensors, own_copy
from dure.strategies.contract.step_facts import checked_loss
from dure.strategies.contract.strategy import Strategy
from dure.strategies.sections.absent_tensors import UsedTensors, hollow
from dure.strategies.sections.cuts import find_blocks
from dure.strategies.sections.plan import CURE, SectionPlan, first_batch
from dure.strategies.sections.sectioned_model import SectionedModel
from dure.strategies.sections.stand_in import call_of, called_again, stand_in
from dure.strategies.sections.trace import Survey, switched, tensors_of
from dure.strategies.sections.values import describe
from dure.strategies.state.checksum import checksum
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.trial import KeptBuffers, Trial, is_equal
from dure.terminal import few
from dure.torchcompat.tensors import give_data

SETS_GRADIENTS = (
    "the task's loss sets gradients itself (by a backward pass of its own, say), which a model in sections has on "
    f"other ranks: add that term to the loss that it returns, or use {CURE}"
)

_ROUNDED = 64
"""Magnitude below which a gradient counts as rounding, in units of the eps of its dtype times the largest gradient:
that of a bias which the loss cancels out, say."""
_MOST_ROUNDED = 1 / 32
"""Most of the largest gradient that counts as rounding, also in half precision."""

_MOST_ROUNDING = 0.125
"""Relative difference that does not count as rounding even in half precision."""


class _Outcome(NamedTuple):
    """Loss and its gradients."""

    loss: float
    gradients: dict[str, Tensor]

    def other_gradients(self, other: "_Outcome", names: Iterable[str]) -> list[str]:
        """Return those of some parameters whose gradients here and in another outcome differ by more than rounding."""
        sizes = [float(gradient.abs().max()) for gradient in self.gradients.values() if gradient.numel()]
        largest = max(filter(math.isfinite, sizes), default=0.0)

        def is_same(one: Tensor | None, theirs: Tensor | None) -> bool:
            eps = 0.0 if one is None else torch.finfo(one.dtype).eps
            return _are_close(one, theirs, rounding=min(_ROUNDED * eps, _MOST_ROUNDED) * largest)

        return [name for name in names if not is_same(self.gradients.get(name), other.gradients.get(name))]


def rehearse(strategy: Strategy, model: nn.Module, plan: SectionPlan, seen: Survey, *, loss_section: int) -> str | None:
    """Compare the sections with the whole model on the first samples, now and in later phases of the loss.

    The model, the task and generators are restored.

    Args:
        strategy: Strategy with the task's loss and its data.
        model: Whole model.
        plan: Plan of the sections.
        seen: Survey on the same samples.
        loss_section: Section of the rank that computes the loss, the first or the last one.

    Returns:
        A sentence if they differ, otherwise None.
    """
    if (fault := _rehearse_now(strategy, model, plan, seen, loss_section=loss_section)) is not None:
        return fault
    with closing(strategy.phases()) as phases:
        for phase in phases:
            if (fault := _rehearse_now(strategy, model, plan, seen, loss_section=loss_section)) is not None:
                return f"{phase}, {fault}"
    return None


def _rehearse_now(
    strategy: Strategy, model: nn.Module, plan: SectionPlan, seen: Survey, *, loss_section: int
) -> str | None:
    where = f"{type(model).__name__} cut before {plan.first_blocks()}"
    batch = first_batch(strategy, model)
    try:
        rehearsal = _Rehearsal(strategy, model, plan, seen, batch)
        with Trial(model, strategy.objects, seed=0, watches_writes=False):
            whole = rehearsal.whole()
        with Trial(model, strategy.objects, seed=0, watches_writes=False), rehearsal.cut():
            parts = rehearsal.by_last() if loss_section else rehearsal.by_first()
    except TaskInvalid as error:
        return str(error)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {message_of(error)}".split())[:200]
        return (
            f"{where} cannot be computed ({reason}): each section has its own weights, and the loss has the model's "
            f"output alone, without derivatives through it; cut elsewhere with the option cuts, or use {CURE}"
        )
    is_other_loss = not _are_close(torch.tensor(whole.loss), torch.tensor(parts.loss))
    other = whole.other_gradients(parts, (name for name, _ in model.named_parameters()))
    if not other and not is_other_loss:
        return rehearsal.fault_of_own_code(where) or (None if loss_section else rehearsal.fault_of_hooks(where))
    if rehearsal.hidden is not None:
        return rehearsal.hidden
    if (cause := _cause(strategy, model, plan, whole, loss_section)) is not None:
        return f"{where} {cause}, or use {CURE}"
    if other:
        return (
            f"{where} gives another gradient of {other[0]} than the whole model: something goes from section to "
            "section by another way than what blocks return (torch.utils.checkpoint with use_reentrant=True around a "
            f"block, or a value that a block keeps); cut elsewhere with the option cuts, or use {CURE}"
        )
    return (
        f"{where} gives a loss of {parts.loss:.6g} where the whole model gives {whole.loss:.6g}: the loss uses "
        f"values that a block keeps; cut elsewhere with the option cuts, or use {CURE}"
    )


def _cause(strategy: Strategy, model: nn.Module, plan: SectionPlan, whole: _Outcome, loss_section: int) -> str | None:
    """Return why sections differ from the whole model, with a remedy, if a further call of the loss shows it."""
    batch = first_batch(strategy, model)
    device = next(model.parameters()).device
    used = UsedTensors(dict(model.named_parameters()))
    num_calls, draws = 0, False

    def answer(*args: Any, **kwargs: Any) -> Any:
        after_block = GeneratorStates.now(device)

        def switch(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                nonlocal after_block, num_calls, draws
                # what the model's own code draws before that, later sections draw again
                is_repeated = num_calls < plan.begins[-1]
                draws |= is_repeated and not GeneratorStates.now(device).is_same_as(after_block)
                num_calls += 1
                result = call(*args, **kwargs)
                after_block = GeneratorStates.now(device)
                return result

            return watched

        with used.paused(), switched(find_blocks(model), switch):
            return model(*args, **kwargs)

    trial = Trial(model, strategy.objects, seed=0, watches_writes=False)
    with trial, used, torch.enable_grad(), strategy.precision.autocast():
        result = strategy.loss(stand_in(model, answer), batch)
        again = float(checked_loss(result.total if isinstance(result, Sum) else result).detach())
    owners = plan.owners(model)
    if absent := [name for name in owners if name in used.names and owners[name] != loss_section]:
        return (
            f"separates the task's loss from {few(absent)}, which the loss uses itself: let the model return what is "
            "needed of them"
        )
    if not _are_close(torch.tensor(whole.loss), torch.tensor(again)):
        return (
            "cannot be compared with the whole model, because the task's loss is another one at each call on the same "
            "samples: let it depend on nothing that dure cannot put back (an iterator, say)"
        )
    if draws:
        return (
            "draws other random numbers than the whole model, whose own code draws between its blocks, which each "
            "section does again: draw them in the task's loss and hand them to the model"
        )
    return None


class _Rehearsal:
    """Loss computed by the whole model, or by sections one after the other."""

    def __init__(self, strategy: Strategy, model: nn.Module, plan: SectionPlan, seen: Survey, batch: Any) -> None:
        self._strategy = strategy
        self._model = model
        self._plan = plan
        self._known = [describe(value, call) for value, call in zip(seen.outputs, plan.calls, strict=True)]
        self._batch = batch
        self._device = next(model.parameters()).device
        self._last = len(plan.begins) - 1
        owners = plan.owners(model)
        self._parameters = [(p, p.data, owners[name]) for name, p in model.named_parameters()]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._present: int | None = None
        self._chains: list[list[list[tuple[Tensor, Tensor]]]] = []
        """Output tensors of each section in each call of the model, with the leaves that replace them in the next
        section.
        """
        self._gradients: dict[str, Tensor] = {}
        self.hidden: str | None = None
        """Message about an output of the model whose gradients come back to no other rank."""
        blocks = tuple(f"{name}." for name in find_blocks(model))
        self._own_buffers = KeptBuffers(model, lambda name: not name.startswith(blocks))
        self._own_values: list[dict[str, Tensor]] = []
        """Saved buffers outside the blocks as the model's own code leaves them on the rank of each section."""
        self._own_state: list[dict[str, Any]] = []
        """Plain state outside of that section's blocks that is changed there."""
        self._set_by_hooks: set[str] = set()
        """Paths of plain state that the backward passes of other ranks than the loss's change."""

    def whole(self) -> _Outcome:
        """Return the loss and the gradients of the whole model."""
        root = self._loss(self._model)
        # by backward() into `.grad`, because recomputation supports nothing else
        root.backward()
        return self._outcome(root)

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Divide the model within the context."""
        self._sections = SectionedModel(self._model, self._plan)
        try:
            yield
        finally:
            self._sections.close()

    def by_last(self) -> _Outcome:
        """Return the outcome if every section runs the loss up to the model's call, and the last one all of it."""
        begin = at = GeneratorStates.now(self._device)
        state = _RankState(self._model, self._strategy.objects)
        received: Any = None
        self._chains.append([])
        is_called = False
        for number in range(self._last):
            with self._only(number):
                state.put_back()
                self._own_buffers.put_back()
                begin.put_back()
                with torch.enable_grad(), self._strategy.precision.autocast():
                    args, kwargs = call_of(self._strategy.loss, self._model, self._own_batch())
                if number:
                    at.put_back()
                received = self._handed_on(self._run(number, args, kwargs, received))
                self._note_own_code(number, state)
                at = GeneratorStates.now(self._device)

        def answer(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_called
            if is_called:
                raise TaskInvalid(called_again(self._model))
            is_called = True
            at.put_back()
            value = self._run(self._last, args, kwargs, received)
            self._note_own_code(self._last, state)
            return value

        state.put_back()
        self._own_buffers.put_back()
        begin.put_back()
        return self._differentiated(answer, self._last)

    def by_first(self) -> _Outcome:
        """Return the outcome if the first section's rank runs the loss, and others compute its call of the model."""

        state = _RankState(self._model, {})
        after_call: list[dict[str, Any]] = []

        def answer(*args: Any, **kwargs: Any) -> Any:
            received: Any = None
            own: ObjectState | None = None
            self._chains.append([])
            if not after_call and (changes := state.changed()):
                raise TaskInvalid(changes_module(next(iter(changes))))
            for number in range(self._last + 1):
                if number and not after_call:
                    state.put_back()
                    self._own_buffers.put_back()
                if number == 1:
                    own = ObjectState(self._strategy.objects)
                run = functools.partial(self._run, number, args, kwargs, received)
                with self._only(number):  # other ranks have none of the contexts that the task enters around the call
                    received = self._handed_on(_in_new_thread(run) if number else run())
                if not after_call:
                    self._note_own_code(number, state)
            self._look_into(received)
            if own is not None:
                own.put_back()  # changes of the task by blocks of other ranks, and their hooks, stay on those ranks
            after_call[:] = [state.changed()]
            return received

        outcome = self._differentiated(answer, 0)
        if found := [path for path, value in state.changed().items() if after_call[0].get(path) != value]:
            raise TaskInvalid(changes_module(found[0]))
        return outcome

    def _note_own_code(self, section: int, state: "_RankState") -> None:
        calls = self._plan.calls
        blocks = tuple(f"model.{name}." for name in calls if self._plan.section_of_block(name) == section)
        found = state.changed().items()
        own = {path: value for path, value in found if path.startswith("model.") and not path.startswith(blocks)}
        now, unsaved = self._own_buffers.now(), _unsaved_buffers(self._model)
        changed = {name: now[name] for name in self._own_buffers.changed() if name in now}
        self._own_state.append(own | {f"model.{n}": checksum([b]) for n, b in changed.items() if n in unsaved})
        self._own_values.append({name: buffer.clone() for name, buffer in now.items() if name not in unsaved})

    def fault_of_own_code(self, where: str) -> str | None:
        """Return a sentence if state outside the blocks is set on another rank than the one that uses or keeps it."""
        if not (names := self._lost_buffers() or self._differing_state()):
            return None
        return (
            f"{where} separates the code that sets {names[0]} from what uses or keeps it, which another rank does: let "
            f"one block set it and use it, or use {CURE}"
        )

    def fault_of_hooks(self, where: str) -> str | None:
        """Return a sentence if hooks on gradients of other ranks set state that the next loss uses."""
        if not self._set_by_hooks:
            return None
        losses = []
        for keeps in (True, False):
            with Trial(self._model, self._strategy.objects, seed=0, watches_writes=False):
                before, begin = ObjectState(self._strategy.objects), GeneratorStates.now(self._device)
                self.whole()
                if not keeps:
                    before.put_back(only=self._set_by_hooks)
                begin.put_back()
                losses.append(torch.tensor(self.whole().loss))
        if _are_close(*losses):
            return None
        return (
            f"{where} separates the hooks on gradients that set {sorted(self._set_by_hooks)[0]} from the loss that "
            f"uses it, which another rank computes: use {CURE}"
        )

    def _lost_buffers(self) -> list[str]:
        """Return the saved buffers outside the blocks that the rank that keeps them does not change as one process."""
        if not any(self._own_values):
            return []
        owners = self._plan.owners(self._model)
        with Trial(self._model, self._strategy.objects, seed=0, watches_writes=False):
            self.whole()
            now, unsaved = self._own_buffers.now(), _unsaved_buffers(self._model)
            whole = {n: now[n].clone() for n in self._own_buffers.changed() if n in now and n not in unsaved}
        kept = {name: self._own_values[owners.get(name, 0)].get(name) for name in whole}
        return [name for name, value in whole.items() if not _is_same(value, kept[name])]

    def _differing_state(self) -> list[str]:
        """Return plain state that sections change that do not have its block, or that only some change, if it matters.

        It does if a next call on the same samples has another loss.
        """
        first, *others = self._own_state
        paths = {path for other in others for path in first.keys() | other.keys() if first.get(path) != other.get(path)}
        # the loss sets it and uses it on one rank, which is declared
        paths -= set(self._strategy.traits.module_state)
        if not paths:
            return []
        with Trial(self._model, self._strategy.objects, seed=0, watches_writes=False):
            begin = GeneratorStates.now(self._device)
            one = self.whole()
            begin.put_back()
            other = self.whole()
        losses = torch.tensor(one.loss), torch.tensor(other.loss)
        if _are_close(*losses) and not one.other_gradients(other, one.gradients):
            return []
        return sorted(paths)

    def _differentiated(self, answer: Callable[..., Any], loss_section: int) -> _Outcome:
        with self._only(loss_section):
            root = self._loss(stand_in(self._model, answer))
            if any(parameter.grad is not None for parameter, *_ in self._parameters):
                raise TaskInvalid(SETS_GRADIENTS)
            root.backward(retain_graph=True)
            self._take_gradients()
        for chain in self._chains:
            for section in reversed(range(len(chain))):
                before = ObjectState(self._strategy.objects)
                with self._only(section):
                    self._go_back(chain[section])
                if section != loss_section:
                    self._set_by_hooks |= before.changed().keys()
        return self._outcome(root)

    def _go_back(self, given: list[tuple[Tensor, Tensor]]) -> None:
        """Run the backward pass of a section from the gradients of the next one's inputs."""
        roots = [tensor for tensor, leaf in given if leaf.grad is not None and tensor.requires_grad]
        arrived = [leaf.grad for tensor, leaf in given if leaf.grad is not None and tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, arrived, retain_graph=True)
            self._take_gradients()

    def _loss(self, model: nn.Module) -> Tensor:
        with torch.enable_grad(), self._strategy.precision.autocast():
            result = self._strategy.loss(model, self._own_batch())
        return checked_loss(result.total if isinstance(result, Sum) else result)

    def _own_batch(self) -> Any:
        return own_copy(self._batch)  # the loss may change it

    def _run(self, section: int, args: Any, kwargs: Any, received: Any) -> Any:
        begin, end = self._plan.bounds(section)
        bounds = (begin, None if section == self._last else end)
        given = map_tensors(received, torch.clone)  # blocks may work in place
        with torch.enable_grad(), self._strategy.precision.autocast():
            return self._sections.run(bounds, args, kwargs, received=given, known=self._known, device=self._device)

    def _handed_on(self, value: Any) -> Any:
        """Return the output of a section as leaves of another graph."""
        pairs: list[tuple[Tensor, Tensor]] = []

        def as_leaf(tensor: Tensor) -> Tensor:
            pairs.append((tensor, tensor.detach().requires_grad_(tensor.is_floating_point())))
            return pairs[-1][1]

        self._chains[-1].append(pairs)
        return map_tensors(value, as_leaf)

    def _look_into(self, output: Any) -> None:
        """Note that gradients of the model's output go through objects that are not containers."""
        known = {id(leaf) for _, leaf in self._chains[-1][-1]}
        if any(tensor.requires_grad and id(tensor) not in known for tensor in tensors_of(output)):
            try:
                describe(output, type(self._model).__name__)
            except TaskInvalid as error:
                self.hidden = str(error)

    @contextmanager
    def _only(self, section: int) -> Iterator[None]:
        """Replace the parameters of other sections by NaN within the context."""
        before, self._present = self._present, section
        self._place()
        try:
            yield
        finally:
            self._present = before
            self._place()

    def _place(self) -> None:
        for parameter, data, owner in self._parameters:
            give_data(parameter, data if self._present in (None, owner) else hollow(data, self._device))

    def _take_gradients(self) -> None:
        """Sum the gradients of the section's own parameters, and drop all others as its rank would."""
        for parameter, _, owner in self._parameters:
            name, gradient = self._names[id(parameter)], parameter.grad
            if gradient is not None and self._present in (None, owner):
                gradient = gradient.to_dense()
                self._gradients[name] = self._gradients[name] + gradient if name in self._gradients else gradient
            parameter.grad = None

    def _outcome(self, root: Tensor) -> _Outcome:
        self._take_gradients()
        found, self._gradients = self._gradients, {}
        return _Outcome(float(root.detach()), found)


def _unsaved_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that no `state_dict` has."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def changes_module(path: str) -> str:
    """Return the message about state of a module that the loss changes."""
    return (
        f"the task's loss changes {path}, and the rank that computes that module would not see it: keep such state in "
        f"the task, or use {CURE}"
    )


def hooks_gradients(names: Sequence[str]) -> str:
    """Return the message about hooks on gradients that the loss registers."""
    return (
        f"the task's loss registers hooks on the gradients of {few(names)}, which a model in sections has on other "
        f"ranks: register them in build_model, or use {CURE}"
    )


class _RankState:
    """Plain state at the start of each rank, and the modes of modules: a rank sees only its own changes."""

    def __init__(self, model: nn.Module, objects: Mapping[str, object]) -> None:
        self._plain = ObjectState({**objects, "model": model})
        self._modes = [(module, module.training) for module in model.modules()]

    def put_back(self) -> None:
        self._plain.put_back()
        for module, training in self._modes:
            module.training = training

    def changed(self) -> dict[str, Any]:
        modes = {
            f"the mode of {type(module).__name__}": module.training
            for module, was in self._modes
            if module.training != was
        }
        return self._plain.changed() | modes


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two buffers are equal up to rounding."""
    if other is None or one.shape != other.shape:
        return False
    return is_equal(one, other) or (one.is_floating_point() and _are_close(one, other))


def _are_close(one: Tensor | None, other: Tensor | None, *, rounding: float = 0.0) -> bool:
    """Return whether two gradients are equal up to rounding; None equals zeros.

    Args:
        one: Gradient, or loss.
        other: Value compared with it.
        rounding: Magnitude below which a difference counts as rounding, whatever the magnitudes of the two.
    """
    found = [gradient for gradient in (one, other) if gradient is not None]
    if len(found) < 2:
        return not any(bool(gradient.any()) for gradient in found)
    if not found[0].numel() or bool(found[0].isnan().any()):
        return True  # nothing can be concluded
    # sums in another order differ by a few epsilon; a missing path changes a gradient by its own magnitude
    tolerance = min(16 * torch.finfo(found[0].dtype).eps ** 0.5, _MOST_ROUNDING)
    return bool((found[0] - found[1]).abs().max() <= max(tolerance * float(found[0].abs().max()), rounding))
