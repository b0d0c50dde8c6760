"""Well-known data sets, as `TensorData`."""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dure.data.tensor_data import BatchTransform, TensorData
from dure.errors import DataInvalid, EnvironmentLacks
from dure.torchcompat.imports import import_torchvision

TEST_EVERY = 5
"""Interval of test samples among the digits of each class."""


def digits(train: bool, transform: BatchTransform | None = None) -> TensorData:
    """Return scikit-learn's 1,797 real handwritten digits: 8 x 8 pixels, ten classes, offline.

    The split is fixed and stratified: every fifth sample of each class is for testing.

    Args:
        train: Whether to return the 1,442 training samples; otherwise the 355 test samples.
        transform: Applied to every fetched batch.

    Returns:
        Images `(N, 1, 8, 8)`, float32 in [0, 1], and labels `(N,)`.

    Raises:
        EnvironmentLacks: scikit-learn is not installed.
    """
    images, labels = _all_digits()
    chosen = torch.empty(len(labels), dtype=torch.bool)
    for label in range(10):
        members = (labels == label).nonzero().flatten()
        chosen[members] = (torch.arange(len(members)) % TEST_EVERY != TEST_EVERY - 1) == train
    return TensorData(images[chosen], labels[chosen], transform=transform)


@cache
def _all_digits() -> tuple[Tensor, Tensor]:
    table = torch.from_numpy(_digits_table())
    return (table[:, :64] / 16).to(torch.float32).reshape(-1, 1, 8, 8), table[:, 64].long()


def _digits_table() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return scikit-learn's table `(1797, 65)`: 64 pixels of 0 to 16 and the label."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.submodule_search_locations is None:
        raise EnvironmentLacks(
            "the digits data comes with scikit-learn, which is not installed: pip install scikit-learn"
        )
    # importing scikit-learn takes about a second on every rank, reading its file 0.03 s
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def cifar10(
    root: str | Path, train: bool, download: bool = False, transform: BatchTransform | None = None
) -> TensorData:
    """Return CIFAR-10 (Krizhevsky 2009) through torchvision, which verifies the files by their known MD5.

    Args:
        root: Folder of torchvision's `cifar-10-batches-py`, existing or to be downloaded.
        train: Whether to return the 50,000 training images; otherwise the 10,000 test images.
        download: Whether to download the 170 MB if they are missing.
        transform: Applied to every fetched batch.

    Returns:
        Images `(N, 3, 32, 32)`, uint8, and labels `(N,)`.

    Raises:
        DataInvalid: The data are not in `root`, or could not be downloaded.
        EnvironmentLacks: torchvision is not installed.
    """
    source = import_torchvision().datasets.CIFAR10
    command = f"python -c \"import dure.data; dure.data.cifar10('{root}', train=True, download=True)\""
    try:
        loaded = source(root=str(root), train=train, download=download)
    except (OSError, RuntimeError) as error:  # errors of urllib are OSErrors; those of torchvision are RuntimeErrors
        if not download:
            raise DataInvalid(f"CIFAR-10 is not in '{root}', or is damaged there: get it with {command}") from error
        raise DataInvalid(
            f"CIFAR-10 could not be downloaded from {source.url} ({error}): "
            f"put {source.filename} from there into '{root}' by hand, or try again with {command}"
        ) from error
    images = torch.from_numpy(loaded.data).permute(0, 3, 1, 2).contiguous()
    return TensorData(images, torch.tensor(loaded.targets), transform=transform)
