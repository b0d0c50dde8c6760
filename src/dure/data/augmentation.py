"""Batch transforms whose draws depend on the samples."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dure.data.randomness import sample_uniform
from dure.errors import DataInvalid


@dataclass(frozen=True, kw_only=True)
class RandomFlipAndCrop:
    """Random shift and mirroring of each image in a batch, as usual for CIFAR-10 (He et al. 2016, section 4.2).

    The first column of the batch must be images `(B, C, H, W)` of any dtype; the others are passed through.
    """

    padding: int
    """Zero pixels added on each side before cropping to the original size, so the maximum shift."""
    flip: bool
    """True if images are mirrored left to right, each with probability 1/2."""

    def __call__(self, batch: tuple[Tensor, ...], indices: Sequence[int]) -> tuple[Tensor, ...]:
        images, *rest = batch
        if images.ndim != 4:
            raise DataInvalid(
                f"random_flip_and_crop got a first column of shape {tuple(images.shape)}: it needs images (B, C, H, W)"
            )
        num_images, num_channels, height, width = images.shape
        draws = sample_uniform(indices, 3)
        top, left = (draws[:, :2] * (2 * self.padding + 1)).long().unbind(1)
        columns = torch.arange(width).expand(num_images, width)
        if self.flip:
            columns = torch.where(draws[:, 2:] < 0.5, columns.flip(1), columns)
        rows = top[:, None] + torch.arange(height)  # (B, H)
        columns = left[:, None] + columns  # (B, W)
        padded = functional.pad(images, [self.padding] * 4)
        # one gather over flattened pixels is 4 to 5 times as fast as advanced indexing of rows and columns
        pixels = (rows[:, :, None] * padded.shape[3] + columns[:, None, :]).view(num_images, 1, -1)  # (B, 1, H * W)
        moved = padded.flatten(2).gather(2, pixels.expand(-1, num_channels, -1)).view(images.shape)
        return (moved, *rest)


def random_flip_and_crop(padding: int = 4, flip: bool = True) -> RandomFlipAndCrop:
    """Return a batch transform that shifts each image by up to `padding` pixels and mirrors half of them."""
    if padding < 0:
        raise DataInvalid(f"random_flip_and_crop got padding {padding}: it must be 0 or more")
    return RandomFlipAndCrop(padding=padding, flip=flip)
