"""Rehearsal of later calls of a task's schedule, and of an evaluation, whose effects are undone."""

import math
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.data.randomness import kept_global_randomness, seed_draws
from dure.errors import DureError, TaskInvalid, message_of
from dure.records.step_record import Metric
from dure.strategies.contract.abilities import own_state
from dure.strategies.contract.declarations import depends_on_ranks
from dure.strategies.contract.strategy import Strategy
from dure.strategies.sections.absent_tensors import UsedState, UsedTensors
from dure.strategies.state.checksum import checksum, checksums
from dure.strategies.state.data_tensors import KeptDataSets, tensors_of
from dure.strategies.state.definitions import Definitions
from dure.strategies.state.hooks import without_new_hooks
from dure.strategies.state.kept_modules import KeptModules
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.objects.surroundings import Surroundings
from dure.strategies.state.optimizer import settings_of
from dure.strategies.state.shared_storage import recomputed_weights
from dure.strategies.state.trial import KeptBuffers, Writes, is_same_value
from dure.terminal import few as few_of
from dure.torchcompat.compilation import all_as_written
from dure.torchcompat.modes import without_function_modes
from dure.torchcompat.tensors import local_tensor
from dure.training.best_metric import Best
from dure.training.inspection.collectives import CollectiveCalled, no_collectives
from dure.training.inspection.loss_calls import aside, perturb
from dure.training.inspection.phases import positions_of
from dure.training.loop import check_schedule
from dure.training.session.evaluation import check_counts, evaluate
from dure.training.session.loader import Loader
from dure.training.session.session import Session
from dure.training.task.task import Schedule

_NUM_SAMPLES = 8
_COMPARED_SAMPLES = 16
"""Samples whose loss is compared with that of their parts, in evaluations during the run."""
_COMPARED_PARTS = 4
"""Parts of these samples: a loss that has a bound on its mean differs only if some parts are above and others below."""
_MOST_SECONDS = 1.0
"""Seconds after which a schedule is called at no further step; it may set state at some steps only."""


class AskedSchedule(NamedTuple):
    """Schedule that was called at many positions before training."""

    schedule: Schedule | None
    set_state: frozenset[str]
    """Paths of the plain state that it sets."""
    gives_others: bool
    """True if it gives other factors than those used in earlier attempts."""


def asked_schedule(session: Session, given: Any, used: Mapping[int, float] = MappingProxyType({})) -> AskedSchedule:
    """Return the schedule that a task built, and what it does.

    Args:
        session: Session with task and optimiser.
        given: Value that the task returned.
        used: Factors in some steps of earlier attempts, by samples seen. A schedule that sets state follows from more
            than samples, and is not compared with them.

    Raises:
        TaskInvalid: It is not a function of samples, or uses weights of which this rank has only a part.
    """
    strategy = session.strategy
    now: dict[int, float] = {}
    with _only_asked(session, given) as asked:
        schedule: Schedule | None = strategy.computed(check_schedule, given, strategy.optimizer)
        if schedule is not None:
            with _kept_groups(strategy.optimizer), _kept_groups(strategy.built_optimizer):
                _ask_all_along(session, schedule, asked)
                with suppress(Exception):
                    now = {seen: float(strategy.computed(schedule, seen)) for seen in used}
    if strategy.group.world_size > 1:
        _compare_schedules(session, schedule)
    gives_others = bool(used) and not asked.changed and now != used
    watched = None if schedule is None else WatchedSchedule(strategy, schedule)
    return AskedSchedule(watched, frozenset(asked.changed), gives_others)


class _Asked:
    """Plain state that calls of a schedule change."""

    def __init__(self, state: ObjectState) -> None:
        self._state = state
        self.changed: set[str] = set()
        """Paths of the state that has changed at some time."""
        self.used: UsedTensors | None = None
        """Weights that the calls use."""

    def note(self) -> None:
        """Record the current changes; the comparison itself does not count as a use of tensors."""
        with without_function_modes():
            self.changed.update(self._state.changed())

    def state_without_weights(self) -> dict[str, int]:
        """Return checksums of the state that is changed now, by path, without the weights."""
        with without_function_modes():
            changed = self._state.changed()
        held = self._state.first
        return {
            path: zlib.crc32(repr(value).encode())
            for path, value in changed.items()
            if self.used is None or not self.used.watches(held.get(path))
        }


