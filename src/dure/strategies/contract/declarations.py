"""Declarations for the record: the differences between a run and the run on one device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dure.spec import RunSpec
from dure.strategies.contract.info import StrategyInfo
from dure.strategies.contract.loss_traits import LossTraits
from dure.terminal import few


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Properties of model, loss and optimiser that several declarations depend on."""

    draws: bool
    """True if random numbers are drawn in training."""
    has_batchnorm: bool
    has_step_hooks: bool
    """True if the optimiser's step has hooks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDivision:
    """Parts of a step's batch on which model and loss are called."""

    num_parts: int
    num_microbatches: int
    """Parts that are collated on their own, over all ranks."""
    calls_per_step: int
    """Maximum calls of the loss in one process and step."""
    is_one_share: bool
    """True if the ranks do not divide the batch."""
    is_loss_whole: bool
    """True if the loss sees whole batches, and only the model's own calls are divided."""
    is_one_device: bool
    """True if the batch is divided neither over ranks nor over devices."""
    hooked: Sequence[str]
    """Parameters and modules with hooks that get the gradients of parts."""


def by_strategy(info: StrategyInfo, spec: RunSpec, found: Findings) -> list[str]:
    """Return the declarations of a strategy's row that apply to a model and to settings."""
    return [
        text
        for text in info.does_not_preserve
        if (not text.startswith("BatchNorm") or (found.has_batchnorm and not spec.sync_batchnorm))
        and (not text.startswith("random numbers") or found.draws)
        and (not text.startswith(f"--{info.flag}.compression") or spec.options.get("compression") is not None)
        and (not text.startswith("step hooks") or found.has_step_hooks)
    ]


def by_trial(traits: LossTraits) -> list[str]:
    """Return the differences that follow from what a loss uses or keeps outside samples, weights and saved state."""
    texts = []
    if traits.left_state:
        texts.append(
            f"state that the loss keeps ({few(traits.left_state)}): changed by the calls of the loss before training, "
            "and could not be put back (large arrays, queues)"
        )
    if traits.left_by_collate:
        texts.append(
            f"state that collate keeps: samples that are read before training move {few(traits.left_by_collate)}, "
            "iterators that cannot be put back (count in a plain attribute)"
        )
    if traits.outer_state:
        texts.append(
            f"state outside of model and task ({few(traits.outer_state)}): every process that computes the loss writes "
            "it, and neither a restart nor a resume brings it back (keep what the loss needs in attributes)"
        )
    if traits.hooked_by_loss:
        texts.append(
            f"hooks on gradients that the loss registers ({few(traits.hooked_by_loss)}): neither a restart nor a "
            "resume brings them back (register them in build_model or build_optimizer)"
        )
    if traits.differs_by_rank:
        texts.append(
            f"the loss depends on the rank: {traits.differs_by_rank} (it uses more than samples and weights: the "
            "number of the rank or the process, the host, the time)"
        )
    if traits.differs_by_world:
        texts.append(depends_on_ranks(traits.differs_by_world))
    if traits.reduced_in_step:
        called = f"the step of its optimiser, or a hook on it, calls {traits.reduced_in_step} itself"
        texts.append(depends_on_ranks(called))
    return texts


def depends_on_ranks(figures: str) -> str:
    """Return the declaration about a task that reads the number of ranks."""
    return f"the task depends on the number of ranks: {figures} (it reads WORLD_SIZE or asks torch.distributed)"


def by_data(traits: LossTraits) -> list[str]:
    """Return the differences that follow from data that vary with the time or the place of reading."""
    texts = []
    if traits.data_changes:
        texts.append(
            "data: samples that were read twice differed, by random numbers of their own or changes in place; so "
            "weights depend on ranks, loaders and resumes (draw from the global generators, and copy before changing)"
        )
    if traits.copied_state:
        texts.append(
            f"data: the loss changes {few(traits.copied_state)}, of which loader processes keep the values that they "
            "began with (use --num-workers 0)"
        )
    if traits.collates_in_loaders and (names := (*traits.collate_state, *traits.collate_count)):
        texts.append(
            f"data: collate changes {few(names)}, of which each loader process has a copy, and no checkpoint holds it "
            "(use --num-workers 0)"
        )
    return texts


