"""Module `horovod` of processes that a rank starts, such as loader workers: they inherit `sys.path`, but no finder."""

import importlib
import sys

from dure.compat.horovod.finder import install

install()
sys.modules[__name__] = importlib.import_module("dure.compat.horovod")
