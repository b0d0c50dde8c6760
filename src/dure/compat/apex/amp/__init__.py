"""`apex.amp`: mixed precision by optimisation levels, over `torch.amp`."""

from dure.compat.apex.amp.initialize import disable_casts, initialize, load_state_dict, master_params, state_dict
from dure.compat.apex.amp.levels import opt_levels
from dure.compat.apex.amp.scaling import scale_loss

__all__ = [
    "disable_casts",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt_levels",
    "scale_loss",
    "state_dict",
]