def _ask_all_along(session: Session, schedule: Schedule, asked: _Asked) -> None:
    """Call a schedule at steps of the whole run, the end first; its errors are left to the steps."""
    started = time.monotonic()
    order, total = session.order, session.total_samples
    for seen in (total, *reversed(positions_of(total, order.epoch_samples, order.global_batch_size))):
        with suppress(Exception):
            session.strategy.computed(schedule, seen)
        asked.note()
        if time.monotonic() - started > _MOST_SECONDS:
            break


class WatchedSchedule:
    """Schedule of a task, called before each step, and refused if it uses values of which this rank has only a part."""

    def __init__(self, strategy: Strategy, schedule: Schedule) -> None:
        self._strategy = strategy
        self._schedule = schedule
        self._has_divided_gradients = strategy.rules.divides_gradients
        self._has_divided_state = strategy.rules.divides_state and strategy.group.world_size > 1
        self._has_shards = any(hasattr(p, "__create_chunk_list__") for p in strategy.model.parameters())

    def __call__(self, samples_seen: int) -> float:
        """Return the factor on the learning rate.

        Raises:
            TaskInvalid: The schedule returns no number, or uses gradients, weights or state of which this rank has only
                a part.
        """
        factor = self._called(samples_seen)
        try:
            math.isfinite(factor)
        except (TypeError, ValueError, RuntimeError):
            raise TaskInvalid(
                f"the task's schedule gave {type(factor).__name__} at {samples_seen} samples seen: return a number at "
                "every position, the factor on the learning rate"
            ) from None
        return factor

    def _called(self, samples_seen: int) -> float:
        strategy = self._strategy
        if not self._has_divided_state:
            return self._watched(samples_seen)
        with UsedState(strategy.stepped, has_numbers=self._has_shards) as used:
            factor = self._watched(samples_seen)
        if used.is_used:
            raise TaskInvalid(
                f"the task's schedule uses values of the optimiser's state, of which a rank of {strategy.info.name} "
                "has a part only: let it follow from the samples seen, or use ddp"
            )
        return factor

    def _watched(self, samples_seen: int) -> float:
        strategy = self._strategy
        if not self._has_divided_gradients:
            return strategy.computed(self._schedule, samples_seen)  # type: ignore[no-any-return]
        weights = _stepped_weights(strategy)
        try:
            with UsedTensors(weights, of_any_gradient=False) as used:
                factor = strategy.computed(self._schedule, samples_seen)
        except Exception as error:
            _refuse_use_of_parts(strategy, weights, used, error)
            raise
        _refuse_use_of_parts(strategy, weights, used)
        return factor  # type: ignore[no-any-return]


def _refuse_use_of_parts(
    strategy: Strategy, weights: Mapping[str, Tensor], used: UsedTensors, error: Exception | None = None
) -> None:
    """Refuse a schedule that has used values of which this rank has only a part.

    Args:
        strategy: Strategy with its rules.
        weights: Weights by name, before the schedule was called.
        used: Values of them that it used; some may be whole.
        error: Error that the schedule raised; it becomes the cause.

    Raises:
        TaskInvalid: It has used such values.
    """
    in_parts = [name for name in used.names if _is_in_parts(strategy, weights[name])]
    if in_parts:
        raise TaskInvalid(
            f"the task's schedule uses the weights of {few_of(sorted(in_parts))}, of which a rank of "
            f"{strategy.info.name} has a part only: let the loss use them on every batch, or use ddp"
        ) from error
    if used.has_used_gradients and strategy.rules.divides_gradients:
        raise TaskInvalid(
            f"the task's schedule uses gradients, of which a rank of {strategy.info.name} has a part only: clip with "
            "--clip-norm, or use ddp"
        ) from error


def _is_in_parts(strategy: Strategy, weight: Tensor) -> bool:
    """Return whether this rank has only a part of a weight's values."""
    return hasattr(weight, "__create_chunk_list__") or not strategy.share.takes_samples


