"""Functions of torch on divided values of many shapes and placements: shapes, values and gradients as of whole ones."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional

from dure.strategies.tensor_parallel.boundary import from_local, redistributed
from dure.strategies.tensor_parallel.values import DividedValues, undivided
from tests.comm.gloo_ranks import on_ranks

SHAPES = [(), (1,), (5,), (6,), (1, 6), (5, 1), (5, 6), (3, 1, 6), (2, 5, 6), (4, 5, 6), (2, 2, 5, 4)]
FACTORS = {"v": (6,), "w": (6, 6), "short": (5,), "column": (5, 1), "rows": (2, 6), "block": (2, 5, 6)}
"""Shapes of the plain parameters that functions may use."""
ALONG = {
    "sum": Tensor.sum, "mean": Tensor.mean, "softmax": Tensor.softmax, "log_softmax": Tensor.log_softmax,
    "unbind": Tensor.unbind, "squeeze": Tensor.squeeze, "unsqueeze": Tensor.unsqueeze,
    "kept sum": lambda x, d: x.sum(d, keepdim=True), "kept mean": lambda x, d: x.mean(d, keepdim=True),
    "chunk": lambda x, d: x.chunk(2, d), "split": lambda x, d: x.split(2, d), "first": lambda x, d: x.select(d, 0),
    "last": lambda x, d: x.select(d, -1), "narrow": lambda x, d: x.narrow(d, 0, 1),
    "cat": lambda x, d: torch.cat([x, x * 2], d), "stack": lambda x, d: torch.stack([x, x * 2], d),
    "square of mean": lambda x, d: x.mean(d) ** 2, "tanh of sum": lambda x, d: x.sum(d).tanh(),
    "scaled sum": lambda x, d, v: x.sum(d) * v,
}  # fmt: skip
OTHERS = {
    "total": lambda x: x.sum(), "average": lambda x: x.mean(), "sum of two": lambda x: x.sum((0, 1)),
    "mean of two": lambda x: x.mean((0, 1), keepdim=True), "flatten": lambda x: x.flatten(),
    "flatten first": lambda x: x.flatten(0, 1), "flatten last": lambda x: x.flatten(-2),
    "view": lambda x: x.reshape(-1),
    "row": lambda x: x.reshape(1, *x.shape), "column": lambda x: x.reshape(*x.shape, 1),
    "pairs": lambda x: x.reshape(-1, 2), "halves": lambda x: x.reshape(2, -1), "t": lambda x: x.t(),
    "mT": lambda x: x.mT, "permute": lambda x: x.permute(*range(x.dim())[::-1]), "movedim": lambda x: x.movedim(0, -1),
    "expand": lambda x: x.expand(2, *x.shape), "squeeze all": lambda x: x.squeeze(),
    "unflatten": lambda x: x.unflatten(-1, (-1, 2)), "unflatten first": lambda x: x.unflatten(0, (2, -1)),
    "x[0]": lambda x: x[0], "x[-1]": lambda x: x[-1], "x[..., 0]": lambda x: x[..., 0], "x[1:]": lambda x: x[1:],
    "x[..., ::2]": lambda x: x[..., ::2], "x[..., -2:]": lambda x: x[..., -2:], "x[None]": lambda x: x[None],
    "x[..., None]": lambda x: x[..., None], "x[:, 1:3]": lambda x: x[:, 1:3], "x[::2]": lambda x: x[::2],
    "x @ w": lambda x, w: x @ w, "w @ x": lambda x, w: w @ x, "v @ x": lambda x, v: v @ x, "x @ v": lambda x, v: x @ v,
    "short @ x": lambda x, short: short @ x, "x @ x.mT": lambda x: x @ x.mT, "x.mT @ x": lambda x: x.mT @ x,
    "linear": lambda x, w: functional.linear(x, w), "linear with bias": lambda x, w, v: functional.linear(x, w, v),
    "linear by x": lambda x, w: functional.linear(w, x), "linear of v by x": lambda x, v: functional.linear(v, x),
    "linear of rows by x": lambda x, rows: functional.linear(rows, x), "linear by v": functional.linear,
    "bias x": lambda x, w: functional.linear(w, w, x), "bmm": lambda x: torch.bmm(x, x.mT),
    "mm": lambda x, w: torch.mm(x, w), "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "layer_norm of all": lambda x: functional.layer_norm(x, x.shape),
    "layer_norm with weights": lambda x, v: functional.layer_norm(x, (6,), v, v),
    "rms_norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "rms_norm with weight": lambda x, v: functional.rms_norm(x, (6,), v), "x + v": lambda x, v: x + v,
    "x * v": lambda x, v: x * v, "x * column": lambda x, column: x * column, "x * block": lambda x, block: x * block,
    "outer": lambda x, v: x[..., None] * v, "x + x.mT": lambda x: x + x.mT, "v - x": lambda x, v: v - x,
    "x / v": lambda x, v: x / v.abs(), "v / x": lambda x, v: v / (x.abs() + 1), "pow": lambda x, v: x.abs() ** v.abs(),
    "where": lambda x, v: torch.where(x > 0, x, v), "maximum": torch.maximum,
    "lerp": lambda x, v: x.lerp(v.expand_as(x), 0.3), "addcmul": lambda x, v: torch.addcmul(x, v, v),
    "masked_fill": lambda x: x.masked_fill(x > 0, 1.0), "mask": lambda x: (x > 0) * x, "1 - x": lambda x: 1 - x,
    "masked_fill by place": lambda x: x.masked_fill(torch.arange(6) > 2, 1.0), "clamp": lambda x, v: x.clamp(min=v),
    "zeros_like": lambda x: torch.zeros_like(x) + x, "new_ones": lambda x: x.new_ones(x.shape) * x,
    "new_zeros": lambda x: x.new_zeros(3) + x.sum(), "to float": lambda x: x.float().double(),
    "add_": lambda x, v: x.clone().add_(v), "mul_": lambda x, v: x.clone().mul_(v), "div_": lambda x: x.clone().div_(2),
    "copy_": lambda x, v: x.clone().copy_(v.expand_as(x)), "zero_": lambda x: x.clone().zero_() + x,
    "cat with v": lambda x, v: torch.cat([x, v.expand(*x.shape[:-1], 6)], -1),
    "cat after v": lambda x, v: torch.cat([v.expand(1, *x.shape[1:]), x], 0),
    "stack with v": lambda x, v: torch.stack([x, v.expand_as(x)]), "type_as": lambda x: x.type_as(x),
    "view_as": lambda x: x.view_as(x), "expand_as": lambda x: x[:1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, *x.shape)), "swapaxes": lambda x: x.swapaxes(0, -1),
    "product with itself": lambda x: x.unsqueeze(-1) * x.unsqueeze(-2),
}  # fmt: skip


def functions() -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    """Yield each function with its name and the factors that it takes."""
    for name, function in ALONG.items():
        for dim in (-1, 0, 1):
            factors = ["v"] if name == "scaled sum" else []
            yield f"{name} along {dim}", lambda x, *f, function=function, dim=dim: function(x, dim, *f), factors
    own = {"linear by v": ["v"], "maximum": ["v"]}
    for name, function in OTHERS.items():
        yield name, function, own.get(name) or list(inspect.signature(function).parameters)[1:]


def items(value: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    return [value] if isinstance(value, Tensor) else [*value]


def outcome(function: Callable[..., Any], value: Tensor, leaf: Tensor, factors: list[Tensor]) -> list[Any]:
    """Return the shapes of a result as the model sees them, its values, and the gradients of a sum of them."""
    result = items(function(value, *factors))
    shapes = [tuple(each.shape) for each in result]
    whole = [undivided(each) for each in result]
    total = sum((each * torch.arange(1.0, each.numel() + 1).view(each.shape).sin()).sum() for each in whole)
    gradients = torch.autograd.grad(total, [leaf, *factors], allow_unused=True)
    # a gradient of nothing but zeros may be left out
    pairs = zip(gradients, [leaf, *factors], strict=True)
    known = [torch.zeros_like(of) if gradient is None else undivided(gradient) for gradient, of in pairs]
    return [shapes, *(each.detach() for each in [*whole, *known])]


def differing(group: Any) -> list[str]:
    """Return the functions, shapes and placements with another outcome than that of whole values."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    given = {name: drawn(shape).requires_grad_() for name, shape in FACTORS.items()}
    found, num_compared = [], 0
    for shape in SHAPES:
        values = drawn(shape)
        shards = [Shard(dim) for dim, size in enumerate(shape) if size > 1]
        for place in (Replicate(), Partial(), *shards):
            for name, function, names in functions():
                factors, leaf = [given[each] for each in names], values.clone().requires_grad_()
                try:
                    expected = outcome(function, leaf, leaf, factors)
                except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):
                    continue  # it does not take such a shape
                num_compared += 1
                leaf = values.clone().requires_grad_()
                try:
                    with DividedValues():
                        if isinstance(place, Partial):
                            leaf = (values / 2).requires_grad_()  # a summand has the gradient of the sum
                            divided = from_local(leaf, mesh, place)
                        else:
                            divided = redistributed(from_local(leaf, mesh, Replicate()), place)
                        seen = outcome(function, divided, leaf, factors)
                    torch.testing.assert_close(seen, expected, rtol=1e-9, atol=1e-9)
                except Exception as error:
                    found.append(f"{name} of {shape} in {place}: {type(error).__name__} {error}"[:300])
    assert num_compared > 3000
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_functions_of_divided_values_are_those_of_whole_ones():
    assert on_ranks(2, differing, 300.0) == [[], []]
