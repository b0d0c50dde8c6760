"""Cases for every rank of a group, each held to a plain computation on what all ranks have."""

import copy
import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dure.compat.horovod.torch as hvd
from dure.compat.horovod.common.exceptions import HostsUpdatedInterrupt
from dure.compat.horovod.torch import elastic

CASES: dict[str, Callable[[], None]] = {}
REDUCED = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
MOVED = ("bool", *REDUCED, "complex64")
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sum": torch.add,
    "Min": torch.minimum,
    "Max": torch.maximum,
    "Product": torch.mul,
}


def case(function: Callable[[], None]) -> Callable[[], None]:
    """Register a case by its function's name."""
    CASES[function.__name__] = function
    return function


def of_rank(rank: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return a rank's tensor: small whole numbers, which every type adds and multiplies exactly."""
    generator = torch.Generator().manual_seed(100 * rank + len(shape))
    values = torch.randint(0 if dtype in ("uint8", "bool") else -3, 4, shape, generator=generator)
    return values.to(getattr(torch, dtype))


def of_all(dtype: str, shape: tuple[int, ...]) -> list[Tensor]:
    """Return the tensors of all ranks."""
    return [of_rank(rank, dtype, shape) for rank in range(hvd.size())]


def same(found: Tensor, expected: Tensor) -> None:
    """Check type, shape and every element."""
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert torch.equal(found, expected), (found, expected)


def close(found: Tensor, expected: Tensor) -> None:
    """Check type and shape, and each element to the rounding of its type."""
    torch.testing.assert_close(found, expected)


def fails(kind: type[BaseException], what: str, call: Callable[[], object]) -> None:
    """Check that a call raises an error of a kind that mentions something."""
    with pytest.raises(kind, match=re.escape(what)):
        call()


@case
def starts() -> None:
    assert not hvd.is_initialized()
    fails(ValueError, "hvd.init()", hvd.rank)
    hvd.init()
    hvd.init()  # the second does nothing
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.local_rank()) == (hvd.rank(), hvd.rank())
    assert (hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (hvd.size(), 0, 1)
    assert hvd.is_homogeneous()


@case
def reduces_every_op_type_and_dimension() -> None:
    handles = []
    for dtype, (name, plain), dims in itertools.product(REDUCED, OPS.items(), (0, 1, 2, 3)):
        tensors = of_all(dtype, (3,) * dims)
        op = getattr(hvd, name)
        own = tensors[hvd.rank()].clone()
        expected = reduce(plain, tensors)
        label = f"{dtype}.{name}.{dims}"
        handles.append((hvd.allreduce_async(own, name=label, op=op), own, tensors[hvd.rank()], expected))
        there = own.clone()
        handles.append((hvd.allreduce_async_(there, name=f"{label}.there", op=op), there, None, expected))
    for handle, given, before, expected in handles:
        found = hvd.synchronize(handle)
        same(found, expected)
        if before is None:
            assert found is given
        else:
            same(given, before)
    assert hvd.synchronize(handles[0][0]) is None


@case
def reduces_one_at_a_time() -> None:
    for dtype in REDUCED:
        tensors = of_all(dtype, (2, 3))
        same(hvd.allreduce(tensors[hvd.rank()].clone(), op=hvd.Sum), reduce(torch.add, tensors))
    own = of_rank(hvd.rank(), "float32", (4,))
    close(hvd.allreduce(own), torch.stack(of_all("float32", (4,))).mean(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        close(hvd.allreduce(own, average=False), torch.stack(of_all("float32", (4,))).sum(0))
    fails(ValueError, "supersedes", lambda: hvd.allreduce(own, average=True, op=hvd.Sum))
    fails(ValueError, "BoolTensor is not supported", lambda: hvd.allreduce(own.bool()))
    fails(ValueError, "contiguous", lambda: hvd.allreduce(torch.ones(2, 3).t()))
    assert hvd.allreduce(torch.empty(0)).shape == (0,)


@case
def scales_before_and_after() -> None:
    total = sum(of_all("float64", (5,)))
    own = of_rank(hvd.rank(), "float64", (5,))
    close(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), total * 1.5)
    close(hvd.allreduce(own, prescale_factor=2.0), total * 2 / hvd.size())
    whole = of_rank(hvd.rank(), "int32", (5,)) * 7
    expected = sum((each * 7 * 0.3).to(torch.int32) for each in of_all("float64", (5,)))
    same(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.3), expected.to(torch.int32))
    half = hvd.allreduce(own.half(), op=hvd.Sum, postscale_factor=0.1)
    same(half, (total.float() * torch.tensor(0.1)).half())


@case
def reduces_groups_of_several_types() -> None:
    kinds = ("float32", "int64", "float32", "float16")
    all_tensors = [of_all(dtype, (index + 1, 2)) for index, dtype in enumerate(kinds)]
    own = [tensors[hvd.rank()].clone() for tensors in all_tensors]
    for found, tensors in zip(hvd.grouped_allreduce(own, op=hvd.Sum), all_tensors, strict=True):
        same(found, reduce(torch.add, tensors))
    results = hvd.grouped_allreduce_(own, op=hvd.Max, name="group")
    assert all(found is given for found, given in zip(results, own, strict=True))
    for found, tensors in zip(own, all_tensors, strict=True):
        same(found, reduce(torch.maximum, tensors))


@case
def gathers_tensors_of_any_length() -> None:
    handles = []
    for dtype, dims in itertools.product(MOVED, (1, 2, 3)):
        shapes = [(rank, *(2,) * (dims - 1)) for rank in range(hvd.size())]  # rank 0 has nothing
        tensors = [of_rank(rank, dtype, shape) for rank, shape in enumerate(shapes)]
        handles.append((hvd.allgather_async(tensors[hvd.rank()], name=f"g.{dtype}.{dims}"), torch.cat(tensors)))
    for handle, expected in reversed(handles):
        same(hvd.synchronize(handle), expected)
    pair = [torch.full((hvd.rank() + 1,), hvd.rank()), torch.full((1, 2), 0.5)]
    first, second = hvd.grouped_allgather(pair)
    same(first, torch.cat([torch.full((rank + 1,), rank) for rank in range(hvd.size())]))
    same(second, torch.full((hvd.size(), 2), 0.5))
    fails(hvd.HorovodInternalError, "without dimensions", lambda: hvd.allgather(torch.tensor(1.0)))


@case
def broadcasts_from_every_rank() -> None:
    for root, dtype, dims in itertools.product(range(hvd.size()), MOVED, (0, 2)):
        tensors = of_all(dtype, (3,) * dims)
        own = tensors[hvd.rank()].clone()
        same(hvd.broadcast(own, root), tensors[root])
        same(own, tensors[hvd.rank()])
        assert hvd.broadcast_(own, root) is own
        same(own, tensors[root])
    fails(ValueError, "root rank", lambda: hvd.broadcast(torch.ones(1), hvd.size()))


@case
def exchanges_rows() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in MOVED:
        tensors = of_all(dtype, (size * 2, 2))
        same(hvd.alltoall(tensors[rank]), torch.cat([each[2 * rank : 2 * rank + 2] for each in tensors]))
    splits = torch.arange(size, dtype=torch.int32)  # rank 0 gets nothing
    begin = sum(range(rank))
    found, received = hvd.alltoall(of_rank(rank, "float32", (10, 3)), splits)
    same(found, torch.cat([each[begin : begin + rank] for each in of_all("float32", (10, 3))]))
    same(received, torch.full((size,), rank, dtype=torch.int32))
    own = torch.ones(size + 1)
    fails(ValueError, "multiple", lambda: hvd.alltoall(own))
    fails(ValueError, "rows", lambda: hvd.alltoall(own, [size + 1] * size))
    fails(ValueError, "entries", lambda: hvd.alltoall(own, [1]))
    fails(ValueError, "int32", lambda: hvd.alltoall(own, torch.ones(size)))


@case
def scatters_reductions() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype, (name, plain), rows in itertools.product(REDUCED, OPS.items(), (1, size, size * 2 + 1)):
        tensors = of_all(dtype, (rows, 2))
        few, more = divmod(rows, size)
        begin = rank * few + min(rank, more)
        expected = reduce(plain, tensors)[begin : begin + few + (rank < more)]
        same(hvd.reducescatter(tensors[rank], op=getattr(hvd, name)), expected)
    pair = [torch.ones(size, 2), torch.ones(size) * (rank + 1)]
    first, second = hvd.grouped_reducescatter(pair, op=hvd.Sum, prescale_factor=0.5)
    same(first, torch.full((1, 2), size / 2))
    same(second, torch.full((1,), size * (size + 1) / 4))
    close(hvd.reducescatter(pair[1]), torch.full((1,), (size + 1) / 2))
    fails(hvd.HorovodInternalError, "Adasum", lambda: hvd.reducescatter(pair[1], op=hvd.Adasum))


@case
def gives_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()

    def gradient(call: Callable[[Tensor], Tensor], rows: int = size) -> Tensor:
        own = torch.ones(rows, 2, dtype=torch.float64, requires_grad=True)
        result = call(own)
        result.backward(torch.full_like(result, rank + 1.0))
        assert own.grad is not None
        return own.grad

    total = size * (size + 1) / 2
    mean = total / size
    ones = torch.ones(size, 2, dtype=torch.float64)
    close(gradient(lambda own: hvd.allreduce(own, op=hvd.Sum)), ones * total)
    close(gradient(lambda own: hvd.allreduce(own)), ones * mean)
    close(gradient(lambda own: hvd.grouped_allreduce([own, own], op=hvd.Sum)[1]), ones * total)
    close(gradient(hvd.allgather, rank + 1), torch.full((rank + 1, 2), mean, dtype=torch.float64))
    close(gradient(lambda own: hvd.grouped_allgather([own])[0], rank + 1), ones[: rank + 1] * mean)
    close(gradient(lambda own: hvd.broadcast(own, 1)), ones * (mean if rank == 1 else 0))
    peers = torch.arange(1.0, size + 1, dtype=torch.float64)[:, None].expand(size, 2)
    close(gradient(hvd.alltoall), peers)
    close(gradient(lambda own: hvd.alltoall(own, [1] * size)[0], size + 2), torch.cat([peers, ones[:2] * 0]))
    close(gradient(lambda own: hvd.reducescatter(own, op=hvd.Sum)), peers * size)
    close(gradient(lambda own: hvd.grouped_reducescatter([own])[0]), peers)


@case
def matches_names_in_any_order() -> None:
    names = [f"order.{index}" for index in range(20)]
    handles = {}
    for name in names if hvd.rank() else reversed(names):
        number = float(name.rpartition(".")[2])
        handles[name] = hvd.allreduce_async(torch.full((3,), number), name=name, op=hvd.Sum)
    for name in names[::2] + names[1::2]:
        number = float(name.rpartition(".")[2])
        same(hvd.synchronize(handles[name]), torch.full((3,), number * hvd.size()))
    handle = hvd.allreduce_async(torch.ones(2))
    while not hvd.poll(handle):
        pass
    same(hvd.synchronize(handle), torch.ones(2))
    fails(ValueError, "handle", lambda: hvd.poll(handle))


@case
def refuses_what_differs() -> None:
    rank = hvd.rank()
    differing: dict[str, Callable[[], object]] = {
        "shapes": lambda: hvd.allreduce(torch.ones(2 + rank)),
        "types": lambda: hvd.allreduce(torch.ones(2).to(torch.float64 if rank else torch.float32)),
        "reduction operation": lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if rank else hvd.Max),
        "factors": lambda: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + rank),
        "root ranks": lambda: hvd.broadcast(torch.ones(2), min(rank, 1)),
        "BROADCAST tensor shapes": lambda: hvd.broadcast(torch.ones(2 + rank), 0),
        "after the first": lambda: hvd.allgather(torch.ones(2, 2 + rank)),
        "dimensions": lambda: hvd.allgather(torch.ones((2,) * (1 + rank))),
        "ALLTOALL": lambda: hvd.alltoall(torch.ones(hvd.size(), 1 + rank)),
        "REDUCESCATTER": lambda: hvd.reducescatter(torch.ones(hvd.size() + rank)),
    }
    for what, call in differing.items():
        fails(hvd.HorovodInternalError, what, call)
    same(hvd.allreduce(torch.ones(2)), torch.ones(2))


