"""The one table tells the truth about what it names."""

import subprocess
import sys

import pytest

from dure.strategies.contract.strategy import Strategy
from dure.strategies.table import STRATEGIES, load_strategy


@pytest.mark.parametrize("name", STRATEGIES)
def test_row_names_an_implementation_and_says_every_thing(name):
    info = STRATEGIES[name]
    assert info.name == name
    assert issubclass(load_strategy(name), Strategy)
    may_be_empty = ("options", "default_for", "extra_processes", "outlives_ranks_without")
    assert all(text for field, text in info.to_json().items() if isinstance(text, str) and field not in may_be_empty)


def test_table_is_read_without_torch():
    code = "import sys; from dure.strategies.table import STRATEGIES; assert STRATEGIES and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
