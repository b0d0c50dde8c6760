"""`apex.amp.initialize`, and the state that it begins."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.compat.apex.amp.casts import choose_types, converted
from dure.compat.apex.amp.levels import Properties, properties_of
from dure.compat.apex.amp.scaling import SCALING, LossScaler, ScaledOptimizer
from dure.strategies.state.module_replicas import Intercepted
from dure.torchcompat.modules import BatchNorm


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """Prepare models and optimisers for mixed precision; return them as they were given, one or a list.

    Args:
        models: Model, or a list of models, before they are wrapped for several ranks.
        optimizers: Optimiser, or a list; None for an evaluation.
        enabled: Whether anything is changed.
        opt_level: O0 (float32), O1 (types by operation), O2 (half weights with float32 copies), O3 (half).
        cast_model_type: Type of weights and inputs in place of the level's.
        patch_torch_functions: Whether operations choose their type.
        keep_batchnorm_fp32: Whether BatchNorm stays in float32; text is read too.
        master_weights: Whether float32 copies are stepped.
        loss_scale: Number or `dynamic`.
        cast_model_outputs: Type of the models' outputs; by default float32 if weights are cast.
        num_losses: Number of losses with a scale of their own.
        verbosity: Accepted; nothing but overflows is printed.
        min_loss_scale: Lower limit of a dynamic scale.
        max_loss_scale: Upper limit.

    Raises:
        RuntimeError: There is no such level, or an argument does not go with it.
    """
    SCALING.is_enabled = enabled
    if not enabled:
        return models if optimizers is None else (models, optimizers)
    properties = properties_of(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
    )
    for model in models if isinstance(models, list | tuple) else [models]:
        _check_is_bare(model)
        _cast(model, properties, cast_model_outputs)
    if properties.patch_torch_functions or SCALING.chooses_types:
        choose_types(enabled=properties.patch_torch_functions)
    SCALING.chooses_types = properties.patch_torch_functions
    given = [] if optimizers is None else optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    SCALING.scalers = [LossScaler(properties.loss_scale, min_loss_scale, max_loss_scale) for _ in range(num_losses)]
    if any(each.optimizer is optimizer for each in SCALING.optimizers for optimizer in given):
        raise RuntimeError("an optimizer was given to amp.initialize twice, which would scale its steps twice")
    SCALING.optimizers += [ScaledOptimizer(each, has_masters=properties.master_weights) for each in given]
    return models if optimizers is None else (models, optimizers)


def _check_is_bare(model: nn.Module) -> None:
    if "DataParallel" in type(model).__name__:
        raise RuntimeError("amp.initialize takes models before they are wrapped in DistributedDataParallel")


def _cast(model: nn.Module, properties: Properties, outputs: torch.dtype | None) -> None:
    """Cast weights, and the inputs and outputs of the forward."""
    kind = properties.cast_model_type
    if kind is not None:
        model.to(kind)
        if properties.keep_batchnorm_fp32:
            for module in model.modules():
                if isinstance(module, BatchNorm):
                    module.float()
                    module.register_forward_pre_hook(_as_float32)
                    module.register_forward_hook(functools.partial(_as_type, kind))
        for module in model.modules():
            module.register_load_state_dict_post_hook(_take_loaded)
        model.register_state_dict_post_hook(_as_saved)
    if kind in (None, torch.float32) and outputs is None:
        return
    # a copy of the model, as for an average of weights, calls its own forward
    call = functools.partial(_casting, kind, outputs or torch.float32)
    model.forward = Intercepted(model.forward, call, in_copies=True)


def _casting(
    kind: torch.dtype | None, outputs: torch.dtype, forward: Callable[..., Any], *inputs: Any, **keywords: Any
) -> Any:
    if kind is not None:
        inputs, keywords = converted((inputs, keywords), kind)
    return converted(forward(*inputs, **keywords), outputs)


def _take_loaded(module: nn.Module, incompatible_keys: Any) -> None:
    """Let the copies that are stepped follow a state that was loaded into a module."""
    loaded = set(map(id, module.parameters(recurse=False)))
    for optimizer in SCALING.optimizers:
        optimizer.take_weights(loaded)


def _as_saved(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Give a state in float32, as in Apex, so that it can be loaded under every level."""
    for name, value in state.items():
        if name.startswith(prefix) and isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            state[name] = value.float()


def _as_float32(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return converted(inputs, torch.float32)


def _as_type(kind: torch.dtype, module: nn.Module, inputs: Any, output: Any) -> Any:
    return converted(output, kind)


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the weights that an optimiser steps: float32 copies with O2, those of the model otherwise."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the scales, by the names of Apex."""
    found: dict[str, Any] = {} if destination is None else destination
    for number, scaler in enumerate(SCALING.scalers):
        found[f"loss_scaler{number}"] = {"loss_scale": scaler.scale, "unskipped": scaler.unskipped}
    return found


def load_state_dict(state_dict: dict[str, Any]) -> None:
    """Restore the scales.

    Raises:
        RuntimeError: There are other losses.
    """
    if len(state_dict) != len(SCALING.scalers):
        raise RuntimeError(
            f"the state has {len(state_dict)} loss scalers, and amp.initialize made {len(SCALING.scalers)}"
        )
    for number, scaler in enumerate(SCALING.scalers):
        kept = state_dict[f"loss_scaler{number}"]
        scaler.scale, scaler.unskipped = float(kept["loss_scale"]), int(kept["unskipped"])


__all__ = ["initialize", "load_state_dict", "master_params", "state_dict"]
