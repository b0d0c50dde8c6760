import pytest
import torch

from dure.data.randomness import at_epoch
from dure.training.session.sample_order import SampleOrder
from examples.digits import Digits


def trained_accuracy(task, epochs, batch_size=64):
    """Train by a plain loop over dure's sample order, and return accuracy on the held-out digits."""
    torch.manual_seed(0)
    model, data, held_out = task.build_model(), task.train_data(), task.eval_data()
    optimizer, total = task.build_optimizer(model), epochs * len(data)
    schedule, rate = task.build_schedule(optimizer, total), task.learning_rate
    for batch in SampleOrder(len(data), batch_size, seed=0).batches(0, total):
        optimizer.param_groups[0]["lr"] = rate * schedule(batch.samples_seen)
        with at_epoch(0, batch.epoch):
            samples = data.__getitems__(batch.indices)
        optimizer.zero_grad()
        task.loss(model, samples).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = task.metrics(model, held_out.__getitems__(range(len(held_out))))["accuracy"]
    assert accuracy.count == len(held_out)
    return int(accuracy.total) / accuracy.count


@pytest.mark.slow
def test_digits_augmented_and_trained_as_long_as_its_defaults_say_reaches_97_percent():
    assert trained_accuracy(Digits(augment=True), Digits.defaults["epochs"]) >= 0.97


def test_digits_augmented_fetches_other_pixels_but_the_same_labels():
    plain, augmented = Digits().train_data(), Digits(augment=True).train_data()
    before, after = plain.__getitems__(range(20)), augmented.__getitems__(range(20))
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert Digits(augment=True).eval_data().transform is None


def test_digits_schedule_begins_above_zero_and_ends_at_zero():
    schedule = Digits().build_schedule(None, 1000)
    assert 0 < schedule(0) < 0.1
    assert max(map(schedule, range(1000))) > 0.9
    assert schedule(1000) == pytest.approx(0, abs=1e-12)


def test_digits_model_knows_nothing_of_dure():
    assert all(type(module).__module__.startswith("torch.") for module in Digits(width=4).build_model().modules())
