import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dure.data import TensorData, synthetic
from dure.errors import DataInvalid


def add_index(batch, indices):
    values, *rest = batch
    return (values + torch.as_tensor(indices)[:, None] * 100, *rest)


@pytest.fixture
def data():
    return TensorData(torch.arange(12.0).reshape(6, 2), torch.arange(6))


def test_tensor_data_fetched_by_batch_returns_rows_in_the_order_asked(data):
    values, labels = data.__getitems__([4, 0, 4])
    assert values.tolist() == [[8, 9], [0, 1], [8, 9]]
    assert labels.tolist() == [4, 0, 4]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_tensor_data_takes_indices_of_any_kind(data, kind):
    assert data.__getitems__(kind([5, 2]))[1].tolist() == [5, 2]


def test_tensor_data_fetched_beyond_its_end_raises(data):
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        data.__getitems__([6])


def test_tensor_data_fetched_singly_returns_the_same_as_by_batch(data):
    data.transform = add_index
    values, labels = data.__getitems__(range(6))
    assert all(torch.equal(data[i][0], values[i]) and data[i][1] == labels[i] for i in range(6))
    assert torch.equal(data[-1][0], values[5])


def test_tensor_data_beyond_its_end_raises_so_that_iteration_stops(data):
    with pytest.raises(IndexError, match="index 6 of 6 samples"):
        data[6]
    assert len(list(data)) == 6


def test_tensor_data_transform_sees_the_data_indices(data):
    data.transform = add_index
    assert data.__getitems__([3])[0].tolist() == [[306, 307]]


def test_tensor_data_under_torchs_loader_gives_the_batch_itself(data):
    loader = DataLoader(data, batch_size=4, collate_fn=lambda batch: batch)
    assert [tuple(values.shape) for values, _ in loader] == [(4, 2), (2, 2)]


def test_tensor_data_with_unequal_columns_names_the_lengths():
    with pytest.raises(DataInvalid, match="5, 4 samples: each needs one row per sample"):
        TensorData(torch.zeros(5), torch.zeros(4))


@pytest.mark.parametrize("columns", [(), (torch.tensor(1.0),)])
def test_tensor_data_without_a_sample_dimension_is_refused(columns):
    with pytest.raises(DataInvalid, match="no tensor with a sample dimension"):
        TensorData(*columns)


def test_tensor_data_pickled_for_a_loader_process_is_the_same(data):
    data.transform = add_index
    assert torch.equal(pickle.loads(pickle.dumps(data))[2][0], data[2][0])


def test_synthetic_made_twice_is_the_same_and_has_the_shape_asked():
    once, again = (synthetic(20, (3, 4), num_classes=3, seed=5)[19] for _ in range(2))
    assert once[0].shape == (3, 4)
    assert once[0].dtype == torch.float32
    assert torch.equal(once[0], again[0])
    assert sorted({int(label) for _, label in synthetic(20, (1,), num_classes=3)}) == [0, 1, 2]


def test_synthetic_of_another_seed_differs():
    assert not torch.equal(synthetic(2, (3,), seed=0)[0][0], synthetic(2, (3,), seed=1)[0][0])


def test_synthetic_classes_can_be_told_apart():
    images, labels = synthetic(400, (64,), num_classes=4).tensors
    centres = torch.stack([images[:200][labels[:200] == c].mean(0) for c in range(4)])
    nearest = torch.cdist(images[200:], centres).argmin(1)
    assert (nearest == labels[200:]).float().mean() > 0.95


def test_synthetic_of_nothing_is_refused():
    with pytest.raises(DataInvalid, match="0 samples in 10 classes"):
        synthetic(0, (3,))