def _compare_schedules(session: Session, schedule: Schedule | None) -> None:
    """Refuse a schedule that depends on the rank, and declare one that depends on the number of ranks.

    Communication: one gathered JSON message.

    Raises:
        TaskInvalid: It depends on the rank, or sets state by the weights of a rank; the message names two ranks and
            their factors, or the state.
    """
    strategy = session.strategy
    with (
        _only_asked(session, schedule) as asked,
        _kept_groups(strategy.optimizer),
        _kept_groups(strategy.built_optimizer),
    ):
        here = _factors(strategy, schedule, session.total_samples)
        uses_weights = asked.used is not None and bool(asked.used.names)
        state = asked.state_without_weights() if strategy.rules.divides_gradients else {}
    by_rank = strategy.group.all_gather_json([here, state, uses_weights])
    sets_by_weights = any(uses for *_, uses in by_rank)
    for rank, (factors, theirs, _) in enumerate(by_rank):
        if difference := _first_difference(by_rank[0][0], factors, "on rank 0", f"on rank {rank}"):
            raise TaskInvalid(
                f"{difference}: compute it from the samples alone, and not from the number of a rank or a host's files"
            )
        others = by_rank[0][1]
        other = [path for path in {**others, **theirs} if others.get(path) != theirs.get(path)]
        if sets_by_weights and other:
            raise TaskInvalid(
                f"the task's schedule sets {few_of(other)} by weights, of which a rank of {strategy.info.name} has a "
                "part only: let the loss use them on every batch, or use ddp"
            )
    if strategy.group.rank == 0 and here:
        task = session.task
        with (
            _only_asked(session, schedule),
            _kept_groups(strategy.optimizer),
            _kept_groups(strategy.built_optimizer),
            suppress(Exception, CollectiveCalled),
            no_collectives(),
            session.one_process_build.entered(task),
        ):
            for group in strategy.optimizer.param_groups:  # those of a checkpoint are of the steps before it
                group["lr"] = group.get("initial_lr", group["lr"])
            given = task.build_schedule(strategy.optimizer, session.total_samples)
            in_one_process = _factors(strategy, given, session.total_samples)
            if difference := _first_difference(here, in_one_process, "here", "in one process"):
                session.notes.append(depends_on_ranks(difference))


@contextmanager
def _only_asked(session: Session, schedule: Any) -> Iterator[_Asked]:
    """Restore what calls of a schedule change: generators, weights, buffers, modules, hooks, plain state and data."""
    strategy = session.strategy
    model = strategy.model
    state = ObjectState({**strategy.objects, "model": model, "schedule": schedule}, sees_data=True)
    modules = KeptModules(model, strategy.objects)
    data_sets = KeptDataSets({"data": session.train_loader.data})
    buffers = KeptBuffers(model)
    asked = _Asked(state)
    writes = Writes(
        {path: t.detach() for path, t in {**state.large, **tensors_of("data", session.train_loader.data)}.items()}
    )
    try:
        with (
            kept_global_randomness(*strategy.devices),
            _without_weights(strategy) as asked.used,
            writes,
            without_new_hooks(model, strategy.built_optimizer),
        ):
            yield asked
    finally:
        asked.note()
        modules.put_back()
        data_sets.put_back()
        state.put_back()
        buffers.put_back()
        with torch.no_grad():
            for path, value in writes.before.items():
                writes.tensors[path].copy_(value)


def _first_difference(one: dict[str, float], other: dict[str, float], where: str, elsewhere: str) -> str | None:
    if bool(one) != bool(other):
        return f"the task has a schedule {where if one else elsewhere} and none {elsewhere if one else where}"
    for seen, factor in one.items():
        if other.get(seen, factor) != factor:
            return f"the schedule gives {factor:g} {where} and {other[seen]:g} {elsewhere} for {seen} samples seen"
    return None


