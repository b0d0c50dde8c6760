"""`apex.parallel`: its names and options, held to plain computations."""

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from dure.comm.groups import ProcessGroup
from dure.compat.apex.parallel import (
    LARC,
    DistributedDataParallel,
    Reducer,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)
from dure.errors import TaskInvalid
from tests.comm.gloo_ranks import on_ranks


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1)).double()


def rows(rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def mean_gradients(num_ranks: int) -> list[Tensor]:
    model = model_of(0)
    sum(model(rows(rank)).square().mean() for rank in range(num_ranks)).backward()  # type: ignore[union-attr]
    return [parameter.grad / num_ranks for parameter in model.parameters()]  # type: ignore[operator]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"message_size": 4, "retain_allreduce_buffers": True},
        {"delay_allreduce": True, "allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0, "num_allreduce_streams": 2},
        {"triggers": True},
    ],
)
def test_gradients_when_backward_has_ended_then_are_means_under_every_option(options: dict[str, Any]) -> None:
    def work(group: ProcessGroup) -> tuple[list[Tensor], int, int]:
        model, given = model_of(group.rank), dict(options)
        if given.pop("triggers", False):
            given["allreduce_trigger_params"] = [model[3].weight, model[2].weight]
        wrapped = DistributedDataParallel(model, **given)
        wrapped(rows(group.rank)).square().mean().backward()
        wrapped.close()
        retained = sum(buffer.numel() for buffer in wrapped.allreduce_buffers)
        return [p.grad for p in model.parameters()], len(wrapped.gradients.buckets), retained

    for found in on_ranks(2, work):
        assert not isinstance(found, Exception), found
        gradients, num_buckets, retained = found
        for one, other in zip(gradients, mean_gradients(2), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
        assert num_buckets == (4 if options.get("message_size") else 3 if options.get("triggers") else 1)
        assert (retained > 0) == ("retain_allreduce_buffers" in options)


def test_gradients_when_reduction_is_disabled_then_are_those_of_each_rank() -> None:
    def work(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        wrapped = DistributedDataParallel(model_of(0))
        wrapped.disable_allreduce()
        wrapped(rows(group.rank)).sum().backward()
        own = wrapped.module[3].bias.grad.clone() * (group.rank + 1)
        wrapped.zero_grad()
        wrapped.enable_allreduce()
        (wrapped(rows(group.rank)).sum() * (group.rank + 1)).backward()
        wrapped.close()
        return own, wrapped.module[3].bias.grad

    (one, mean), (other, same) = on_ranks(2, work)
    assert (float(one), float(other), float(mean), float(same)) == (6.0, 12.0, 9.0, 9.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shared_param": True}, "shared_param is no longer an option"),
        ({"delay_allreduce": True, "num_allreduce_streams": 2}, "needs delay_allreduce=False"),
        ({"delay_allreduce": True, "allreduce_trigger_params": []}, "needs delay_allreduce=False"),
        ({"allreduce_communicators": ([1, 2], [1, 2])}, "one group for each"),
    ],
)
def test_options_when_they_exclude_each_other_then_raise_value_errors(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DistributedDataParallel(nn.Linear(1, 1), **options)


def test_reducer_when_it_reduces_then_gradients_and_given_tensors_are_means() -> None:
    def work(group: ProcessGroup) -> tuple[list[Tensor], Tensor, Tensor]:
        model = model_of(group.rank)
        reducer = Reducer(model)
        model(rows(group.rank)).square().mean().backward()
        reducer.reduce()
        tensors = [torch.full((2,), float(group.rank)), {0: 1}, (torch.full((1,), 2.0 * group.rank).double(),)]
        Reducer(tensors).reduce()
        return [p.grad for p in model.parameters()], tensors[0], tensors[2][0]  # type: ignore[index, return-value]

    for found in on_ranks(3, work):
        assert not isinstance(found, Exception), found
        gradients, first, second = found
        for one, other in zip(gradients, mean_gradients(3), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
        assert (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0])


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1, weight_decay=0.01), lambda p: AdamW(p, lr=0.1)])
@pytest.mark.parametrize("clip", [True, False])
def test_larc_when_it_steps_then_gradients_are_scaled_as_in_the_paper(make: Any, clip: bool) -> None:
    weight, other = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([3.0, 4.0]))
    without = nn.Parameter(torch.zeros(1))
    optimizer = LARC(make([weight, without]), trust_coefficient=0.01, clip=clip, eps=0.0)
    weight.grad, gradient = torch.tensor([0.6, 0.8]), torch.tensor([0.6, 0.8])
    plain = make([other])
    decay = plain.param_groups[0]["weight_decay"]
    rate = 0.01 * 5.0 / (1.0 + decay * 5.0)
    other.grad = (gradient + decay * other.detach()) * (min(rate / 0.1, 1.0) if clip else rate)
    plain.param_groups[0]["weight_decay"] = 0.0
    plain.step()
    optimizer.step()
    torch.testing.assert_close(weight, other)
    assert optimizer.param_groups[0]["weight_decay"] == decay
    optimizer.zero_grad()
    assert weight.grad is None
    assert pickle.loads(pickle.dumps(optimizer)).clip is clip


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.instance = nn.BatchNorm2d(3), nn.InstanceNorm2d(3)