@case
def refuses_names_in_flight() -> None:
    def twice() -> None:
        for _ in range(2):
            hvd.allreduce_async(torch.ones(2), name="twice")

    if hvd.rank() == 0:
        fails(ValueError, "same name", twice)
    hvd.barrier()
    if hvd.rank() != 0:
        hvd.allreduce(torch.ones(2), name="twice")
    hvd.barrier()


@case
def joins() -> None:
    size, rank = hvd.size(), hvd.rank()
    if rank:
        found = hvd.allreduce(torch.full((3,), 6.0), op=hvd.Sum)
        same(found, torch.full((3,), 6.0 * (size - 1)))
        close(hvd.allreduce(torch.full((3,), 6.0)), torch.full((3,), 6.0 * (size - 1) / size))
        fails(hvd.HorovodInternalError, "Join", lambda: hvd.allgather(torch.ones(2)))
    last = hvd.join()
    assert 0 <= last < size
    same(hvd.broadcast(torch.tensor(last), 0), torch.tensor(last))
    same(hvd.allreduce(torch.ones(2)), torch.ones(2))


@case
def has_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    members = [*range(size - 1)]
    first, last = hvd.add_process_set(members), hvd.add_process_set(hvd.ProcessSet([size - 1]))
    assert hvd.global_process_set.ranks == list(range(size))
    assert (first.size(), last.size(), first.included()) == (size - 1, 1, rank in members)
    fails(ValueError, "duplicate", lambda: hvd.add_process_set(members[::-1]))
    fails(ValueError, "duplicate", lambda: hvd.add_process_set([*range(size)]))
    if rank in members:
        assert first.rank() == rank
        total = torch.full((2,), float(sum(members)))
        same(hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum, process_set=first), total)
        same(hvd.allgather(torch.tensor([rank]), process_set=first), torch.tensor(members))
        assert hvd.broadcast_object(rank, members[-1], process_set=first) == members[-1]
        hvd.barrier(first)
    else:
        fails(ValueError, "not in", lambda: hvd.allreduce(torch.ones(1), process_set=first))
        same(hvd.allreduce(torch.ones(2), process_set=last), torch.ones(2))
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)
    fails(ValueError, "registered", lambda: hvd.allreduce(torch.ones(1), process_set=first))
    assert hvd.remove_process_set(last)
    fails(ValueError, "ranks", lambda: hvd.add_process_set([0, size]))


