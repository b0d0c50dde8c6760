"""Module `apex` of processes that a rank starts, such as loader workers: they inherit `sys.path`, but no finder."""

import importlib
import sys

from dure.compat.apex.finder import install

install()
sys.modules[__name__] = importlib.import_module("dure.compat.apex")
