"""Calls of a model divided over the devices of one process, with the result of one device."""

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.data.partition import shares
from dure.errors import TaskInvalid
from dure.strategies.contract.batch_layout import Role, has_rows, role_by_size
from dure.strategies.contract.batches import split_batch, to_device
from dure.strategies.device_threads import DeviceThreads
from dure.strategies.division.division_check import Call, Comparison, Verdict, compare_division
from dure.strategies.division.gathering import Gathering
from dure.strategies.state.containers import is_sequence, items_of, map_leaves, tensors_in
from dure.strategies.state.forward_state import ForwardAttributes, SharedState
from dure.strategies.state.module_replicas import Intercepted, Replica, replicate
from dure.strategies.state.not_gathered import NotGathered
from dure.torchcompat.modes import is_transforming

_NOT_A_LEAF = "you can only change requires_grad flags of leaf variables"
"""Text of torch's error for a flag of a replica's parameter, which is computed from the model's own."""


class DividedCalls:
    """Interceptor of a model's `forward` while a loss is computed."""

    def __init__(
        self, model: nn.Module, devices: Sequence[torch.device], threads: DeviceThreads, counted: Collection[str] = ()
    ) -> None:
        """Replace the model's `forward`.

        Args:
            model: Model on the first device.
            devices: At least two.
            threads: One for each device.
            counted: Buffers of the model that every call changes in the same way, as far as it is known.
        """
        self._counted = tuple(counted)
        self._strayed: dict[str, Tensor] = {}
        """True, as `()` bool on the first device, for buffers that another device has ever set to another value."""
        self._model = model
        self._devices = devices
        self._threads = threads
        self._num_samples = 0
        """Samples of the batch whose loss is computed; 0 outside of it."""
        self._inside = threading.local()
        self._verdicts: dict[Hashable, Verdict] = {}
        self._joined: dict[str, list[Tensor]] = {}
        """Tensors that attributes got when those of the last call were joined."""
        model.forward = Intercepted(model.forward, self._call)

    @contextmanager
    def of_batch(self, num_samples: int) -> Iterator[None]:
        """Divide the calls made inside the context.

        Communication: every divided call sends parameters and buffers to the other devices.
        """
        self._num_samples = num_samples
        try:
            yield
        finally:
            self._num_samples = 0

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_inside = getattr(self._inside, "value", False)
        if not self._num_samples or is_inside or is_transforming():
            return original(*args, **kwargs)
        num_rows = _num_rows((args, kwargs), self._num_samples)
        counts = [count for count in shares(num_rows, len(self._devices)) if count]
        if len(counts) < 2:
            return original(*args, **kwargs)
        return self._divided(original, (args, kwargs), counts)

    def _divided(self, original: Callable[..., Any], call: Call, counts: list[int]) -> Any:
        """Replicate, scatter, apply in parallel, gather."""
        self._disown_joined()
        attributes, hooks = ForwardAttributes(self._model), SharedState(self._model)
        parts: list[Call] = split_batch(call, counts)
        verdict = self._verdict(call, parts, counts, attributes.names_of_tensors())
        replicas = replicate(self._model, self._devices[1 : len(counts)], linked=True)
        forwards = [original, *(replica.model.forward for replica in replicas)]
        pairs = zip(forwards, parts, self._devices, strict=False)
        outputs = self._threads.run([self._part(forward, part, device) for forward, part, device in pairs])
        if (change := hooks.first_changed()) is not None:
            raise TaskInvalid(
                f"{change}, which under dp each device would do: let the model return the value, or use ddp"
            )
        check_parameters(replicas)
        self._compare_counted(replicas)
        self._join_attributes(attributes, attributes.changes([None, *replicas]), counts, verdict)
        return self._gathering(counts, verdict.output).of(outputs)

    def strayed(self) -> list[str]:
        """Return the counted buffers that devices have set to different values; this waits for the device."""
        return [name for name, has_strayed in self._strayed.items() if has_strayed]

    def _compare_counted(self, replicas: Sequence[Replica]) -> None:
        if not self._counted:
            return
        # by name: forward may put other tensors in their places
        own_buffers = dict(self._model.named_buffers())
        for replica in replicas:
            others = dict(replica.model.named_buffers())
            for name in self._counted:
                own, other = own_buffers.get(name), others.get(name)
                if own is None or other is None or own.shape != other.shape:
                    continue
                other = other.to(own.device)
                has_strayed = (own != other).logical_and((own == own).logical_or(other == other)).any()
                before = self._strayed.get(name)
                self._strayed[name] = has_strayed if before is None else before.logical_or(has_strayed)

    def _part(self, forward: Callable[..., Any], part: Call, device: torch.device) -> Callable[[], Any]:
        def run() -> Any:
            args, kwargs = moved = to_device(part, device)
            copies = [tensor for tensor in tensors_in(moved) if tensor.device != self._devices[0]]
            versions = [tensor._version for tensor in copies]
            self._inside.value = True
            try:
                output = forward(*args, **kwargs)
            except RuntimeError as error:
                if _NOT_A_LEAF not in str(error):
                    raise
                raise TaskInvalid(
                    "the model freezes or unfreezes parameters in its forward, which the replicas on other devices "
                    "cannot: let the loss do it, around calls of the model, or use ddp"
                ) from error
            finally:
                self._inside.value = False
            if versions != [tensor._version for tensor in copies]:
                raise TaskInvalid(
                    f"the model changes its input in place, which the loss would not see of {device}: let it change "
                    "a copy, or use balanced_dp or ddp"
                )
            return output

        return run

    def _verdict(self, call: Call, parts: Sequence[Call], counts: list[int], state: Hashable) -> Verdict:
        """Return the findings about calls of this kind; the first call is computed whole and divided."""
        kind = (_signature(call), state, self._model.training)
        if kind not in self._verdicts:
            self._inside.value = True
            try:
                verdict = compare_division(self._model, self._devices, call, parts, counts)
            finally:
                self._inside.value = False
            if sum(counts) != self._num_samples and not verdict.is_compared:
                # rows that are not the batch's samples may be divided if that is known to change nothing
                split_batch(call, [self._num_samples])
            self._verdicts[kind] = verdict
        return self._verdicts[kind]

    def _gathering(self, counts: list[int], found: Comparison, name: str = "") -> Gathering:
        subject = "the model keeps" if name else "the model returned"
        return Gathering(
            device=self._devices[0], counts=counts, shared=frozenset(found.shared), wrong=frozenset(found.wrong),
            subject=subject, name=name,
        )  # fmt: skip

    def _join_attributes(
        self, before: ForwardAttributes, changes: list[dict[str, Any]], counts: list[int], verdict: Verdict
    ) -> None:
        """Set on the model's modules the attributes that the replicas have set, joined like outputs."""
        for name, value in changes[0].items():
            found = verdict.attributes.get(name, Comparison())
            try:
                joined = self._gathering(counts, found, name).of([attributes[name] for attributes in changes])
            except TaskInvalid as error:
                joined = before.disowned(name, value, str(error))
            before.put(name, joined)
            own = set(map(id, tensors_in(value)))
            self._joined[name] = [tensor for tensor in tensors_in(joined) if id(tensor) not in own]

    def _disown_joined(self) -> None:
        """Hide in this call the state kept by the last one: it is of all samples, but a device has its own."""
        for name, tensors in self._joined.items():
            prefix, _, attribute = name.rpartition(".")
            kept = vars(self._model.get_submodule(prefix))
            if attribute in kept:
                kept[attribute] = _without(kept[attribute], tensors, name)
        self._joined = {}

    def close(self) -> None:
        """Restore the model's own `forward`."""
        forward = vars(self._model).get("forward")
        if isinstance(forward, Intercepted):
            self._model.forward = forward.original