def model_of(seed: int) -> nn.Sequential:
    """Return a model with weights of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def batch_of(rank: int, step: int) -> Tensor:
    """Return a rank's samples of a step."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step), dtype=torch.float64)


def trained_alone(num_steps: int, passes: int = 1) -> list[Tensor]:
    """Return the weights of one process that has the samples of all ranks."""
    model = model_of(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(passes):
            for rank in range(hvd.size()):
                (model(batch_of(rank, step * passes + part)).square().mean() / hvd.size()).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@case
def trains_as_one_process_does() -> None:
    def train(passes: int = 1, **settings: object) -> list[Tensor]:
        model = model_of(hvd.rank())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=passes, **settings
        )
        assert isinstance(optimizer, torch.optim.SGD)
        for step in range(3):
            optimizer.zero_grad()
            for part in range(passes):
                model(batch_of(hvd.rank(), step * passes + part)).square().mean().backward()
            if step == 1:
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        parameters = [parameter.detach() for parameter in model.parameters()]
        for found, expected in zip(parameters, trained_alone(3, passes), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # float64: rounding alone
        return parameters

    train()
    train(passes=2)
    train(gradient_predivide_factor=2.0)
    train(groups=2)
    train(groups=[[*model_of(0).parameters()][:0]])
    train(process_set=hvd.global_process_set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        train(num_groups=1)


@case
def checks_an_optimizer() -> None:
    model = model_of(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    named = [*model.named_parameters()]
    fails(ValueError, "duplicates: 0.weight", lambda: hvd.DistributedOptimizer(plain, [*named, named[0]]))
    fails(ValueError, "not named", lambda: hvd.DistributedOptimizer(plain, named[:1]))
    fails(ValueError, "tuples", lambda: hvd.DistributedOptimizer(plain, [*model.parameters()]))
    fails(ValueError, "> 0", lambda: hvd.DistributedOptimizer(plain, named, backward_passes_per_step=0))
    fails(ValueError, "Average", lambda: hvd.DistributedOptimizer(plain, op=hvd.Sum, gradient_predivide_factor=2.0))
    fails(ValueError, "groups", lambda: hvd.DistributedOptimizer(plain, named, groups=-1))
    optimizer = hvd.DistributedOptimizer(plain, named)
    model(batch_of(0, 0)).mean().backward()
    fails(AssertionError, "zero_grad", optimizer.zero_grad)
    fails(AssertionError, "backward_passes_per_step", lambda: model(batch_of(0, 0)).mean().backward())
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
    assert "skip_synchronize" in str(seen[0].message)


@case
def reduces_gradients_that_only_some_ranks_have() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    both = nn.ModuleList([first, second])
    hvd.broadcast_parameters(both.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(both.parameters(), lr=1.0), both.named_parameters())
    (first if hvd.rank() == 0 else second)(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    assert first.weight.grad is not None
    assert second.weight.grad is not None
    close(first.weight.grad, torch.full((1, 2), 1 / hvd.size()))
    close(second.weight.grad, torch.full((1, 2), (hvd.size() - 1) / hvd.size()))


@case
def reduces_sparse_gradients() -> None:
    for as_dense in (False, True):
        embedding = nn.Embedding(6, 2, sparse=True)
        hvd.broadcast_parameters(embedding.state_dict(), 0)
        before = embedding.weight.detach().clone()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), sparse_as_dense=as_dense
        )
        embedding(torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.step()
        expected = torch.zeros(6, 2)
        expected[: hvd.size()] = 1 / hvd.size()
        expected[5] = 1
        close(before - embedding.weight.detach(), expected)
    fails(ValueError, "Sum", lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), "s", hvd.Min))


@case
def combines_by_adasum() -> None:
    own, others = of_rank(hvd.rank(), "float64", (5,)), of_all("float64", (5,))
    if hvd.size() & (hvd.size() - 1):
        fails(NotImplementedError, "power of 2", lambda: hvd.allreduce(own, op=hvd.Adasum))
        return
    one, other = others
    dot = (one * other).sum()
    expected = (1 - dot / (2 * one.square().sum())) * one + (1 - dot / (2 * other.square().sum())) * other
    close(hvd.allreduce(own, op=hvd.Adasum), expected)
    close(hvd.allreduce(torch.ones(3), op=hvd.Adasum), torch.ones(3))  # parallel: the mean
    close(hvd.allreduce(torch.eye(2)[hvd.rank()], op=hvd.Adasum), torch.ones(2))  # orthogonal: the sum
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=hvd.Adasum
    )
    model(batch_of(0, 0)).square().mean().backward()
    optimizer.step()
    alone = model_of(0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(batch_of(0, 0)).square().mean().backward()
    plain.step()
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):  # equal changes: their mean
        close(found, wanted)


