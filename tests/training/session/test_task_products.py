"""Models that cannot be trained here are refused as they are built."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.training.session.task_products import built_model


def task_with(model):
    return SimpleNamespace(build_model=lambda: model)


def exported():
    return torch.export.export(nn.Linear(2, 1), (torch.zeros(3, 2),)).module()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: 3, "returned int: return a torch.nn.Module"),
        (lambda: nn.LazyLinear(2), "returned a model whose weight has no shape yet"),
        (lambda: nn.DataParallel(nn.Linear(2, 1)), "the model is wrapped in DataParallel"),
        (lambda: nn.ReLU(), "returned a model without trainable parameters"),
        (exported, "returned a model that has no modes for training and evaluation .*: return the module from which"),
    ],
)
def test_model_that_cannot_be_trained_is_refused(model, match):
    with pytest.raises(TaskInvalid, match=match):
        built_model(task_with(model()))