def _without(value: Any, tensors: list[Tensor], name: str) -> Any:
    ids = set(map(id, tensors))
    instead = NotGathered(
        f"the model reads {name} of an earlier call, which has the samples of all devices: return it and pass it as an "
        "argument, or use ddp"
    )
    return map_leaves(value, lambda leaf: instead if id(leaf) in ids else leaf)


def check_parameters(replicas: Sequence[Replica]) -> None:
    """Refuse parameters that a call has changed in place to different values on each device.

    Raises:
        TaskInvalid: Parameters differ; the message names the first.
    """
    for replica in replicas:
        if (name := replica.first_changed()) is not None:
            raise TaskInvalid(
                f"the model or the loss changes {name} in place, to other values on each device: change it by what is "
                "the same for all samples, or use ddp"
            )


def _num_rows(call: Call, num_samples: int) -> int:
    """Return the rows by which a call is divided: the batch's samples, or else the only length of its tensors.

    A call without tensors has none.
    """
    if _has_rows(call, num_samples):
        return num_samples
    lengths = {len(tensor) for tensor in tensors_in(call) if tensor.dim()}
    return lengths.pop() if len(lengths) == 1 else num_samples if lengths else 0


def _has_rows(value: Any, num_rows: int) -> bool:
    role = role_by_size(value, num_rows)
    if role is Role.SAMPLES:
        return len(value) == num_rows
    return role is Role.CONTAINER and any(_has_rows(item, num_rows) for item in (items_of(value) or {}).values())


def _signature(value: Any) -> Hashable:
    """Return the common features of calls of one kind: classes, dtypes and strings, but no sizes and no numbers."""
    if isinstance(value, Tensor | np.ndarray):
        return type(value), value.dtype, value.ndim
    if isinstance(value, str | bool):
        return value
    items = items_of(value)
    if items is None:
        return (type(value),)
    if is_sequence(value) and not any(has_rows(item) for item in value):
        return type(value), frozenset(map(_signature, value))
    return type(value), tuple((key, _signature(item)) for key, item in items.items())
