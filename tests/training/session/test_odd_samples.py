"""Samples of a batch that are unlike the others, as an error of collate names them."""

import numpy as np
import pytest
import torch

from dure.training.session.odd_samples import odd_samples

X = torch.zeros(6)
INDICES = [11, 20, 17, 3]


@pytest.mark.parametrize(
    ("odd", "usual", "text"),
    [
        ((X[:5], 1.0), (X, 1.0), "[0] is Tensor of shape (5,), where most others have Tensor of shape (6,)"),
        ((X, None), (X, 1.0), "[1] is NoneType, where most others have float"),
        ((X,), (X, 1.0), " is tuple of 1, where most others have tuple of 2"),
        ({"x": X[:2]}, {"x": X}, "['x'] is Tensor of shape (2,), where most others have Tensor of shape (6,)"),
        ({"y": X}, {"x": X}, "['y'] is Tensor of shape (6,), where most others have missing"),
        ([np.zeros(2)], [np.zeros(3)], "[0] is ndarray of shape (2,), where most others have ndarray of shape (3,)"),
    ],
)
def test_sample_that_is_unlike_the_others_is_named_by_its_index(odd, usual, text):
    assert odd_samples([usual, usual, odd, usual], INDICES) == f"sample 17{text}"


@pytest.mark.parametrize("samples", [[X, X, X, X], [X[:1], X[:2], X[:3], X[:4]], [X[:1], X[:1], X, X], [X]])
def test_no_sample_is_named_where_all_are_alike_or_all_differ(samples):
    assert odd_samples(samples, INDICES) is None
