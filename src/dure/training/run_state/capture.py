"""Capture of a session's state for checkpoints and snapshots, and its restoration."""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dure.strategies.contract.abilities import steady_names
from dure.strategies.state.saved_state import StrategyState
from dure.training.checkpoints.reader import Checkpoint
from dure.training.checkpoints.state import Snapshot
from dure.training.seeds import capture_random_state, restore_random_state, seed_rank
from dure.training.session.session import Session
from dure.training.task.identity import refusal

_OWN = "strategy."
"""Prefix of the names of a strategy's state for one rank."""
_STREAM = "stream"
"""Name of a rank's `Strategy.random_stream`; ranks of the same stream make the same draws."""


@dataclass
class Progression:
    """Progress of a run, and the state carried from step to step and from attempt to attempt."""

    samples_seen: int = 0
    step: int = 0
    best: dict[str, Any] | None = None
    """Best evaluation so far, with `metric`, `value` and `samples_seen`; None if there is none."""
    best_before: dict[str, Any] | None = None
    """Best evaluation before `best`; it applies again if no checkpoint of `best` is completed."""
    evaluated_samples: int = -1
    """Position of the last evaluation; -1 before the first."""
    loss_sum: float = 0.0
    """Sum of the losses since the last evaluation; `loss_count` is its count."""
    loss_count: float = 0.0


def captured(session: Session, progression: Progression) -> Snapshot:
    """Return a session's state and its progression, for a checkpoint."""
    return snapshot_of(session, progression, session.strategy.state_dict(), rank_state(session, is_thorough=True))


def snapshot_of(
    session: Session, progression: Progression, state: StrategyState, own: Mapping[str, Tensor]
) -> Snapshot:
    """Return a session's state as a snapshot.

    Args:
        session: Session whose state is captured.
        progression: Progress of the run.
        state: State of the session's strategy.
        own: This rank's `rank_state`.
    """
    return Snapshot(
        model=state.model,
        optimizer=state.optimizer,
        is_spread=state.is_spread,
        steady=steady_names(session.strategy),
        extra={**plain_state(session, progression), "identity": session.identity.to_json()},
        per_rank=own,
    )


def plain_state(session: Session, progression: Progression) -> dict[str, Any]:
    """Return the state without tensors that is equal on all ranks and may change from step to step."""
    strategy = session.strategy
    return {
        "precision": strategy.precision.state(),
        "expectation": strategy.expectation,
        "progression": vars(progression).copy(),
        "draws_anew": session.reseeding_note,
    }


def rank_state(session: Session, *, is_thorough: bool = False) -> dict[str, Tensor]:
    """Return the state of this rank alone: its generators, and its strategy's state for this rank.

    Args:
        session: Session whose state is captured.
        is_thorough: Passed to `KeptState.look`.
    """
    strategy = session.strategy
    carried = {} if strategy.carried is None else strategy.carried.rank_state()
    return {
        **capture_random_state(strategy.devices),
        _STREAM: _stream(strategy.random_stream),
        **{f"{_OWN}{name}": tensor for name, tensor in carried.items()},
        **session.kept.tensors(is_thorough=is_thorough),
    }


@functools.cache
def _stream(number: int) -> Tensor:
    return torch.tensor([number])


def restore(session: Session, progression: Progression, checkpoint: Checkpoint) -> None:
    """Restore a session and its progression to where they were captured.

    Communication: one gathered JSON message.
    """
    strategy, group = session.strategy, session.group
    _compare_identity(session, checkpoint)
    strategy.load_state_dict(checkpoint)
    strategy.precision.load_state(checkpoint.extra["precision"])
    strategy.expectation = checkpoint.extra["expectation"]
    for field, value in checkpoint.extra["progression"].items():
        setattr(progression, field, value)
    state = checkpoint.per_rank(group.world_size)
    drew = -1 if state is None else int(state.pop(_STREAM, torch.tensor([group.rank])))
    kept = checkpoint.of_rank0() if state is None else state
    if any(tensor.is_meta for tensor in kept.values()):
        # of snapshots of several hosts, each rank receives only what it needs of weights and optimiser
        session.kept.lost["plain state"] = "plain state of task and modules was in the memory of another host"
    else:
        session.kept.restore(kept)
    # A generator whose draws cannot be continued is seeded from this position. That applies to all generators if there
    # are other ranks, or ranks that share draws differently, and to the generator of a device that was not there
    # before.
    seed_rank(session.spec.seed + progression.samples_seen, strategy.random_stream)
    generators = capture_random_state(strategy.devices).keys()
    digest = "" if state is None else _digest(state[name] for name in generators if name in state)
    gathered = group.all_gather_json([drew, strategy.random_stream, digest])
    is_continued = state is not None and all(before == now for before, now, _ in gathered)
    session.reseeding_note = checkpoint.extra.get("draws_anew", "")
    if not is_continued:
        session.reseeding_note = (
            f"random numbers: begun anew at {progression.samples_seen:,} samples, on other ranks than before"
        )
    if strategy.draws and session.reseeding_note:
        session.notes.append(session.reseeding_note)
    if state is not None and is_continued:
        # if draws have no effect (Dropout(0.0)), all ranks count as drawing alike, yet some may have drawn more
        are_alike = len({now for _, now, _ in gathered}) == len({(now, digest) for _, now, digest in gathered})
        if strategy.draws or are_alike:
            restore_random_state(state, strategy.devices)
        if strategy.carried is not None:
            own = {name.removeprefix(_OWN): t for name, t in state.items() if name.startswith(_OWN)}
            strategy.carried.load_rank_state(own)


def _digest(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _compare_identity(session: Session, checkpoint: Checkpoint) -> None:
    """Refuse to continue with code or data other than those of the checkpoint.

    Raises:
        TaskInvalid: They differ, and the change was not accepted.
    """
    changes = session.identity.changes_since(checkpoint.extra.get("identity", {}))
    if not changes:
        return
    if not session.spec.accept_changes:
        raise refusal(changes, f"checkpoint {checkpoint.name}")
    session.notes.append(
        f"changed at {checkpoint.position.samples_seen:,} samples, and accepted: {' and '.join(changes)}"
    )
