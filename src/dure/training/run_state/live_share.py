"""Share of a checkpoint that this rank would write now, rebuilt only where something has changed.

Everything plain (positions, learning rates, state of optimisers and modules except tensors) is encoded with its current
value. Tensors are the current ones. Only their names and places stay the same from step to step.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from dure.documents import parse_json
from dure.strategies.contract.abilities import own_state
from dure.training.checkpoints.rank_shard import RankShard, shard_of
from dure.training.checkpoints.state_tree import encode
from dure.training.objects.state_watch import StateWatch
from dure.training.run_state.capture import Progression, plain_state, rank_state, snapshot_of
from dure.training.session.session import Session
from dure.training.snapshots.memory import ShareLayout

_BUFFER = "buffer."
"""Prefix of the names of buffers that each rank keeps for itself (BatchNorm's statistics between two broadcasts)."""
_KIND = attrgetter("shape", "dtype")
_FIXED = (int, float, bool, str, type(None))
"""Types for which the same object always has the same value."""
_as_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


class LiveShare:
    """A rank's share of the state between two steps: layout, tensors and plain state."""

    layout: ShareLayout
    """Names and places of the tensors; the same object as long as they do not change."""
    tensors: list[Tensor]
    """Tensors in the order of the layout; the same object as long as they stay in their memory."""
    own: list[Tensor]
    """Tensors at the end of the layout, new ones each time: this rank's generators and its strategy's state for it."""
    steady: list[bool]
    """True for each tensor that only the optimiser's step changes."""
    state: bytes
    """`RankShard.state`: the current state without tensors."""

    def __init__(self, session: Session, progression: Progression, *, is_whole: bool) -> None:
        """Build the share for the first time.

        Args:
            session: Session whose state is captured.
            progression: Progress of the run.
            is_whole: Passed to `shard_of`.
        """
        self._session = session
        self._progression = progression
        self._is_whole = is_whole
        self._build(rank_state(session), None)

    def update(self) -> None:
        """Update everything to the current state."""
        own = rank_state(self._session)
        strategy = self._session.strategy
        is_same = _kinds(own) == self._own_kinds and self._watch.is_same(strategy.optimizer.param_groups)
        plain = self._plain_now() if is_same else None
        if plain is None:
            self._build(own, self.layout)
        else:
            self.state, self.own = plain, [*own.values()]

    def _build(self, own: dict[str, Tensor], before: ShareLayout | None) -> None:
        session, strategy = self._session, self._session.strategy
        state = own_state(strategy)
        snapshot = snapshot_of(session, self._progression, state, own)
        share = shard_of(snapshot, session.group.rank, is_whole=self._is_whole)
        share.per_rank = {**own_buffers(session), **own}
        layout = ShareLayout(share, is_spread=snapshot.is_spread)
        self.layout = before if before is not None and layout.is_like(before) else layout
        tensors = share.tensors()
        self.tensors, self.own = tensors[: len(tensors) - len(own)], tensors[len(tensors) - len(own) :]
        self.steady, self.state = share.steadiness(), share.state
        self._own_kinds = _kinds(own)
        self._watch = StateWatch(strategy.model, strategy.stepped, strategy.optimizer.param_groups)
        self._keep_constant(share)

    def _keep_constant(self, share: RankShard) -> None:
        """Encode once the parts that stay the same as long as the watch sees no change."""
        self._groups: list[tuple[str, _PlainText]] | None = None
        self._extra, self._progression_text = _PlainText(), _PlainText()
        if not self._watch.is_plain or not share.state:
            return
        tree = parse_json(share.state, may_repeat_keys=True, most_depth=None)
        optimizer = tree["optimizer"]
        groups, state = optimizer.pop("groups"), _StateText.of(optimizer.pop("state"), self._live_state())
        if state is not None and all("params" in group for group in groups):
            self._groups = [(_as_json(group.pop("params")), _PlainText(group)) for group in groups]
            self._state = state
            model_extra, identity = _as_json(tree["model_extra"]), _as_json(tree["extra"]["identity"])
            self._constant = f'{{"optimizer": {_as_json(optimizer)[:-1]}', model_extra, identity

    def _live_state(self) -> list[dict[str, Any]]:
        return [*self._session.strategy.stepped.state.values()]

    def _plain_now(self) -> bytes | None:
        """Return the current plain state, or None if it must be rebuilt."""
        if not self.state:
            return b""
        if self._groups is None:
            return None
        live = self._session.strategy.optimizer.param_groups
        try:
            groups = [
                f'{{"params": {params}{text.now(group)}}}'
                for (params, text), group in zip(self._groups, live, strict=True)
            ]
            state = self._state.now(self._live_state())
        except TypeError:  # a new tensor needs a name within the whole state
            return None
        optimizer, model_extra, identity = self._constant
        plain = plain_state(self._session, self._progression)
        progression = self._progression_text.now(plain.pop("progression"))[2:]
        extra = f'{{"progression": {{{progression}}}{self._extra.now(plain)}, "identity": {identity}}}'
        return (
            f'{optimizer}, "state": {{{state}}}, "groups": [{", ".join(groups)}]}}, '
            f'"model_extra": {model_extra}, "extra": {extra}}}'
        ).encode()


class _PlainText:
    """JSON of a dictionary, in which only values that are new objects are encoded again."""

    def __init__(self, keys: Iterable[str] | None = None) -> None:
        """Select the keys to encode; None for all."""
        self._keys = None if keys is None else [*keys]
        self._known: dict[str, tuple[Any, str]] = {}

    def now(self, values: Mapping[str, Any]) -> str:
        """Return the members of the JSON object, each preceded by a comma.

        Raises:
            TypeError: A value is of a type that cannot be kept, or is a tensor.
        """
        known = self._known
        for key in values if self._keys is None else self._keys:
            value = values[key]
            before = known.get(key)
            if before is None or value is not before[0] or type(value) not in _FIXED:
                known[key] = value, f", {_as_json(key)}: {_text(value, key)}"
        return "".join([text for _, text in known.values()])


class _StateText:
    """JSON of the parameters' state in an optimiser: mostly tensors, whose names stay the same."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        """Constant texts before, between and after the plain values."""
        self._plain: list[tuple[int, _PlainText, int]] = []
        """Number of a parameter with plain values, their text, and the characters to drop in front if they come
        first."""

    @classmethod
    def of(cls, saved: Mapping[str, Any], live: Sequence[Mapping[str, Any]]) -> "_StateText | None":
        """Separate the plain values of saved state from the rest; return None if it does not match the live state."""
        text, constant = cls(), ""
        if len(saved) != len(live):
            return None
        for number, ((name, entry), values) in enumerate(zip(saved.items(), live, strict=True)):
            if not isinstance(entry, dict) or entry.keys() != values.keys():
                return None
            plain = [key for key, value in values.items() if not isinstance(value, Tensor)]
            members = {key: value for key, value in entry.items() if key not in plain}
            constant += f"{', ' if number else ''}{_as_json(name)}: {_as_json(members)[:-1]}"
            if plain:
                text._parts.append(constant)
                text._plain.append((number, _PlainText(plain), 0 if members else len(", ")))
                constant = ""
            constant += "}"
        text._parts.append(constant)
        return text

    def now(self, live: Sequence[Mapping[str, Any]]) -> str:
        """Return the members of the JSON object."""
        plain = [text.now(live[number])[begin:] for number, text, begin in self._plain]
        return "".join(chain.from_iterable(zip(self._parts, [*plain, ""], strict=True)))


def _text(value: Any, key: str) -> str:
    kind = type(value)
    if kind is int or (kind is float and isfinite(value)):
        return repr(value)
    return _as_json(encode(value, key))


def own_buffers(session: Session) -> dict[str, Tensor]:
    """Return the buffers that this rank has for itself; none on the first rank, whose buffers are the model's."""
    if session.group.rank == 0:
        return {}
    model = session.strategy.model
    kept = model.state_dict().keys()
    return {f"{_BUFFER}{name}": buffer for name, buffer in model.named_buffers() if name in kept}


def restore_own_buffers(session: Session, saved: Mapping[str, Tensor]) -> None:
    """Restore this rank's own buffers."""
    model = session.strategy.model
    device = next((parameter.device for parameter in model.parameters()), None)
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                value = saved.get(f"{_BUFFER}{path}.{name}" if path else f"{_BUFFER}{name}")
                if value is None:
                    continue
                if buffer is None or buffer.shape != value.shape:  # a buffer that grew, or was added later
                    module._buffers[name] = value.to(device if buffer is None else buffer.device)
                else:
                    buffer.copy_(value)


def _kinds(tensors: Mapping[str, Tensor]) -> tuple[list[str], list[Any]]:
    return [*tensors], [*map(_KIND, tensors.values())]