@case
def gives_all_ranks_states_and_objects() -> None:
    model = model_of(hvd.rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1), betas=(0.5, 0.9 - 0.1 * hvd.rank()))
    if hvd.rank() == 0:
        model(batch_of(0, 0)).mean().backward()
        optimizer.step()
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters([*model.named_parameters()], root_rank=0)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    states = hvd.allgather_object([model.state_dict(), distributed.state_dict()])
    torch.testing.assert_close(states[0], states[-1], rtol=0, atol=0)
    assert distributed.param_groups[0]["lr"] == 0.1
    assert distributed.param_groups[0]["betas"] == (0.5, 0.9)
    fails(ValueError, "LBFGS", lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0))
    fails(ValueError, "invalid params", lambda: hvd.broadcast_parameters(3, 0))
    assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]


@case
def accepts_tensors_of_odd_strides_and_views() -> None:
    size, rank = hvd.size(), hvd.rank()
    for one in (torch.ones(1).expand(1), torch.ones(3, 2)[:, :1][:1], torch.ones(4)[::4]):
        same(hvd.allgather(one), one.repeat(size, *[1] * (one.dim() - 1)))
        same(hvd.broadcast_(one, 0), one)
        same(hvd.allreduce(one), one)
        same(hvd.reducescatter(one), one[: rank == 0])
        same(hvd.alltoall(one, [1] + [0] * (size - 1))[0], one.repeat(size * (rank == 0), *[1] * (one.dim() - 1)))
    given = torch.ones(size, requires_grad=True)
    hvd.alltoall(given, [0] * (size - 1) + [size])[0].sum().backward()
    same(given.grad, torch.ones(size))
    conjugate = (torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)).conj()
    same(hvd.allgather(conjugate)[:2], torch.tensor([1 - 2j, 3 + 1j]))
    same(hvd.broadcast_(conjugate, 0), torch.tensor([1 - 2j, 3 + 1j]))
    for group in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert len(group([])) == 0
    fails(ValueError, "meta", lambda: hvd.allreduce(torch.empty(2, device="meta")))


