"""CIFAR-10 with torchvision's ResNet-50: the program that most articles on distributed training begin with.

dure train examples/cifar10_resnet50.py:CIFAR10 --nproc 2 --precision bf16 --num-workers 4

Without a network, from a folder of images, in minutes on a CPU:

dure train examples/cifar10_resnet50.py:CIFAR10 --task.image-folder data/cifar10 \
    --task.pretrained false --task.image-size 32 --samples 4096
"""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer
from torch.utils.flop_counter import FlopCounterMode

import dure
import dure.data
from dure.errors import EnvironmentLacks
from dure.torchcompat.imports import import_torchvision

NUM_CLASSES = 10


class CIFAR10(dure.Task):
    """ResNet-50 (He et al. 2016), all of it or only its last layer, with Adam."""

    pretrained: bool = True
    """Begin with torchvision's ImageNet weights (98 MB, downloaded once)."""
    freeze_backbone: bool = False
    """Train only the last layer; the others, BatchNorm's statistics included, stay as they are."""
    image_size: int = 224
    """Pixels that the network sees: images are scaled on the device. The ImageNet weights were made for 224."""
    channels_last: bool = True
    """Keep the channels of a pixel together in memory, which convolutions on GPUs are fastest with."""
    learning_rate: float = 1e-3
    augment: bool = True
    """Shift and mirror training images."""
    data_dir: str = "data"
    """Folder of torchvision's CIFAR-10, which is downloaded into it."""
    download: bool = True
    """Get CIFAR-10 (170 MB) when it is not in `data_dir`."""
    image_folder: str = ""
    """Use this folder of images instead: train/<class>/*.jpg and test/<class>/*.jpg."""

    defaults = {"epochs": 10, "global_batch_size": 512, "best_metric": "loss"}  # noqa: RUF012 - a ClassVar in dure.Task

    def prepare_data(self) -> None:
        if not self.image_folder:
            dure.data.cifar10(self.data_dir, train=True, download=self.download)
        if self.pretrained:
            self._load_pretrained()

    def build_model(self) -> nn.Module:
        model = self._build_network()
        if self.pretrained:
            weights = self._load_pretrained()
            # the last layer has ImageNet's 1,000 classes: ours begins untrained
            ours = model.state_dict()
            model.load_state_dict(weights | {name: ours[name] for name in ("fc.weight", "fc.bias")})
        if self.freeze_backbone:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name.startswith("fc."))
        return model.to(memory_format=self._memory_format())

    def train_data(self) -> dure.data.TensorData | dure.data.ImageFolder:
        return self._data(train=True)

    def eval_data(self) -> dure.data.TensorData | dure.data.ImageFolder:
        return self._data(train=False)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=self.learning_rate)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(self._network_input(images)), labels)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, dure.Sum]:
        images, labels = batch
        hits = model(self._network_input(images)).argmax(1) == labels
        return {"accuracy": dure.Sum(hits.sum(), len(labels))}

    def describe(self, model: nn.Module) -> str:
        # a frozen BatchNorm keeps its weight and bias as buffers, so they are not among model.parameters()
        total = sum(t.numel() for name, t in model.state_dict().items() if name.endswith(("weight", "bias")))
        trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        flops = self._forward_flops()
        return (
            f"ResNet-50, {NUM_CLASSES} classes, {'ImageNet' if self.pretrained else 'random'} weights"
            f"{', backbone frozen' if self.freeze_backbone else ''}\n"
            f"parameters        {total:,}\n"
            f"trainable         {trainable:,}\n"
            f"FLOPs per sample  {flops / 1e9:.3g} G forward, at {self.image_size} x {self.image_size} pixels"
        )

    def _build_network(self) -> nn.Module:
        vision = import_torchvision()
        # frozen means BatchNorm too: the usual layer would go on adapting its statistics to the new data
        norm = vision.ops.FrozenBatchNorm2d if self.freeze_backbone else nn.BatchNorm2d
        network: nn.Module = vision.models.resnet50(num_classes=NUM_CLASSES, norm_layer=norm)
        return network

    def _load_pretrained(self) -> dict[str, Tensor]:
        weights = import_torchvision().models.ResNet50_Weights.IMAGENET1K_V2
        try:
            loaded: dict[str, Tensor] = weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as error:  # no connection; a file that is not what its name's hash says
            raise EnvironmentLacks(
                f"the ImageNet weights could not be downloaded from {weights.url} ({error}): put that file into "
                f"'{torch.hub.get_dir()}/checkpoints', or begin with random weights by --task.pretrained false"
            ) from error
        return loaded

    def _data(self, train: bool) -> dure.data.TensorData | dure.data.ImageFolder:
        if not self.image_folder:
            data = dure.data.cifar10(self.data_dir, train)
            size = data.tensors[0].shape[-1]
            data.transform = self._augmentation(size) if train else None
            return data
        folder = Path(self.image_folder, "train" if train else "test")
        native = min(dure.data.decode_image(dure.data.image_folder(folder).paths[0]).shape[:2])
        size = min(native, self.image_size)  # small images are scaled up on the device, not here
        return dure.data.image_folder(folder, self._augmentation(size) if train else None, size)

    def _augmentation(self, size: int) -> dure.data.BatchTransform | None:
        return dure.data.random_flip_and_crop(padding=size // 8) if self.augment else None

    def _network_input(self, images: Tensor) -> Tensor:
        """Scale and normalise bytes `(B, 3, h, w)` to floats `(B, 3, H, W)`, on the device that they are on."""
        mean, deviation = _imagenet_statistics(images.device)
        pixels = (images.float() - mean) / deviation
        if images.shape[-1] != self.image_size or images.shape[-2] != self.image_size:
            pixels = functional.interpolate(pixels, (self.image_size, self.image_size), mode="bilinear")
        return pixels.to(memory_format=self._memory_format())

    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def _forward_flops(self) -> int:
        """Count the network's FLOPs for one image, without computing anything."""
        with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
            self._build_network().eval()(torch.empty(1, 3, self.image_size, self.image_size))
        return counter.get_total_flops()


@lru_cache(maxsize=16)
def _imagenet_statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ImageNet's mean and standard deviation per channel, in bytes; copied to a device once, not every step."""
    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return tuple(255 * torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, deviation))
