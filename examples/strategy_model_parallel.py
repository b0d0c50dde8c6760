"""model_parallel: AlexNet on two devices of one process, as the first network that was too large for one card.

python examples/strategy_model_parallel.py [a folder with train/<class>/*.jpg and test/<class>/*.jpg]

Krizhevsky et al. (2012, section 3.5) put half of each layer's channels on each of two cards. Here a card has whole
layers: the convolutions, which do most of the work, and the classifier, which has most of the parameters.
"""

import json
import sys
from collections import OrderedDict
from pathlib import Path

from cifar10_resnet50 import CIFAR10
from torch import nn

import dure


class AlexNet(CIFAR10):
    pretrained: bool = False
    image_size: int = 32

    def build_model(self) -> nn.Module:
        features, before = [], 3
        for after, is_pooled in ((64, True), (192, True), (384, False), (256, False), (256, True)):
            features += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
            features += [nn.MaxPool2d(2)] if is_pooled else []
            before = after
        linear = [nn.Linear(256 * 4 * 4, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 1024), nn.ReLU()]
        classifier = nn.Sequential(nn.Flatten(), nn.Dropout(), *linear, nn.Linear(1024, 10))
        return nn.Sequential(OrderedDict(features=nn.Sequential(*features), classifier=classifier))

    def describe(self, model: nn.Module) -> str:
        return f"AlexNet for 32 x 32 pixels, {sum(p.numel() for p in model.parameters()):,} parameters"


if __name__ == "__main__":
    task = AlexNet(image_folder=sys.argv[1] if len(sys.argv) > 1 else "")
    settings = {"model_parallel": {"cuts": "classifier"}, "samples": 64, "global_batch_size": 16, "quiet": True}
    summary = dure.train(task, strategy="model_parallel", nproc=2, **settings)
    for device, part in enumerate(task.build_model()):
        print(f"device {device}: {sum(4 * p.numel() for p in part.parameters()):,} bytes of parameters")
    step = json.loads(Path(summary.run, "rank0.jsonl").read_text().splitlines()[0])
    print(f"in a step of 16 images {step['sent_bytes']:,} bytes go from card to card and back")
