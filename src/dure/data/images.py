"""Folder of images in which the name of a subfolder is the class."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dure.data.tensor_data import BatchTransform, TensorData, sample_of
from dure.errors import DataInvalid, EnvironmentLacks

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"})
"""Extensions of image files, in lower case; other files are skipped."""


class ImageFolder(Dataset[Any]):
    """Images under `root/<class>/`, decoded when they are fetched. See `image_folder`."""

    def __init__(self, root: str | Path, transform: BatchTransform | None = None, size: int | None = None) -> None:
        self.root = Path(root)
        self.transform = transform
        self.size = size
        self.classes = _class_names(self.root)
        """Names of the classes, sorted; a label is an index into it."""
        found = [(path, label) for label, name in enumerate(self.classes) for path in _images_in(self.root / name)]
        if not found:
            raise DataInvalid(
                f"'{root}' has {len(self.classes)} class folders but no image in them: "
                f"put files ending in {', '.join(sorted(SUFFIXES))} into {root}/<class>/"
            )
        self.paths = [path for path, _ in found]
        self.labels = torch.tensor([label for _, label in found])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Decode the images at `indices` into one batch."""
        batch = self._decode(indices)
        return batch if self.transform is None else self.transform(batch, indices)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return sample_of(self, index)

    def in_memory(self) -> TensorData:
        """Decode every image once and keep all in memory, for small images used for many epochs."""
        return TensorData(*self._decode(range(len(self))), transform=self.transform)

    def _decode(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Return images `(B, 3, H, W)` of uint8 and labels `(B,)`, untransformed."""
        rows = list(map(int, indices))
        pixels = [decode_image(self.paths[row], self.size) for row in rows]
        for row, image in zip(rows, pixels, strict=True):
            if image.shape != pixels[0].shape:
                raise DataInvalid(
                    f"'{self.paths[row]}' is {_extent(image)} pixels but '{self.paths[rows[0]]}' is "
                    f"{_extent(pixels[0])}: images of one batch must be equal in size, so give size="
                )
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
        return images, self.labels[rows]


def image_folder(root: str | Path, transform: BatchTransform | None = None, size: int | None = None) -> ImageFolder:
    """Return the images of a folder of class-named folders, such as `data/train` with `data/train/cat/0001.jpg`.

    Classes and files are sorted, so that an index refers to the same image on every machine. Pillow decodes the images
    when a batch is fetched; `num_workers` parallelises that, `in_memory()` does it once.

    Args:
        root: Folder with one folder per class.
        transform: Applied to every fetched batch.
        size: Length to which the shorter side is scaled before the central square is cropped; None if all images have
            one size.

    Returns:
        Data with images `(B, 3, H, W)`, uint8, and labels `(B,)`.

    Raises:
        DataInvalid: The folder is missing, or has no class folder or no image; on fetching, an image is damaged.
        EnvironmentLacks: Pillow is not installed.
    """
    return ImageFolder(root, transform, size)


def decode_image(path: Path, size: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an image file as RGB pixels `(H, W, 3)`.

    Raises:
        DataInvalid: The file is not an image or is truncated; the message names it.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise EnvironmentLacks("image files need Pillow, which is not installed: pip install pillow") from error
    try:
        with Image.open(path) as opened:
            image: Image.Image = opened.convert("RGB")
    # Pillow has no single class for a damaged file: its plugins raise these, including SyntaxError
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataInvalid(f"'{path}' cannot be read as an image ({error}): replace or remove it") from error
    if size is not None and image.size != (size, size):
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(image)


def _class_names(root: Path) -> list[str]:
    if not root.is_dir():
        raise DataInvalid(f"'{root}' is no folder: give one that holds a folder per class, such as {root}/cat/0001.jpg")
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise DataInvalid(f"'{root}' has no class folders: images belong into {root}/<class>/, one folder per class")
    return names


def _images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())


def _extent(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> str:
    return f"{pixels.shape[1]} x {pixels.shape[0]}"
