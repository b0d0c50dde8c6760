"""Reasons why a strategy cannot train with a task's loss, model or optimiser."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.errors import TaskInvalid
from dure.strategies.contract.loss_traits import LossTraits
from dure.strategies.contract.watch.parameter_watch import write_fault
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.state.optimizer import first_state, has_other_values, order_digest, plain_settings
from dure.strategies.state.shared_storage import sharing_memory
from dure.terminal import few


def faults_of_loss(
    traits: LossTraits,
    model: nn.Module,
    objects: Mapping[str, object],
    rules: WeightRules,
    strategy: str,
    *,
    num_ranks: int,
    num_shares: int,
    clips: bool,
) -> list[str]:
    """Return the reasons why a loss cannot be divided over ranks, one sentence each.

    Args:
        traits: Traits of the loss.
        model: Whole model, as the task built it.
        objects: Objects of the task in which the loss may keep state, by name.
        rules: The strategy's rules for weights.
        strategy: Name of the strategy, for messages.
        num_ranks: Ranks of the run.
        num_shares: Shares into which batches are divided.
        clips: Whether gradients are clipped by their norm.
    """
    faults = []
    if traits.collective is not None and num_ranks > 1:
        faults.append(
            f"the task's loss, metrics or model call {traits.collective} of torch.distributed: dure brings "
            "together what ranks computed, so leave that out, and return dure.Sum(total, count) where a loss is "
            "divided by a count over all ranks (for nn.SyncBatchNorm: nn.BatchNorm with --sync-batchnorm)"
        )
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout is not torch.strided]
    if sparse and num_ranks > 1:
        faults.append(
            f"{few(sparse)} is a sparse buffer, which ranks cannot send each other: make it dense, or keep indices "
            "and values in buffers and make it of these in forward"
        )
    if clips and traits.sparse_gradients:
        faults.append(
            "clip_norm needs the norm of all gradients, and torch computes none of sparse ones "
            f"({few(traits.sparse_gradients)}): leave out sparse=True, or clip_norm"
        )
    if num_ranks > 1:
        faults += _faults_of_sparse_gradients(traits, model, rules, strategy)
    if rules.divides_state and num_ranks > 1 and (sharing := sharing_memory(model, objects)):
        faults.append(
            f"{few(sharing)} share memory without being one parameter, which {strategy} would divide as if each had "
            "its own: tie weights by the parameter itself (decoder.weight = encoder.weight) or compute "
            "one from the other in forward, or use ddp"
        )
    if rules.steps_elsewhere and num_ranks > 1 and (stepped := traits.stepped_state):
        faults.append(
            f"the task's loss changes {few(stepped)}, which the optimiser's step may use, and under {strategy} ranks "
            "step that compute no loss: let the optimiser count in its own state, or use ddp"
        )
    if rules.undoes_writes and (written := traits.changed_parameters):
        faults.append(write_fault(written, strategy))
    elif rules.holds_memory and num_ranks > 1 and (rebound := traits.rebound_parameters):
        faults.append(
            f"the task's loss gives {few(rebound)} other memory (p.data = ...), which {strategy} would not "
            "see: change it in place (p.data.copy_(...)), or use ddp"
        )
    elif num_shares > 1 and (learned := traits.learned_writes):
        faults.append(
            f"the task's loss sets {few(learned)} by what is in a batch, of which every rank has its own part: "
            "keep them as buffers, set them from a few samples in build_model, or use --strategy single"
        )
    return faults


def _faults_of_sparse_gradients(
    traits: LossTraits, model: nn.Module, rules: WeightRules, strategy: str
) -> Iterator[str]:
    if rules.sparse_gradients == "any":
        return
    layers = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    others = [name for name in traits.sparse_gradients if name.rpartition(".")[0] not in layers]
    if others:
        yield (
            f"{few(others)} gets sparse gradients, and from no layer with sparse=True, for which {strategy} has no "
            "place: leave out sparse=True, or use naive_ddp"
        )
    if rules.sparse_gradients == "of layers" and (dense := traits.dense_gradients):
        yield (
            f"{few(dense)} is of a layer with sparse gradients (sparse=True), and gets dense ones too, which "
            f"{strategy} cannot reduce: set sparse=False, or use naive_ddp"
        )


def refuse_unlike_optimizers(group: Group, model: nn.Module, optimizer: Optimizer, *, orders_parameters: bool) -> None:
    """Refuse an optimiser whose settings or first state depend on a rank's part of the weights, or on its number.

    Args:
        group: All ranks.
        model: Model of this rank.
        optimizer: Optimiser as the task built it.
        orders_parameters: Whether the order of parameters in its groups matters.

    Communication: one gathered JSON message.

    Raises:
        TaskInvalid: The ranks differ in them.
    """
    if group.world_size == 1:
        return
    order = order_digest(model, optimizer) if orders_parameters else None
    by_rank = group.all_gather_json([plain_settings(optimizer), order, first_state(optimizer)])
    name = type(optimizer).__name__
    for rank, (settings, theirs, state) in enumerate(by_rank):
        if settings != by_rank[0][0]:
            raise TaskInvalid(
                f"build_optimizer gave {name} other settings on rank {rank} than on rank "
                "0: compute them in build_model, where weights are whole, and not from the number of a rank"
            )
        if has_other_values(state, by_rank[0][2]):
            raise TaskInvalid(
                f"build_optimizer gave {name} other numbers in the state of its parameters on rank {rank} than on rank "
                "0: compute them in build_model, where weights are whole, and not from the number of a rank"
            )
        if theirs != by_rank[0][1]:
            raise TaskInvalid(
                f"build_optimizer gave {name} the parameters in another order on rank "
                f"{rank} than on rank 0: give them in the model's order (a set has another one in each process)"
            )


def hooks_added(before: dict[str, int], after: dict[str, int], known: Sequence[str]) -> list[str]:
    """Return the parameters that have got hooks on their gradients, if any of them is not known to have them.

    Args:
        before: Number of hooks of each parameter.
        after: Numbers at a later time.
        known: Parameters whose hooks were found in a trial of the loss.
    """
    added = [name for name, number in after.items() if number > before.get(name, 0)]
    return [] if all(name in known for name in added) else added
