"""Horovod's package, of which the PyTorch part is here: `horovod.torch`, by Horovod's names and meanings.

docs/horovod.md lists what is the same, what differs and what is refused.
"""

from dure.compat.horovod.starter import run

__all__ = ["__version__", "run"]
__version__ = "0.28.1"
"""Version of Horovod whose interface this is; scripts compare it."""
