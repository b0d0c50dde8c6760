import pytest
import torch
from torch.nn import functional

from dure.data import random_flip_and_crop, sample_uniform, synthetic
from dure.data.randomness import at_epoch
from dure.errors import DataInvalid

IMAGES = (torch.rand(40, 3, 9, 7, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8) | 1  # never 0
LABELS = torch.arange(40)


def moved_by_hand(image, draws, padding):
    """The plain version: one image, one slice."""
    top, left = (int(draw * (2 * padding + 1)) for draw in draws[:2])
    window = functional.pad(image, [padding] * 4)[:, top : top + image.shape[1], left : left + image.shape[2]]
    return window.flip(2) if draws[2] < 0.5 else window


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_flip_and_crop_of_a_batch_equals_slicing_image_by_image(dtype):
    images = IMAGES.to(dtype)
    with at_epoch(3, 1):
        moved, labels = random_flip_and_crop(padding=2)((images, LABELS), range(40))
        draws = sample_uniform(range(40), 3)
    expected = torch.stack([moved_by_hand(*pair, padding=2) for pair in zip(images, draws, strict=True)])
    assert moved.dtype == dtype
    assert torch.equal(moved, expected)
    assert labels is LABELS


def test_flip_and_crop_of_a_sample_is_the_same_in_every_batch():
    data = synthetic(40, (3, 8, 8), transform=random_flip_and_crop())
    with at_epoch(7, 2):
        whole, _ = data.__getitems__(range(40))
        parts = torch.cat([data.__getitems__(part)[0] for part in ([*range(13)], [13], [*range(14, 40)])])
        backwards, _ = data.__getitems__(range(39, -1, -1))
        single = data[5][0]
    assert torch.equal(whole, parts)
    assert torch.equal(whole, backwards.flip(0))
    assert torch.equal(whole[5], single)


@pytest.mark.parametrize("other", [(7, 3), (8, 2)])
def test_flip_and_crop_in_another_epoch_or_under_another_seed_differs(other):
    transform = random_flip_and_crop()
    with at_epoch(7, 2):
        before, _ = transform((IMAGES, LABELS), range(40))
    with at_epoch(*other):
        after, _ = transform((IMAGES, LABELS), range(40))
    assert not torch.equal(before, after)


def test_flip_and_crop_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    random_flip_and_crop()((IMAGES, LABELS), range(40))
    assert torch.equal(torch.get_rng_state(), state)


def test_flip_and_crop_draws_every_shift_and_flips_half():
    num_images = 4000
    marker = torch.zeros(num_images, 1, 5, 5)
    marker[:, 0, 2, 1] = 1
    (moved,) = random_flip_and_crop(padding=1)((marker,), range(num_images))
    counts = moved.sum(0)[0]
    assert set(counts.nonzero()[:, 0].tolist()) == {1, 2, 3}
    left, right = counts[:, :2].sum(), counts[:, 3:].sum()  # the marker stands left of the middle unless flipped
    assert 0.45 < left / (left + right) < 0.55  # 2,700 fair coins: 5 standard deviations are 0.048


def test_flip_and_crop_that_does_neither_changes_nothing():
    moved, _ = random_flip_and_crop(padding=0, flip=False)((IMAGES, LABELS), range(40))
    assert torch.equal(moved, IMAGES)


def test_flip_and_crop_of_something_that_is_no_image_says_its_shape():
    with pytest.raises(DataInvalid, match=r"shape \(4, 2\): it needs images \(B, C, H, W\)"):
        random_flip_and_crop()((torch.zeros(4, 2),), range(4))


def test_flip_and_crop_with_negative_padding_is_refused():
    with pytest.raises(DataInvalid, match="padding -1: it must be 0 or more"):
        random_flip_and_crop(padding=-1)
