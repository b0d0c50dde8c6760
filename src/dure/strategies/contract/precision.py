"""Autocast and loss scaling: the only module that knows the meaning of `fp32`, `tf32`, `bf16` and `fp16`."""

import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from dure.errors import TaskInvalid, message_of
from dure.host.device_kinds import autocast_dtypes, device_kind

_settings_before: list[str] = []
"""Setting of torch for products in float32 before this module changed it."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AS_IT_IS = nullcontext()


def allow_tf32(is_allowed: bool) -> None:
    """Compute products of float32 matrices on tensor cores, with 10 bits of mantissa, or as the program had it."""
    if is_allowed and not _settings_before:
        _settings_before.append(torch.get_float32_matmul_precision())
    if is_allowed:
        torch.set_float32_matmul_precision("high")
    elif _settings_before:
        torch.set_float32_matmul_precision(_settings_before.pop())


class Precision:
    """Precision of a forward pass, and the scaling that keeps its gradients in range.

    `fp32` leaves the model's own dtypes alone (a float64 model stays float64), and so does `tf32`, with which CUDA
    devices multiply float32 matrices in fewer bits (`allow_tf32`). `bf16` and `fp16` run the forward
    pass under autocast with the parameters as they are. `fp16` also scales the loss (Micikevicius et al. 2018,
    section 3.2): one scale for all microsteps of a step, unscaled once before clipping.
    """

    def __init__(self, name: str, device_type: str) -> None:
        self.name = name
        self.device_type = device_type
        self.scaler = torch.amp.GradScaler(device_type) if name == "fp16" else None
        if self.scaler is not None:
            # the scaler creates its scale at the first call, in which device threads of balanced_dp would race
            self.scaler.scale(torch.zeros(1, device=device_type))
        self._num_updates = 0
        """Number of updates of the scale since it was created or loaded."""
        self._scale = {} if self.scaler is None else self.scaler.state_dict()
        """Scaler's state at that time."""
        self._had_overflowed = False
        """True if gradients had overflowed before."""

    @property
    def is_exact(self) -> bool:
        """True if operations are computed in the dtypes of their tensors."""
        return self.name == "fp32"

    @property
    def is_autocast(self) -> bool:
        """True if `autocast` changes dtypes."""
        return self.name in _DTYPES

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which model and loss are computed."""
        if not self.is_autocast:
            return _AS_IT_IS
        return torch.autocast(self.device_type, dtype=_DTYPES[self.name])

    def scale(self, root: torch.Tensor) -> torch.Tensor:
        """Scale the tensor from which backward starts."""
        return root if self.scaler is None else self.scaler.scale(root)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the accumulated gradients by the scale."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimiser; with fp16, skip the step if a gradient overflowed (the same on all ranks).

        Raises:
            TaskInvalid: Its step computes the loss again, by a closure.
        """
        try:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.update()
        except Exception as error:
            refuse_closure(optimizer, error)
            raise

    def update(self) -> None:
        """Adapt fp16's scale to whether gradients overflowed."""
        if self.scaler is not None:
            self.scaler.update()
            self._num_updates += 1

    def has_overflowed(self) -> bool:
        """Return whether gradients of fp16 have overflowed in any step of the run; this waits for the device."""
        if self.scaler is None or self._had_overflowed:
            return self._had_overflowed
        now, before = self.scaler.state_dict(), self._scale
        steps = before["_growth_tracker"] + self._num_updates
        num_grown, tracker = divmod(steps, before["growth_interval"])
        undisturbed = before["scale"] * before["growth_factor"] ** num_grown, tracker
        self._had_overflowed = (now["scale"], now["_growth_tracker"]) != undisturbed
        return self._had_overflowed

    def state(self) -> dict[str, Any]:
        """Return the scaler's state, for a checkpoint."""
        if self.scaler is None:
            return {}
        return {**self.scaler.state_dict(), "has_overflowed": self.has_overflowed()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a scaler's state; a run that resumes under another precision starts with a new scale."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)
            self._num_updates, self._scale = 0, self.scaler.state_dict()
            self._had_overflowed = state.get("has_overflowed", False)


def fault_of_precision(name: str, device_type: str) -> str | None:
    """Return a sentence if a kind of device lacks a precision, about which torch would only warn, if anything."""
    if name == "tf32" and not device_kind(device_type).has_tf32:
        return f"precision is tf32, in which {device_type} devices do not compute: use fp32"
    dtypes = autocast_dtypes(device_type)
    if name not in _DTYPES or dtypes is None or _DTYPES[name] in dtypes:
        return None
    known = [precision for precision, dtype in _DTYPES.items() if dtype in dtypes]
    return (
        f"precision is {name}, but autocast on {device_type} devices has {' and '.join(known) or 'no half precision'}: "
        f"use {' or '.join([*known, 'fp32'])}"
    )


def refuse_closure(optimizer: Optimizer, error: Exception) -> None:
    """Replace an optimiser's exception about a missing closure by a `TaskInvalid` of one sentence.

    Raises:
        TaskInvalid: Its step computes the loss again, by a closure.
    """
    if is_about_closure(error):
        raise TaskInvalid(
            f"the optimiser {type(optimizer).__name__} needs a closure, by which its step computes the loss again "
            f"({type(error).__name__}: {message_of(error)}): use one that takes a step from gradients, such as AdamW "
            "or SGD"
        ) from error


def is_about_closure(error: Exception) -> bool:
    """Return whether an optimiser's step failed for want of a closure: the exception says so, or None was called."""
    if "closure" in str(error).lower():
        return True
    if not isinstance(error, TypeError) or "'NoneType' object is not callable" not in str(error):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any("closure" in frame.f_code.co_varnames[: frame.f_code.co_argcount] for frame in frames)
