"""`apex.amp`: mixed precision by optimisation levels, over `torch.amp`."""

from dure.compat.apex.amp.casts import (
    bfloat16_function,
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from dure.compat.apex.amp.initialize import initialize, load_state_dict, master_params, state_dict
from dure.compat.apex.amp.levels import opt_levels
from dure.compat.apex.amp.scaling import scale_loss

__all__ = [
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt_levels",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
