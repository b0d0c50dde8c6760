import pytest
from torch import nn

from dure.strategies.state.module_patterns import matching, shortened


def model() -> nn.Module:
    block = [nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)}) for _ in range(2)]
    return nn.ModuleDict({"blocks": nn.ModuleList(block), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("blocks.*", ["blocks.0", "blocks.1"]),
        ("blocks.*.up", ["blocks.0.up", "blocks.1.up"]),
        (" blocks.1.* ", ["blocks.1.up", "blocks.1.down"]),
        ("h?ad", ["head"]),
        ("*", ["blocks", "head"]),
        ("", []),
        ("*.up", []),
    ],
)
def test_pattern_when_it_has_a_star_then_that_stands_for_a_part_between_dots(pattern, names):
    assert [name for name, _ in matching(model(), pattern)] == names


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a.0.up", "a.0.down", "a.1.up", "a.1.down", "head"], "a.0-1.up, a.0-1.down, head"),
        (["0", "2", "3"], "0+2-3"),
        (["one"], "one"),
        ([], ""),
    ],
)
def test_names_when_shown_then_numbers_are_drawn_together(names, shown):
    assert shortened(names) == shown