@case
def joins_without_an_effect_on_any_reduction() -> None:
    for dtype, op, value in itertools.product(REDUCED, (hvd.Min, hvd.Max, hvd.Product), (-2, 2)):
        if hvd.rank():
            own = torch.tensor([value]).abs().to(getattr(torch, dtype)) * (1 if dtype == "uint8" or value > 0 else -1)
            same(hvd.allreduce(own, op=op), own ** (hvd.size() - 1) if op == hvd.Product else own)
    hvd.join()


@case
def sends_objects_of_any_types_and_order() -> None:
    assert hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None) == {"epoch": 3}
    assert hvd.allgather_object(None if hvd.rank() else "x") == ["x", *[None] * (hvd.size() - 1)]


class Odd(torch.optim.Optimizer):
    """Optimiser whose state is nested, and partly belongs to no parameter."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__([*parameters], {"lr": 0.1, "name": "x"})
        self.state["all"] = {"steps": 0, "sum": torch.zeros(1, dtype=torch.float64)}  # type: ignore[index]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move by the sum of the last two gradients."""
        whole = self.state["all"]  # type: ignore[index]
        whole["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            kept["last"] = [*kept.get("last", []), parameter.grad.clone()][-2:]
            whole["sum"] += parameter.grad.sum()
            parameter -= 0.1 * sum(kept["last"]) + 1e-3 * whole["steps"] * whole["sum"]


OPTIMIZERS: tuple[Callable[[Iterable[Tensor]], torch.optim.Optimizer], ...] = (
    lambda each: torch.optim.SGD(each, lr=0.1, momentum=0.9),
    lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.01), amsgrad=True),
    lambda each: torch.optim.NAdam(each, lr=0.01),
    lambda each: torch.optim.ASGD(each, lr=0.1),
    lambda each: torch.optim.Adafactor(each, lr=0.01),
    Odd,
)


