"""Nothing is padded, nothing is left out."""

from hypothesis import given
from hypothesis import strategies as st

from dure.data.partition import shares


@given(n=st.integers(0, 10**6), parts=st.integers(1, 64))
def test_even_shares_add_up_and_differ_by_one_at_most(n, parts):
    counts = shares(n, parts)
    assert len(counts) == parts
    assert sum(counts) == n
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(
    n=st.integers(0, 10**5),
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=8).filter(lambda w: sum(w) > 0.1),
)
def test_shares_by_fractions_add_up_and_are_within_one_of_what_was_asked(n, weights):
    fractions = [weight / sum(weights) for weight in weights]
    counts = shares(n, len(fractions), fractions)
    assert sum(counts) == n
    assert all(abs(count - n * fraction) < 1 + 1e-6 for count, fraction in zip(counts, fractions, strict=True))


def test_a_fraction_of_nothing_gets_nothing():
    assert shares(7, 3, [0.0, 0.5, 0.5]) == [0, 4, 3]
    assert shares(7, 3, [1.0, 0.0, 0.0]) == [7, 0, 0]
