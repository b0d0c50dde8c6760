"""Horovod's face on two and three ranks: each case runs on every rank of one group of processes."""

import pytest

from tests.compat.horovod.cases import CASES
from tests.compat.horovod.ranks import outcomes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_case_when_run_on_all_ranks_then_each_computes_what_it_should(num_ranks: int, name: str) -> None:
    assert outcomes(num_ranks)[name] == [None] * num_ranks, "\n".join(map(str, outcomes(num_ranks)[name]))
