from urllib.error import URLError

import pytest
import torch
from torch import nn

from dure.data.randomness import at_epoch
from dure.errors import DataInvalid, EnvironmentLacks
from dure.torchcompat.imports import import_torchvision
from examples.cifar10_resnet50 import CIFAR10
from tests.cifar10_slice import unpack_slice

RESNET50_PARAMETERS = 23_508_032  # without the last layer; He et al. 2016 as torchvision builds it
LAST_LAYER = 2048 * 10 + 10


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return str(unpack_slice(tmp_path_factory.mktemp("cifar10"), num_per_class=4))


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (8, 3, 32, 32), generator=generator).to(torch.uint8)
    return pixels, torch.arange(8)


def small(**options):
    return CIFAR10(**{"pretrained": False, "image_size": 32} | options)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty download cache, and no way out."""

    def refuse(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr("torch.hub.urlopen", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path / "hub" / "checkpoints"


@pytest.mark.slow
def test_cifar10_on_real_jpegs_lowers_its_loss(images):
    torch.manual_seed(0)
    task = small(image_folder=images, learning_rate=1e-3, augment=False)
    model, data = task.build_model().train(), task.train_data()
    optimizer, samples = task.build_optimizer(model), data.__getitems__(range(0, 40, 2))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = task.loss(model, samples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_cifar10_from_a_folder_takes_both_splits_and_augments_training_only(images):
    task = small(image_folder=images)
    train, test = task.train_data(), task.eval_data()
    assert len(train) == len(test) == 40
    assert train.size == 32  # not blown up in the loader
    assert test.transform is None
    with at_epoch(0, 0):
        first = train.__getitems__([1])[0]
    with at_epoch(0, 1):
        assert not torch.equal(first, train.__getitems__([1])[0])


def test_cifar10_metrics_count_hits_among_samples(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.copy_(torch.eye(10)[3])
    accuracy = small().metrics(model, batch)["accuracy"]
    assert (int(accuracy.total), accuracy.count) == (1, 8)


@pytest.mark.parametrize("channels_last", [False, True])
def test_cifar10_input_is_normalised_and_scaled_in_the_memory_format_asked(batch, channels_last):
    seen = small(image_size=64, channels_last=channels_last)._network_input(batch[0])
    by_hand = import_torchvision().transforms.functional.normalize(
        batch[0].float() / 255, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    )
    assert seen.shape == (8, 3, 64, 64)
    assert seen.is_contiguous(memory_format=torch.channels_last) == channels_last
    # averaging 2 x 2 undoes bilinear doubling up to smoothing: the means agree
    torch.testing.assert_close(seen.mean((2, 3)), by_hand.mean((2, 3)), atol=0.02, rtol=0)


def test_cifar10_at_its_own_size_is_only_normalised(batch):
    white = torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)
    expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(small()._network_input(white)[0, :, 5, 5], expected)


def test_cifar10_whole_network_trains_every_parameter():
    model = small().build_model()
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == RESNET50_PARAMETERS + LAST_LAYER
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_cifar10_with_frozen_backbone_changes_only_the_last_layer(batch):
    task = small(freeze_backbone=True)
    model = task.build_model().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = task.build_optimizer(model)
    task.loss(model, batch).backward()
    optimizer.step()
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"fc.weight", "fc.bias"}


def test_cifar10_summary_says_parameters_trainable_and_flops():
    task = CIFAR10(pretrained=False, freeze_backbone=True)
    summary = task.describe(task.build_model())
    assert f"{RESNET50_PARAMETERS + LAST_LAYER:,}" in summary
    assert f"trainable         {LAST_LAYER:,}\n" in summary
    assert "8.17 G forward, at 224 x 224" in summary  # 4.09 G multiply-adds, two FLOPs each, in the literature


def test_cifar10_pretrained_without_a_network_says_the_flag(hub):
    task = CIFAR10(image_folder="somewhere")
    with pytest.raises(
        EnvironmentLacks, match=r"no network.*put that file into .*checkpoints'.*--task.pretrained false"
    ):
        task.prepare_data()


@pytest.mark.parametrize("freeze_backbone", [False, True])
def test_cifar10_pretrained_takes_all_layers_but_the_last_from_the_file(hub, freeze_backbone):
    models = import_torchvision().models
    torch.manual_seed(1)
    given = models.resnet50()
    given.bn1.running_mean.fill_(0.25)
    hub.mkdir(parents=True)
    torch.save(given.state_dict(), hub / models.ResNet50_Weights.IMAGENET1K_V2.url.rpartition("/")[2])
    ours = small(pretrained=True, freeze_backbone=freeze_backbone).build_model()
    taken = given.state_dict()
    equal = {name for name, tensor in ours.state_dict().items() if torch.equal(tensor, taken[name])}
    assert set(ours.state_dict()) - equal == {"fc.weight", "fc.bias"}
    assert ours.fc.weight.shape == (10, 2048)


def test_cifar10_of_a_frozen_backbone_exports_weights_that_torchvisions_network_takes():
    network = import_torchvision().models.resnet50(num_classes=10)
    trained = small(freeze_backbone=True).build_model().state_dict()
    assert network.load_state_dict(dict(trained), strict=True)


def test_cifar10_without_its_data_says_the_command(tmp_path):
    with pytest.raises(DataInvalid, match=r"CIFAR-10 is not in .*get it with python -c"):
        small(data_dir=str(tmp_path), download=False).prepare_data()


def test_cifar10_from_a_folder_without_a_split_says_what_is_missing(tmp_path):
    with pytest.raises(DataInvalid, match="train' is no folder"):
        small(image_folder=str(tmp_path)).train_data()
