"""Sequence parallelism: what lies between divided layers is divided too, and what backward needs of it is a part."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dure.comm.groups import Group, ProcessGroup, Solo
from dure.errors import DureError, TaskInvalid
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import train_case
from tests.conformance.zoo.feature import STEPS, ZooTask
from tests.strategies.sharded.sharded_cases import SentBytes, backward, prepared
from tests.strategies.tensor_parallel.tensor_cases import (
    TO_ROUNDING,
    WIDTH,
    differences,
    mean_square,
    tokens,
    trained_weights,
)

PLAN = "*.up=column,*.down=row"


class Mixing(nn.Module):
    """Half of a transformer's block."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Heads(nn.Module):
    """The other half, with a layer for each of queries, keys and values, or with one for all."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.num_heads, self.norm = 6, nn.RMSNorm(WIDTH)
        names = ("qkv",) if is_fused else ("q_proj", "k_proj", "v_proj")
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, 3 * WIDTH // len(names)))
        self.projections = names
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        parts = [getattr(self, name)(normed) for name in self.projections]
        queries, keys, values = (
            part.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in (parts if len(parts) > 1 else parts[0].chunk(3, -1))
        )
        mixed = functional.scaled_dot_product_attention(queries, keys, values)
        return x + self.out_proj(mixed.transpose(1, 2).reshape(x.shape))


class OwnNorm(torch.autograd.Function):
    """Normalisation with a backward of its own, for a value that may be divided and a weight that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x / x.square().mean(-1, keepdim=True).add(1).sqrt() * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        root = x.square().mean(-1, keepdim=True).add(1).sqrt()
        scaled = gradient * weight / root
        own = scaled - x * (scaled * x).mean(-1, keepdim=True) / root.square()
        return own, (gradient * x / root).flatten(0, -2).sum(0)


