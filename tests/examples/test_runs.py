"""Each example as a user runs it: on a small slice, over two processes."""

import pytest

import dure
from dure.data import TensorData
from examples.char_gpt import CharGPT
from examples.cifar10_resnet50 import CIFAR10
from examples.digits import Digits
from tests.cifar10_slice import unpack_slice


def test_digits_over_two_processes_reaches_97_percent(tmp_path):
    summary = dure.train(Digits(), nproc=2, epochs=8, runs_dir=tmp_path, quiet=True)
    assert summary.metrics["accuracy"].count == 355
    assert summary.metrics["accuracy"].value >= 0.97


@pytest.mark.slow
def test_char_gpt_over_two_processes_counts_every_character_of_the_held_out_topics(tmp_path):
    task = CharGPT(layers=1, width=32, context=64)
    held_out: TensorData = task.eval_data()
    summary = dure.train(task, nproc=2, samples=320, global_batch_size=16, runs_dir=tmp_path, quiet=True)
    assert summary.steps == 20
    assert summary.metrics["bits_per_character"].count == int((held_out.tensors[1] >= 0).sum())
    assert summary.metrics["bits_per_character"].value < 6


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cifar10_over_two_processes_trains_on_real_jpegs(tmp_path):
    folder = unpack_slice(tmp_path / "data", num_per_class=2)
    task = CIFAR10(pretrained=False, image_size=32, image_folder=str(folder))
    summary = dure.train(task, nproc=2, epochs=1, global_batch_size=8, runs_dir=tmp_path / "runs", quiet=True)
    assert summary.steps == 3  # 20 images an epoch, 8 a step, the short batch kept
    assert summary.metrics["accuracy"].count == 20
