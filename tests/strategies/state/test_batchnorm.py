"""The plain synchronised BatchNorm beside torch's BatchNorm of the whole batch."""

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.state.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from tests.comm.gloo_ranks import on_ranks

COUNTS = [3, 1, 4]


def whole_batch(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, sum(COUNTS), 5, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return 3 * x + 7, weight


def run_layer(layer, x, weight):
    """Return outputs, the input's and parameters' gradients of a weighted sum, and the running statistics."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * weight).sum().backward()
    gradients = [p.grad for p in layer.parameters()]
    return y.detach(), x.grad, gradients, [layer.running_mean, layer.running_var]


def plain_layer(shape, dtype=torch.float64):
    torch.manual_seed(1)
    layer = (nn.BatchNorm2d if len(shape) == 2 else nn.BatchNorm1d)(5, dtype=dtype)
    with torch.no_grad():
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.uniform_(-1, 1)
    return layer


@pytest.mark.parametrize("shape", [(), (4,), (3, 2)], ids=["BC", "BCL", "BCHW"])
def test_sync_batchnorm_over_unequal_ranks_has_the_outputs_and_gradients_of_the_whole_batch(shape):
    x, weight = whole_batch(shape)

    def on_rank(group):
        start = sum(COUNTS[: group.rank])
        mine = slice(start, start + COUNTS[group.rank])
        layer = convert_sync_batchnorm(plain_layer(shape), torch.device("cpu"))
        return run_layer(layer, x[mine], weight[mine])

    y, x_gradient, gradients, statistics = run_layer(plain_layer(shape), x, weight)
    answers = on_ranks(3, on_rank)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([a[0] for a in answers]), y, **close)
    torch.testing.assert_close(torch.cat([a[1] for a in answers]), x_gradient, **close)
    torch.testing.assert_close([sum(a[2][i] for a in answers) for i in range(2)], gradients, **close)
    for answer in answers:
        torch.testing.assert_close(answer[3], statistics, **close)


def test_sync_batchnorm_of_bfloat16_keeps_its_statistics_in_float32():
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(1001, 5, generator=generator) + 2).bfloat16()
    plain = plain_layer((), torch.float32)
    expected = plain(x.float())

    def on_rank(group):
        layer = convert_sync_batchnorm(plain_layer((), torch.float32), torch.device("cpu"))
        return layer(x[:500] if group.rank == 0 else x[500:]).detach(), layer.running_mean

    answers = on_ranks(2, on_rank)
    y = torch.cat([answer[0] for answer in answers])
    assert y.dtype == torch.bfloat16
    # bfloat16 keeps eight bits of the result
    torch.testing.assert_close(y.float(), expected.detach(), rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(answers[0][1], plain.running_mean, rtol=1e-5, atol=1e-5)


def test_conversion_keeps_names_parameters_buffers_and_mode():
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(5, affine=False))).eval()
    before = dict([*model.named_parameters(), *model.named_buffers()])
    converted = convert_sync_batchnorm(model, torch.device("cpu"))
    after = dict([*converted.named_parameters(), *converted.named_buffers()])
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert sum(isinstance(m, SyncBatchNorm) and not m.training for m in converted.modules()) == 2


def test_conversion_keeps_marks_on_layers():
    layer = nn.BatchNorm1d(3)
    layer._is_hf_initialized = True  # as transformers sets it on every layer
    assert convert_sync_batchnorm(nn.Sequential(layer), torch.device("cpu"))[0]._is_hf_initialized


def test_conversion_of_a_layer_in_several_places_replaces_it_in_all():
    layer = nn.BatchNorm1d(3)
    model = convert_sync_batchnorm(nn.Sequential(layer, nn.Sequential(layer), layer), torch.device("cpu"))
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[1][0] is model[2]


def test_conversion_of_a_model_that_is_a_batchnorm_itself():
    assert isinstance(convert_sync_batchnorm(nn.BatchNorm2d(3), torch.device("cpu")), SyncBatchNorm)


def test_sync_batchnorm_in_evaluation_uses_the_running_statistics_without_talking():
    layer = convert_sync_batchnorm(plain_layer((3, 2)), torch.device("cpu")).eval()
    x, _ = whole_batch((3, 2))
    torch.testing.assert_close(layer(x), plain_layer((3, 2)).eval()(x))


def test_sync_batchnorm_of_a_vector_is_refused():
    with pytest.raises(ValueError, match=r"needs \(B, C, \.\.\.\), got \(3,\)"):
        SyncBatchNorm(3)(torch.zeros(3))


class NormAndActivation(nn.BatchNorm1d):
    """Does more than its base, as timm's layers do."""

    def forward(self, x):
        return super().forward(x).relu()


def hooked():
    layer = nn.BatchNorm1d(3)
    layer.register_forward_hook(lambda module, given, output: None)
    return layer


def fixed():
    layer = nn.BatchNorm1d(3)
    layer.train = lambda mode=True: layer
    return layer


@pytest.mark.parametrize("make", [lambda: NormAndActivation(3), hooked, fixed], ids=["subclass", "hook", "attribute"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_conversion_when_a_layer_does_more_than_batchnorm_is_refused(make, device):
    with pytest.raises(TaskInvalid, match=r"--sync-batchnorm replaces BatchNorm layers, and 1 \("):
        convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), make()), torch.device(device))


def test_conversion_when_layers_are_torchs_own_then_none_is_refused():
    layers = [nn.BatchNorm1d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False), nn.SyncBatchNorm(3)]
    convert_sync_batchnorm(nn.Sequential(*layers, nn.BatchNorm3d(3)), torch.device("cpu"))
