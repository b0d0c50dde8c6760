"""Every cell of the table has its verdict, and the page says the same."""

import pytest

from dure.strategies.table import STRATEGIES
from tests.conformance.zoo.cell import DIVIDED, reference_of, run_cell
from tests.conformance.zoo.feature import FEATURES
from tests.conformance.zoo.table import PAGE, is_available, page, read_verdicts, ways_of, worst

ALWAYS = "ddp"
"""Column that every test run has; the others are among the slow tests."""
OFTEN = (
    "OutputMapping",
    "TaskCounter",
    "LearnedBuffer",
    "MeanOverItems",
    "Unfrozen",
    "NoiseInLoss",
    "CheckpointReentrant",
    "StatisticsForOptimizer",
)
"""Rows that it has every time."""


def _marks(row: int, name: str, column: int, strategy: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a cell: the slow tests have one of each row, another from row to row; `make zoo` has all."""
    if strategy == ALWAYS and name in OFTEN:
        return []
    return [pytest.mark.slow if row % len(STRATEGIES) == column else pytest.mark.zoo]


CELLS = [
    pytest.param(name, strategy, marks=_marks(row, name, column, strategy))
    for row, name in enumerate(FEATURES)
    for column, strategy in enumerate(STRATEGIES)
]


def _microbatch_marks(row: int, column: int) -> pytest.MarkDecorator:
    """Return the mark of a cell in microbatches: the slow tests have one of every third row."""
    return pytest.mark.slow if row % (3 * len(STRATEGIES)) == 3 * column else pytest.mark.zoo


IN_MICROBATCHES = [
    pytest.param(name, strategy, marks=_microbatch_marks(row, column))
    for row, name in enumerate(FEATURES)
    for column, strategy in enumerate(STRATEGIES)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test its cells; without those of `make zoo` where it is not asked for, because they are thousands."""
    cells = {
        "test_cell_has_the_verdict_of_the_table": CELLS,
        "test_cell_in_microbatches_is_exact_declared_or_refused": IN_MICROBATCHES,
    }.get(metafunc.function.__name__)
    if cells is None:
        return
    expression = metafunc.config.getoption("markexpr")
    is_zoo = not expression or "zoo" in expression.replace("not zoo", "")
    chosen = [cell for cell in cells if is_zoo or pytest.mark.zoo not in cell.marks]
    metafunc.parametrize(("name", "strategy"), chosen)


def test_cell_has_the_verdict_of_the_table(name, strategy, tmp_path):
    feature = FEATURES[name]
    if not is_available(feature):
        pytest.skip(f"needs {feature.needs} (make zoo)")
    reference = reference_of(feature, tmp_path)
    verdict = worst(run_cell(feature, strategy, way, reference, tmp_path) for way in ways_of(feature, strategy))
    known = read_verdicts()[name][strategy]["kind"]
    # threads may happen to draw in the order of one device
    assert verdict.kind == known or (known, verdict.kind) == ("declared", "exact"), verdict.detail


def test_cell_in_microbatches_is_exact_declared_or_refused(name, strategy, tmp_path):
    feature = FEATURES[name]
    if not is_available(feature):
        pytest.skip(f"needs {feature.needs} (make zoo)")
    verdict = run_cell(feature, strategy, DIVIDED, reference_of(feature, tmp_path), tmp_path)
    assert verdict.kind in ("exact", "declared", "refused"), verdict.detail


def test_table_has_every_cell():
    table = read_verdicts()
    assert table.keys() == FEATURES.keys()
    assert all(row.keys() == STRATEGIES.keys() for row in table.values())
    assert {cell["kind"] for row in table.values() for cell in row.values()} <= {"exact", "declared", "refused"}


def test_page_has_every_row():
    text = PAGE.read_text()
    assert [feature.title for feature in FEATURES.values() if f"\n| {feature.title} |" not in text] == []


def test_page_is_made_from_the_table():
    assert PAGE.read_text() == page(read_verdicts()), "run `python -m tests.conformance.zoo.table --page`"
