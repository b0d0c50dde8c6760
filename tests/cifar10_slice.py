"""A few real CIFAR-10 images as JPEG files, where the archive is at hand."""

import tarfile
from collections import Counter
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[2] / "shared" / "data" / "cifar10-jpeg.tar.xz"


def unpack_slice(folder: Path, num_per_class: int) -> Path:
    """Unpack the first images of each class of both splits into `folder/{train,test}/<class>/`, and return it.

    Skips the test where the archive is missing.
    """
    if not ARCHIVE.exists():
        pytest.skip(f"{ARCHIVE} is not on this machine")
    taken = Counter()
    with tarfile.open(ARCHIVE, "r:xz") as archive:
        for member in archive:
            split_and_class = member.name.rpartition("/")[0]
            if member.isfile() and taken[split_and_class] < num_per_class:
                taken[split_and_class] += 1
                archive.extract(member, folder, filter="data")
    return folder