class OwnNormed(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return OwnNorm.apply(super().forward(x), self.weight)


class OperatorScaled(Mixing):
    """Scales by one of `torch.ops`, or by a scripted function, and not by a function of torch."""

    def __init__(self, scale: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(super().forward(x), self.weight)


def times(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


class Switched(nn.Module):
    """Sequences first, changed in place, averaged over tokens, and combined with what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = Mixing(), Mixing(), nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x.transpose(0, 1)).transpose(0, 1)
        one += x * self.scale
        return self.second(one) * one.mean(1, keepdim=True) + one[:, :1]


class Gated(Mixing):
    """Weighs tokens by one number each, which it selects from a column."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = super().forward(x)
        return mixed * self.gate(mixed).select(-1, 0).unsqueeze(-1)


def penalised() -> Callable[[nn.Module, Tensor], Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        return output.square().mean() + 0.1 * slope.square().mean()

    return loss


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_values_divided_along_the_sequence_give_the_weights_of_one_process(num_ranks: int) -> None:
    builds: list[Callable[[], nn.Module]] = [
        lambda: nn.Sequential(Heads(is_fused=False), Mixing(), Heads(is_fused=True), Mixing()),
        lambda: nn.Sequential(OwnNormed(), Mixing()),
        lambda: nn.Sequential(OperatorScaled(torch.ops.aten.mul.Tensor), Mixing()),
        lambda: nn.Sequential(OperatorScaled(torch.ops.aten.mul), Mixing()),
        Switched,
        lambda: nn.Sequential(Gated(), Mixing()),
    ]
    cases = [(build, lambda: mean_square) for build in builds]
    cases.append((lambda: nn.Sequential(Mixing(dropout=0.0), Mixing(dropout=0.0)), penalised))
    found = differences(cases, num_ranks, sequence_parallel=True)
    assert all(isinstance(one, float) and one < TO_ROUNDING for one in found), found


class ChangedLater(Mixing):
    """Changes a value in place of which backward needs what it was."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = self.up(normed)
        normed.mul_(2.0)
        return normed + self.down(functional.gelu(hidden))


def test_value_that_backward_needs_when_it_is_changed_in_place_then_is_an_error_as_on_one_device() -> None:
    def work(group: Group) -> str:
        name = "single" if isinstance(group, Solo) else "tensor_parallel"
        options = {} if isinstance(group, Solo) else {"sequence_parallel": True}
        with pytest.raises((TaskInvalid, RuntimeError)) as raised:
            trained_weights(
                name, group, lambda: nn.Sequential(Mixing(), ChangedLater()), mean_square, tokens(4), **options
            )
        return str(raised.value)

    assert "modified by an inplace operation" in work(Solo())
    assert all("changes a value in place after a divided layer" in said for said in on_ranks(2, work))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_code_that_no_mode_sees_is_refused() -> None:
    scales = [
        (torch.jit.script(times), "in code that cannot be followed"),
        (torch.ops.aten.mul_, "changes an argument"),
    ]
    cases = [
        (lambda scale=scale: nn.Sequential(OperatorScaled(scale), Mixing()), lambda: mean_square) for scale, _ in scales
    ]
    for refused, (_, sentence) in zip(differences(cases, sequence_parallel=True), scales, strict=True):
        assert isinstance(refused, TaskInvalid)
        assert sentence in str(refused)


class Kept(TorchDispatchMode):
    """Counts the bytes of tensors made in the context that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                storage = (one._local_tensor if isinstance(one, DTensor) else one).untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return made

    def num_bytes(self, least: int) -> int:
        """Return the bytes of those with at least so many."""
        gc.collect()
        return sum(size for storage, size in self._made.values() if size >= least and not storage.expired())


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Mixing(16) for _ in range(4)))


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_ranks_keep_a_part_of_what_lies_between_layers(is_sequence_parallel: bool) -> None:
    whole = 4 * 64 * 16 * 4  # a value of four sequences of 64 tokens

    def work(group: ProcessGroup) -> int:
        strategy = prepared("tensor_parallel", group, blocks(), plan=PLAN, sequence_parallel=is_sequence_parallel)
        x = torch.ones(4, 64, 16, requires_grad=True)
        with strategy.division.dividing(), Kept() as kept:
            output = strategy.model[2](strategy.model[1](strategy.model[0](x)))
            before = kept.num_bytes(whole // 2)
            output = strategy.model[3](output)
        added = kept.num_bytes(whole // 2) - before
        del output
        strategy.close()
        return added

    # the hidden values, what the norm gets and gives, the dropped ones, and the sum; the part of hidden values is
    # twice as large as a whole one of the others
    between = 3 * whole // (2 if is_sequence_parallel else 1)
    assert on_ranks(2, work) == [2 * 2 * whole + between] * 2


class Checkpointed(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpoints_keep_a_part_of_their_input_alone() -> None:
    whole = 4 * 64 * 16 * 4

    def work(group: ProcessGroup) -> int:
        model = nn.Sequential(*(Checkpointed(16) for _ in range(3)))
        strategy = prepared("tensor_parallel", group, model, plan=PLAN, sequence_parallel=True)
        x = torch.ones(4, 64, 16, requires_grad=True)
        with strategy.division.dividing(), Kept() as kept:
            output = strategy.model[1](strategy.model[0](x))
            before = kept.num_bytes(whole // 2)
            output = strategy.model[2](output)
        added = kept.num_bytes(whole // 2) - before
        del output
        strategy.close()
        return added

    assert on_ranks(2, work) == [whole // 2] * 2


@pytest.mark.parametrize("num_tokens", [64, 63])
def test_ranks_say_what_they_send_for_the_parts_of_sequences(num_tokens: int) -> None:
    def work(group: ProcessGroup) -> tuple[int, int, dict[str, int]]:
        strategy = prepared("tensor_parallel", group, blocks(), plan=PLAN, sequence_parallel=True)
        with SentBytes() as sent:
            backward(strategy, torch.ones(2, num_tokens, 16, requires_grad=True))
        strategy.close()
        return sent.num_bytes, strategy.sent_bytes(1), sent.calls

    for counted, told, _ in on_ranks(2, work):
        assert counted == told


@pytest.mark.parametrize(("strategy", "mesh"), [("fsdp", "shard=2"), ("pipeline", "pipeline=2")])
def test_sequence_parallelism_without_divided_layers_is_refused(strategy: str, mesh: str, tmp_path: Any) -> None:
    with pytest.raises(DureError, match=r"sequence_parallel is about layers that the axis tensor of the mesh divides"):
        train_case(tmp_path, ZooTask(), strategy, 2, mesh=mesh, sequence_parallel=True, **STEPS)