def _factors(strategy: Strategy, schedule: Schedule | None, total: int) -> dict[str, float]:
    """Return the factors of a schedule at some positions; the step that reaches a position raises its error."""
    factors: dict[str, float] = {}
    if schedule is not None:
        with suppress(Exception):
            for seen in sorted({0, total // 10, total // 3, 2 * total // 3, total}):
                factors[str(seen)] = float(strategy.computed(schedule, seen))
    return factors


@contextmanager
def _without_weights(strategy: Strategy) -> Iterator[UsedTensors]:
    """Refuse a call of the task that reads weights of which this rank has only a part; otherwise undo its writes.

    Yields:
        Weights that it uses.

    Raises:
        TaskInvalid: The call uses such values, whatever other error it raises.
    """
    weights = _stepped_weights(strategy)
    are_trained = [(parameter, parameter.requires_grad) for parameter in strategy.model.parameters()]
    error: Exception | None = None
    with UsedTensors(weights, of_any_gradient=False) as used:
        try:
            yield used
        except Exception as raised:
            error = raised
    _refuse_use_of_parts(strategy, weights, used, error)
    used.put_back()
    for parameter, is_trained in are_trained:
        parameter.requires_grad_(is_trained)
    if error is not None:
        raise error


def _stepped_weights(strategy: Strategy) -> dict[str, Tensor]:
    """Return the parameters of the model by name, and what the optimisers step in their place.

    These have the gradients of this rank, as those of an optimiser of the task's own have not.
    """
    found: dict[str, Tensor] = dict(strategy.model.named_parameters())
    known = {id(parameter) for parameter in found.values()}
    for optimizer in (strategy.optimizer, strategy.built_optimizer, strategy.stepped):
        for number, group in enumerate(optimizer.param_groups):
            for place, tensor in enumerate(group["params"]):
                if id(tensor) not in known:
                    found[f"param_groups[{number}]['params'][{place}]"] = tensor
                    known.add(id(tensor))
    return found


@contextmanager
def _kept_groups(optimizer: Optimizer) -> Iterator[None]:
    """Restore an optimiser's parameter groups afterwards."""
    groups = [(group, dict(group), [*group["params"]]) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, settings, parameters in groups:
            group.clear()
            group.update(settings, params=parameters)
        optimizer.param_groups[:] = [group for group, *_ in groups]


def rehearse_evaluation(session: Session, best: Best) -> list[str]:
    """Evaluate a few samples, so that an error in the metrics appears now and not after the first epoch.

    Communication: that of two small evaluations, and one gathered JSON message.

    Returns:
        Declarations of what the run does not preserve.

    Raises:
        TaskInvalid: The evaluation changes weights or the optimiser's settings, counts incorrectly, or fails with a
            divided model.
    """
    if session.eval_loader is None:
        return []
    with _after_first_call(session):
        return _rehearse_evaluation(session, session.eval_loader, best)


@contextmanager
def _after_first_call(session: Session) -> Iterator[None]:
    """Let a loss that sets weights when it is first called, from the samples of that call, do so; undo it afterwards.

    In training it will have been called before any evaluation.
    """
    strategy, model = session.strategy, session.strategy.model
    if not strategy.traits.changed_parameters or strategy.example is None:
        yield
        return
    objects, buffers = ObjectState({**strategy.objects, "model": model}), KeptBuffers(model)
    weights = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in model.parameters()]
    try:
        # no other draws in training than without evaluations, and the same on all ranks
        with kept_global_randomness(*strategy.devices):
            seed_draws(strategy.device, 0, 0)
            with aside(), torch.enable_grad(), strategy.precision.autocast():
                model.train()
                session.task.loss(model, strategy.example(_NUM_SAMPLES))
            perturb(model)  # as a step does: else a write of what is there already would not be seen
        yield
    finally:
        objects.put_back()
        buffers.put_back()
        with torch.no_grad():
            for parameter, values, gradient in weights:
                parameter.copy_(values)
                parameter.grad = gradient  # before training there is none to be added to


def _rehearse_evaluation(session: Session, loader: Loader, best: Best) -> list[str]:
    strategy, model = session.strategy, session.strategy.model
    before = ObjectState({**strategy.objects, "model": model})
    buffers = KeptBuffers(model)
    weights, settings = _weights(session), settings_of(strategy.built_optimizer)
    limited = _limited_embeddings(session)
    surroundings = Surroundings()
    definitions = Definitions(model, strategy.objects)
    few = min(_NUM_SAMPLES, session.eval_samples)
    most = min(few, session.spec.eval_batch_size or few)  # there may be no memory for more
    with surroundings.watched(), without_new_hooks(model, strategy.built_optimizer), _work_on_parts(strategy):
        at_once = _few_evaluated(session, loader, few, most)
        changed_first = before.changed()
        in_parts = _few_evaluated(session, loader, few, max(1, most // 2))
    drawn = before.drawn()
    best.value_of(at_once)
    check_counts(at_once, in_parts, few)
    derived = recomputed_weights(model)
    changed_to = {path: value for path, value in before.changed().items() if path not in derived}
    changed = [*changed_to]
    seen = strategy.traits.writes_in_evaluation  # a strategy may have undone these writes here
    now = _weights(session)
    others = [name for name in {**weights, **now} if weights.get(name) != now.get(name)]  # it may add or remove some
    written = [*seen, *(name for name in others if name not in seen)]
    if settings_of(strategy.built_optimizer) != settings:
        written.append("the optimiser's settings")
    before.put_back()
    definitions.put_back()
    # those that the loss sets too are declared as that
    variables = [name for name in surroundings.set_variables() if name not in strategy.traits.outer_state]
    surroundings.put_back_variables()
    if strategy.group.world_size == 1:  # other ranks may be writing to the same files
        surroundings.put_back()
    limits = [name for name in written if name in limited]
    for name in limits:
        limited[name].put_back()
    optimizer = strategy.built_optimizer
    if limits != written and all(callable(getattr(optimizer, name, None)) for name in ("eval", "train")):
        raise TaskInvalid(
            f"{type(optimizer).__name__} changes {few_of(written)} for an evaluation (by eval() and train(), as "
            "schedule-free optimisers do), so checkpoints would hold other weights than those evaluated: evaluate an "
            "average that the task keeps (torch.optim.swa_utils.AveragedModel), or use AdamW with a schedule"
        )
    if limits != written:
        raise TaskInvalid(
            f"the task's loss or metrics change {few_of(written)} in an evaluation, which is to look at the model "
            "only: how often it is done, and by which rank, would change the result; do it in the loss where "
            "model.training is true, or in the optimiser's step"
        )
    missed = strategy.missed_state(changed)
    by_rank = session.group.all_gather_json({path: _digest(value) for path, value in changed_to.items()})
    session.set_by_evaluation.update(*by_rank)
    is_settled = {
        path for path in changed if is_same_value(changed_first.get(path, changed_to[path]), changed_to[path])
    }
    caches = {path for path in is_settled.intersection(strategy.traits.cached_state) if _is_common(path, by_rank)}
    caches |= {*strategy.traits.collate_tables}
    changed = [*(path for path in changed if path not in caches), *buffers.changed()]
    buffers.put_back()
    texts = []
    if limits:
        texts.append(
            f"weights: an evaluation too limits rows of {few_of(limits)} (nn.Embedding(max_norm=)), so how often it "
            "is done can change them"
        )
    if variables:
        texts.append(
            f"state outside of model and task ({few_of(variables)}): every process that evaluates writes it, and "
            "neither a restart nor a resume brings it back (keep what the loss needs in attributes)"
        )
    if drawn and is_divided_in_evaluation(strategy):
        texts.append(
            f"evaluations: random numbers that they draw from {few_of(drawn)}: each rank draws for the batches that it "
            "evaluates"
        )
    if changed and is_divided_in_evaluation(strategy):
        texts.append(kept_by_evaluation(changed))
    elif missed:
        texts.append(f"state that the evaluation keeps ({few_of(missed)}): not on every rank that uses it")
    return texts


def is_divided_in_evaluation(strategy: Strategy) -> bool:
    """Return whether ranks or devices evaluate batches of their own."""
    # with several shares the models are not asked for: fsdp gathers them, and this may be asked on one rank alone
    return strategy.share.count > 1 or len(strategy.evaluation_models()) > 1


def kept_by_evaluation(paths: Sequence[str]) -> str:
    """Return the declaration of state that evaluations change, if they are divided."""
    return f"state that the evaluation keeps ({few_of(paths)}): of the batches that each rank evaluates"


@contextmanager
def _work_on_parts(strategy: Strategy) -> Iterator[None]:
    """Refuse code that fails with a divided model, if it did not fail with the whole one.

    Raises:
        TaskInvalid: It fails.
    """
    try:
        yield
    except (DureError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if strategy.group.world_size == 1 or not (strategy.rules.undoes_writes and strategy.traits.is_evaluable):
            raise
        reason = " ".join(f"{type(error).__name__}: {message_of(error)}".split())[:200]
        raise TaskInvalid(
            f"the task's loss or metrics failed in an evaluation ({reason}), as they did not with the whole model, "
            f"which {strategy.info.name} divides over the ranks: if they use its weights, or what its blocks keep or "
            "hooks see, return that from the model, or use ddp"
        ) from error


@dataclass(frozen=True, eq=False)
class _Kept:
    """A parameter with its earlier values."""

    parameter: Tensor
    values: Tensor

    def put_back(self) -> None:
        with torch.no_grad():
            self.parameter.copy_(self.values)


def _limited_embeddings(session: Session) -> dict[str, _Kept]:
    """Return the weights that torch itself changes in forward, if one process evaluates all samples; otherwise none."""
    strategy = session.strategy
    if strategy.group.world_size > 1 or len(strategy.evaluation_models()) > 1:
        return {}
    return {
        f"{name}.weight" if name else "weight": _Kept(module.weight, module.weight.detach().clone())
        for name, module in strategy.model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


def _few_evaluated(session: Session, loader: Loader, num_samples: int, batch_size: int) -> dict[str, Metric]:
    with all_as_written():  # compiling for so few would be wasted
        return evaluate(
            session.task, session.strategy, loader.without_workers(), num_samples=num_samples, batch_size=batch_size
        )


def _digest(value: Any) -> int:
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return checksum([value]) if is_plain else zlib.crc32(repr(value).encode())


def _is_common(path: str, by_rank: Sequence[Mapping[str, int]]) -> bool:
    """Return whether state has one value on all ranks that have changed it."""
    return len({digests[path] for digests in by_rank if path in digests}) == 1


class FewLosses(NamedTuple):
    """Losses of the same samples at once and in parts."""

    at_once: float
    in_parts: float
    num_samples: int
    num_parts: int


def few_losses(session: Session, loader: Loader, num_samples: int, tolerance: float) -> FewLosses | None:
    """Return the losses of a few samples at once and in parts, in an evaluation.

    None if the loss depends on random numbers, which differ between the two.

    Args:
        session: Session with task and strategy.
        loader: Loader of the samples.
        num_samples: Number of available samples.
        tolerance: Relative difference of losses that counts as rounding.

    Raises:
        DataInvalid: None of these samples counts; raised on all ranks.
    """
    few = min(_COMPARED_SAMPLES, num_samples)
    size_of_part = max(1, few // _COMPARED_PARTS)

    def loss(size: int, seed: int | None = None) -> float:
        found = evaluate(
            session.task,
            session.strategy,
            loader.without_workers(),
            num_samples=few,
            batch_size=size,
            has_metrics=False,
            seed=seed,
        )
        return found["loss"].value

    with all_as_written():
        at_once, in_parts = loss(few), loss(size_of_part)
        if at_once == in_parts or math.isclose(loss(few, session.spec.seed + 1), at_once, rel_tol=tolerance):
            return FewLosses(at_once, in_parts, few, math.ceil(few / size_of_part))
    return None


def _weights(session: Session) -> dict[str, int]:
    """Return a checksum of each parameter of this rank."""
    strategy = session.strategy
    trained = {name for name, _ in strategy.model.named_parameters(remove_duplicate=False)}
    state = own_state(strategy).model
    names = [name for name in state if name in trained]
    return dict(zip(names, checksums(local_tensor(state[name]) for name in names), strict=True))
