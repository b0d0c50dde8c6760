"""Real and synthetic data sets, and random numbers that depend on the sample."""

from dure.data.augmentation import RandomFlipAndCrop, random_flip_and_crop
from dure.data.images import ImageFolder, decode_image, image_folder
from dure.data.known import cifar10, digits
from dure.data.randomness import sample_uniform
from dure.data.tensor_data import BatchTransform, TensorData, synthetic

__all__ = [
    "BatchTransform",
    "ImageFolder",
    "RandomFlipAndCrop",
    "TensorData",
    "cifar10",
    "decode_image",
    "digits",
    "image_folder",
    "random_flip_and_crop",
    "sample_uniform",
    "synthetic",
]