def test_batchnorm_when_converted_then_uses_the_samples_of_its_group_and_keeps_its_tensors() -> None:
    def work(group: ProcessGroup) -> list[float]:
        own = create_syncbn_process_group(2)
        model = Relu()
        model.norm.weight.data.fill_(2.0)
        weight = model.norm.weight
        converted = convert_syncbn_model(model, own)
        assert isinstance(converted.norm, SyncBatchNorm)
        assert converted.norm.weight is weight
        assert type(converted.instance) is nn.InstanceNorm2d
        converted.norm(torch.full((1, 3, 2, 2), float(group.rank)))
        return converted.norm.running_mean.tolist()

    means = on_ranks(4, work)
    assert [round(each[0], 6) for each in means] == [0.05, 0.05, 0.25, 0.25]


def test_batchnorm_when_channels_are_last_and_a_relu_follows_then_equals_the_plain_layers() -> None:
    def work(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        z = torch.ones_like(x)
        layer = SyncBatchNorm(3, channel_last=True, fuse_relu=True).double()
        part = x.chunk(2)[group.rank]
        out = layer(part, z[: len(part)])
        plain = nn.BatchNorm1d(3).double()
        expected = (plain(x.movedim(-1, 1)).movedim(1, -1) + z).relu().chunk(2)[group.rank]
        return out.detach(), expected.detach()

    for found in on_ranks(2, work):
        assert not isinstance(found, Exception), found
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [3, 4, -1])
def test_groups_when_the_ranks_cannot_be_divided_then_raise_a_value_error(size: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=f"2 ranks cannot be divided into groups of {size}"):
        create_syncbn_process_group(size)
    assert create_syncbn_process_group(0) is None


def test_batchnorm_when_used_in_two_places_then_is_converted_in_both() -> None:
    layer = nn.BatchNorm1d(3)
    model = convert_syncbn_model(nn.Sequential(layer, nn.ReLU(), layer))
    assert isinstance(model[2], SyncBatchNorm)
    assert model[0] is model[2]


class Activated(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def test_batchnorm_when_it_does_more_then_is_not_converted() -> None:
    with pytest.raises(TaskInvalid, match="would lose what 0"):
        convert_syncbn_model(nn.Sequential(Activated(3)))


def test_batchnorm_when_there_are_no_ranks_then_is_a_plain_layer() -> None:
    x = rows(0)
    torch.testing.assert_close(SyncBatchNorm(4).double()(x), nn.BatchNorm1d(4).double()(x))


def test_reducer_when_ranks_have_other_gradients_then_the_missing_count_as_zero() -> None:
    def work(group: ProcessGroup) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(3)])
        reducer = Reducer(model)
        model[group.rank](torch.ones(1, 1)).sum().backward()
        reducer.reduce()
        assert model[2].weight.grad is None
        return [float(layer.weight.grad) for layer in model[:2]]

    assert on_ranks(2, work) == [[0.5, 0.5], [0.5, 0.5]]
