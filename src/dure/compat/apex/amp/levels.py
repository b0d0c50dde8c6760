"""Optimisation levels of `apex.amp`, and the properties that arguments change."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

LossScale = float | Literal["dynamic"]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """Properties of a run with mixed precision."""

    opt_level: str
    cast_model_type: torch.dtype | None = None
    """Type of the weights and inputs; None to leave them."""
    patch_torch_functions: bool = False
    """True if operations choose their own type, as under `torch.autocast`."""
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool = False
    """True if the optimiser steps float32 copies of the weights."""
    loss_scale: LossScale = 1.0


opt_levels = {
    "O0": Properties(opt_level="O0", cast_model_type=torch.float32),
    "O1": Properties(opt_level="O1", patch_torch_functions=True, loss_scale="dynamic"),
    "O2": Properties(
        opt_level="O2",
        cast_model_type=torch.float16,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    "O3": Properties(opt_level="O3", cast_model_type=torch.float16, keep_batchnorm_fp32=False),
}
"""Properties by level."""


def properties_of(opt_level: str, **changes: Any) -> Properties:
    """Return the properties of a level with changes; None leaves a property.

    Raises:
        RuntimeError: There is no such level, or a property does not go with it.
    """
    if opt_level not in opt_levels:
        raise RuntimeError(f"unexpected optimization level {opt_level!r}: the levels are O0, O1, O2 and O3 (letter O)")
    given = {name: _read(name, value) for name, value in changes.items() if value is not None}
    found = replace(opt_levels[opt_level], **given)
    if found.patch_torch_functions and found.keep_batchnorm_fp32 is not None:
        raise RuntimeError("keep_batchnorm_fp32 has no meaning with O1, where BatchNorm is in float32 anyway")
    if found.patch_torch_functions and found.cast_model_type is not None:
        raise RuntimeError("cast_model_type has no meaning with O1, where operations choose their type")
    if found.patch_torch_functions and found.master_weights:
        raise RuntimeError("master_weights has no meaning with O1, whose weights are in float32")
    return found


def _read(name: str, value: Any) -> Any:
    """Return a property that was given as text, as scripts pass arguments on."""
    if name == "loss_scale" and value != "dynamic":
        return float(value)
    if name in ("keep_batchnorm_fp32", "master_weights") and isinstance(value, str):
        if value not in ("True", "False"):
            raise RuntimeError(f"{name} is {value!r} but must be True or False")
        return value == "True"
    return value
