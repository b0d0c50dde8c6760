"""Random numbers of ranks, and those of one process that is given their samples."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from dure.scripts.prove import draws
from dure.scripts.prove.draws import Draws

NUM_RANKS, BATCH = 2, 3


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Draws]:
    for names, owner in ((("rand", "randn", "randint", "randperm", *draws._LIKE), torch), (draws._IN_PLACE, Tensor)):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    monkeypatch.setattr(np.random, "permutation", np.random.permutation)
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=()):
        found = Draws()
        found.install()
        yield found
    random.setstate(states[0])
    np.random.set_state(states[1])


def drawn(drawing: Draws, size: int, ranks: list[int], draw: Callable[[int], Tensor]) -> Tensor:
    drawing.begin_batch(size, ranks, "0 4")
    return draw(size)


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: torch.rand(n),
        lambda n: torch.randn(n, 5),
        lambda n: torch.randn((n, 5), dtype=torch.float64),
        lambda n: torch.randint(0, 1000, (n,)),
        lambda n: torch.rand_like(torch.zeros(n, 2)),
        lambda n: torch.bernoulli(torch.full((n, 9), 0.5)),
        lambda n: torch.empty(n, 4).normal_(2.0, 0.1),
    ],
)
def test_draw_when_it_is_one_for_the_samples_then_one_process_draws_those_of_the_ranks(drawing, draw) -> None:
    parts = [drawn(drawing, BATCH, [rank], draw) for rank in range(NUM_RANKS)]
    assert not torch.equal(*parts)
    assert torch.equal(torch.cat(parts), drawn(drawing, NUM_RANKS * BATCH, [0, 1], draw))


@pytest.mark.parametrize("draw", [lambda n: torch.randperm(n), lambda n: torch.from_numpy(np.random.permutation(n))])
def test_permutation_when_it_is_of_the_samples_then_it_stays_within_those_of_each_rank(drawing, draw) -> None:
    parts = [drawn(drawing, BATCH, [rank], draw) for rank in range(NUM_RANKS)]
    assert torch.equal(torch.cat([parts[0], parts[1] + BATCH]), drawn(drawing, NUM_RANKS * BATCH, [0, 1], draw))


def test_draw_when_it_is_of_another_size_then_it_is_the_same_everywhere_and_seen_in_the_state(drawing: Draws) -> None:
    def number(size: int) -> Tensor:
        return torch.tensor([random.random(), np.random.beta(0.4, 0.4), torch.rand(1).item(), *torch.randn(5)])

    parts, states = [], []
    for size, ranks in ((BATCH, [0]), (BATCH, [1]), (NUM_RANKS * BATCH, [0, 1])):
        parts.append(drawn(drawing, size, ranks, number))
        states.append(drawing.end_batch())
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[0], parts[2])
    assert len({*states}) == 1
    drawn(drawing, BATCH, [0], lambda size: torch.rand(2 * size + 1))
    assert drawing.end_batch() != states[0]


def test_draw_when_it_has_a_generator_of_its_own_then_it_is_as_ever(drawing: Draws) -> None:
    own = torch.Generator().manual_seed(5)
    found = drawn(drawing, BATCH, [1], lambda size: torch.rand(size, generator=own))
    assert torch.equal(found, torch.rand(BATCH, generator=own.manual_seed(5)))