@case
def continues_with_the_optimizer_of_rank_0_alone() -> None:
    """A new optimiser, and one that only rank 0 has loaded, train as that of one process."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, ranks: Iterable[int]) -> None:
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch_of(rank, number)).square().mean() / len([*ranks])).backward()
        optimizer.step()

    everyone = range(hvd.size())
    for make, before in itertools.product(OPTIMIZERS, (0, 2)):
        alone = model_of(0)
        plain = make(alone.parameters())
        for number in range(before):
            step(alone, plain, number, everyone)
        model = model_of(hvd.rank())
        own = make(model.parameters())
        if hvd.rank() == 0 and before:
            model.load_state_dict(alone.state_dict())
            own.load_state_dict(copy.deepcopy(plain.state_dict()))
        distributed = hvd.DistributedOptimizer(own, model.named_parameters())
        groups = distributed.param_groups[0]
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(distributed, root_rank=0)
        assert distributed.param_groups[0] is groups
        for number in range(before, before + 2):
            step(alone, plain, number, everyone)
            step(model, distributed, number, [hvd.rank()])
        for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)  # float64: rounding alone


@case
def sends_an_optimizer_state_that_others_do_not_have() -> None:
    model = model_of(0).bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if hvd.rank() == 0:  # a part of the parameters, and moments of more precision than parameters
        for parameter in [*model.parameters()][:2]:
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(parameter.shape)}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict()["state"])
    assert [*states[-1]] == [0, 1]
    torch.testing.assert_close(states[0], states[-1], rtol=0, atol=0)


@case
def reduces_parameters_that_come_later_and_leaves_frozen_ones() -> None:
    model, more = model_of(0), nn.Linear(2, 2).double()
    model[0].requires_grad_(False)
    hvd.broadcast_parameters(more.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), model.named_parameters()
    )
    fails(ValueError, "already", lambda: hvd.DistributedOptimizer(optimizer, model.named_parameters()))
    optimizer.add_param_group({"params": more.parameters()})
    for number in range(4):
        if number == 2:
            model[0].requires_grad_(True)
            model[2].requires_grad_(False)
            kept = model[2].weight.detach().clone()
        optimizer.zero_grad()
        more(model(batch_of(hvd.rank(), number))).square().mean().backward()
        optimizer.step()
    same(model[2].weight.detach(), kept)
    weights = hvd.allgather_object([each.detach() for each in (*model.parameters(), *more.parameters())])
    for found, expected in zip(weights[-1], weights[0], strict=True):
        same(found, expected)


@case
def compresses() -> None:
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    found = hvd.allreduce(third, compression=hvd.Compression.fp16)
    same(found, third.half().double())
    same(hvd.allreduce(torch.ones(2, dtype=torch.int32), compression=hvd.Compression.fp16, op=hvd.Max).int(),
         torch.ones(2, dtype=torch.int32))  # fmt: skip


@case
def normalises_over_all_ranks() -> None:
    everything = torch.randn(hvd.size() * 4, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, own = nn.BatchNorm1d(3).double(), hvd.SyncBatchNorm(3).double()
    whole = everything.clone().requires_grad_()
    expected = plain(whole)
    expected.pow(3).sum().backward()
    mine = slice(hvd.rank() * 4, hvd.rank() * 4 + 4)
    batch = everything[mine].clone().requires_grad_()
    found = own(batch)
    found.pow(3).sum().backward()
    assert whole.grad is not None
    assert batch.grad is not None
    close(found, expected[mine])
    close(batch.grad, whole.grad[mine])
    close(hvd.allreduce(own.weight.grad, op=hvd.Sum), plain.weight.grad)
    close(own.running_var, plain.running_var)
    close(own.running_mean, plain.running_mean)
    own.eval()
    plain.eval()
    close(own(everything), plain(everything))


@case
def records_a_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name="traced")
        hvd.barrier()
        hvd.stop_timeline()
        if hvd.rank() == 0:
            events = json.loads(path.read_text())
            names = {event["name"] for event in events}
            assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE", "CYCLE_START"} <= names, names
            assert any(event.get("args", {}).get("name") == "allreduce.traced" for event in events)
            opened = sum(event["ph"] == "B" for event in events)
            assert opened == sum(event["ph"] == "E" for event in events)
    hvd.allreduce(torch.ones(2))


@case
def goes_on_after_a_failed_collective() -> None:
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    sampler = elastic.ElasticSampler(range(20), shuffle=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, batch=0)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    seen: list[int] = []

    @elastic.run
    def train(state: elastic.TorchState) -> int:
        while state.batch < 4:
            seen.append(state.batch)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.scheduler.step()
            if state.batch == 2 and not resets:
                state.batch = 99
                hvd.allreduce(torch.ones(1 + hvd.rank()))
            state.batch += 1
            state.commit()
        return state.batch

    assert train(state) == 4
    assert (resets, seen) == ([2], [0, 1, 2, 2, 3])
    assert state.scheduler is scheduler
    assert optimizer.param_groups[0]["lr"] == 0.1 / 16  # the failed step is undone
    close(hvd.allreduce(model.weight.detach()), model.weight.detach())


@case
def divides_an_epoch() -> None:
    sampler = elastic.ElasticSampler(range(11))
    parts = hvd.allgather_object([*sampler])
    assert {index for part in parts for index in part} == set(range(11))
    assert {len(part) for part in parts} == {len(sampler)}
    sampler.record_batch(0, 2)
    sampler.load_state_dict(sampler.state_dict())
    rest = {index for part in hvd.allgather_object([*sampler]) for index in part}
    assert rest.isdisjoint({index for part in parts for index in part[:2]})
    sampler.set_epoch(1)
    assert len(sampler) == -(-11 // hvd.size())
    state = elastic.ObjectState(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, number=hvd.rank())
    state.sync()
    assert state.number == 0
    state.on_hosts_updated(1, 1)
    fails(HostsUpdatedInterrupt, "False", state.commit)  # whether only ranks were removed


@case
def starts_again() -> None:
    before = hvd.rank(), hvd.size()
    hvd.shutdown()
    assert not hvd.is_initialized()
    static = hvd.ProcessSet([1])
    hvd.init(process_sets=[static])
    assert (hvd.rank(), hvd.size()) == before
    assert static.size() == 1
    close(hvd.allreduce(torch.ones(2)), torch.ones(2))
    fails(ValueError, "list of ranks", lambda: hvd.ProcessSet(object()))  # type: ignore[arg-type]
    if hvd.rank() == 1:
        close(hvd.allreduce(torch.ones(1), process_set=static), torch.ones(1))
    hvd.barrier()


@case
def fails_on_the_others_when_one_leaves() -> None:
    if hvd.rank() == hvd.size() - 1:
        hvd.shutdown()
        return
    fails(hvd.HorovodInternalError, "shut down", lambda: hvd.allreduce(torch.ones(1)))
    fails(hvd.HorovodInternalError, "shut down", lambda: hvd.allreduce(torch.ones(1)))