def by_compilation(spec: RunSpec, traits: LossTraits) -> list[str]:
    """Return the difference that follows from compiling a model that changes buffers in its calls.

    The compiler computes again in backward what it did not keep, also from a buffer that has been changed since.
    """
    changed = [name for name in (*traits.learned_buffers, *traits.counted_buffers) if name in traits.model_buffers]
    if not spec.compile or not changed:
        return []
    return [
        f"--compile: gradients may be computed from later values of buffers that forward changes ({few(changed)}), "
        "which torch.compile does not prevent (change them in the task's loss, or leave --compile out)"
    ]


def by_overflow(*, has_overflowed: bool, is_divided: bool) -> list[str]:
    """Return the difference that follows from an overflow of fp16 where one device does not compute whole batches."""
    if not (has_overflowed and is_divided):
        return []
    return [
        "loss scale of fp16: gradients have overflowed, which leaves a step out; as a whole, a batch may overflow in "
        "another step than in parts"
    ]


def by_division(division: BatchDivision, traits: LossTraits, found: Findings, declared: Sequence[str]) -> list[str]:
    """Return the differences that follow from dividing a batch, without those that are declared already."""
    parts = division.num_parts
    if parts == division.calls_per_step == 1:
        return []
    if division.is_loss_whole:
        traits = _of_model(traits)
    several_calls = division.calls_per_step > 1
    owner = "each microbatch's own" if division.is_one_device else "each rank's own"
    texts = []
    if (reason := traits.reason_unknown or traits.unknown_phase) is not None:
        texts.append(f"unknown: whether dividing a batch changes the loss, because {reason}")
    is_in_microbatches = several_calls or division.is_one_share
    if found.has_batchnorm and not any(text.startswith("BatchNorm") for text in declared) and is_in_microbatches:
        texts.append("BatchNorm: statistics of each microbatch's own samples")
    if found.draws and not any(text.startswith("random numbers") for text in declared):
        texts.append("random numbers: drawn for each microbatch, so other ones than for the whole batch")
    if traits.collate_draws and (collated := division.num_microbatches) > 1:
        texts.append(f"random numbers in collate: drawn for each of the {collated} parts of a batch")
    kept_by_collate = (*traits.collate_state, *traits.collate_count * several_calls)
    if kept_by_collate and division.num_microbatches > 1 and not traits.collates_in_loaders:
        texts.append(f"state that collate keeps ({few(kept_by_collate)}): {owner}")
    if traits.not_additive is not None:
        texts.append(
            f"the loss is no mean over samples: {traits.not_additive}; here a batch is computed in {parts} parts, "
            "weighted by their samples (return dure.Sum(total, count) if it has another count)"
        )
    if names := (*traits.learned_buffers, *traits.counted_buffers * several_calls):
        texts.append(f"buffers learned in forward ({few(names)}): from {owner} samples, and rank 0's are kept")
    if several_calls and (names := tuple(dict.fromkeys((*traits.learned_writes, *traits.repeated_writes)))):
        texts.append(
            f"parameters that the loss writes to ({few(names)}): written for every part of a batch, and not once a step"
        )
    counted = [path for path in traits.counted_state if path not in traits.cached_state]
    if paths := (*traits.learned_state, *counted * several_calls):
        texts.append(f"state that the loss keeps ({few(paths)}): {owner}")
    if division.hooked:
        texts.append(
            f"hooks on gradients ({few(division.hooked)}): they see {owner} gradient before all are "
            "added up, which is the same for linear ones alone"
        )
    return texts


def _of_model(traits: LossTraits) -> LossTraits:
    """Return the traits of the model's own calls alone."""

    def changed_inside(path: str) -> bool:
        return path.startswith("model.") and path not in traits.module_state

    return replace(
        traits,
        collate_draws=False,
        collate_state=(),
        collate_count=(),
        not_additive=traits.not_additive if traits.model_not_additive else None,
        learned_buffers=tuple(name for name in traits.learned_buffers if name in traits.model_buffers),
        learned_state=tuple(filter(changed_inside, traits.learned_state)),
    )
