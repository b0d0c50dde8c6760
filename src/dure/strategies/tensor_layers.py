"""Linear and embedding layers divided over a tensor group: each a weight that is a DTensor, and another forward."""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from dure.comm.groups import Group
from dure.strategies.tensor_values import as_fused, gathered, whole_of_fused


class Traffic:
    """Counts what a rank sends for divided layers, by the formulas of bandwidth-optimal collectives."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.sent_bytes = 0
        """Since it was last set to zero, forward passes with gradients and their backward alone."""

    def all_reduce(self, whole: Tensor) -> None:
        """Count a sum of tensors that are as large as the whole."""
        self._count(2 * (self.num_ranks - 1) * _num_bytes(whole) // self.num_ranks)

    def all_gather(self, whole: Tensor, dim: int = -1) -> None:
        """Count a gathering of parts, or a sum that leaves each rank a part, each sent as long as the longest.

        Args:
            whole: All parts together.
            dim: In which it is divided.
        """
        longest = _longest(whole.size(dim), self.num_ranks)
        self._count((self.num_ranks - 1) * _num_bytes(whole) // whole.size(dim) * longest)

    def _count(self, num_bytes: int) -> None:
        if torch.is_grad_enabled():
            self.sent_bytes += num_bytes


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class WholeInput:
    """Makes one DTensor of an input that several layers take, so that backward adds its gradient up once."""

    def __init__(self, mesh: DeviceMesh, traffic: Traffic) -> None:
        self._mesh = mesh
        self._traffic = traffic
        self._seen: tuple[ref[Tensor], Tensor] | None = None

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value as a DTensor that every rank has whole.

        Communication: in backward one all_reduce of the value's size over the tensor group. One that was divided is
        gathered, and its gradient summed and divided.
        """
        if isinstance(value, DTensor):
            (placement,) = value.placements
            if isinstance(placement, Shard):
                self._traffic.all_gather(value, placement.dim)
                if value.requires_grad:
                    self._traffic.all_gather(value, placement.dim)
            return value.redistribute(placements=[Replicate()])
        if self._seen is not None and self._seen[0]() is value:
            return self._seen[1]
        whole = DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        if value.requires_grad:
            self._traffic.all_reduce(value)
        self._seen = (ref(value), whole)
        return whole

    def forget(self) -> None:
        """Let go of the value that was seen last."""
        self._seen = None


class DividedLayer(ParallelStyle):
    """Divides the parameters of one layer, and gives it another forward."""

    def __init__(
        self, dim: int, forward: Callable[..., Tensor], everyone: Group, parameters: dict[int, nn.Parameter]
    ) -> None:
        """Remember how.

        Args:
            dim: Of the weight, which is divided along it; the bias is where that is the first.
            forward: Takes the layer and its input.
            everyone: All ranks of the run, which begin with rank 0's values.
            parameters: The divided parameters so far, by the id of what they came from: tied ones stay tied.
        """
        self._dim = dim
        self._forward = forward
        self._everyone = everyone
        self._parameters = parameters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "weight" or self._dim == 0:
                setattr(module, name, self._divided(parameter, device_mesh))
        module.forward = partial(self._forward, module)
        return module

    def _divided(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        if id(parameter) not in self._parameters:
            whole = parameter.detach().to(mesh.device_type).contiguous()
            self._everyone.broadcast([whole])
            # every rank has the whole already, and keeps its part alone
            divided = distribute_tensor(whole, mesh, [Shard(self._dim)], src_data_rank=None)
            part = divided.to_local().clone()
            shape, stride = divided.shape, divided.stride()
            divided = DTensor.from_local(part, mesh, [Shard(self._dim)], run_check=False, shape=shape, stride=stride)
            self._parameters[id(parameter)] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
        return self._parameters[id(parameter)]


def column_forward(whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, divided along its last dimension."""
    return functional.linear(whole_input(value), layer.weight, layer.bias)


def gathered_forward(whole_input: WholeInput, traffic: Traffic, layer: Any, value: Tensor) -> Tensor:
    """Return the same whole.

    Communication: one all_gather of the output over the tensor group.
    """
    output: Any = functional.linear(whole_input(value), layer.weight, layer.bias)
    whole_input.forget()
    traffic.all_gather(output)
    return gathered(output)


def fused_forward(
    mesh: DeviceMesh,
    whole_input: WholeInput,
    traffic: Traffic,
    is_inside: Callable[[], bool],
    layer: Any,
    value: Tensor,
) -> Tensor:
    """Return queries, keys and values `(..., 3 width)` of this rank's heads.

    The rank's rows of the weight are those of no head in particular, as in any other layer, so that optimiser and
    checkpoints need not know. Here every rank gets all rows and takes those of its heads. That costs the weight's size
    and not, as gathering the output would, the batch's.

    Communication: one all_gather of weight and bias over the tensor group; in backward a reduce_scatter of their
    gradients, and an all_reduce of the input's.
    """
    width = layer.out_features // 3
    heads = width // traffic.num_ranks
    first = mesh.get_local_rank() * heads

    def of_own_heads(parameter: Any) -> Tensor:
        traffic.all_gather(parameter, 0)
        if parameter.requires_grad:
            traffic.all_gather(parameter, 0)
        whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return torch.cat([whole.narrow(0, third * width + first, heads) for third in range(3)])

    bias = None if layer.bias is None else of_own_heads(layer.bias)
    local: Any = whole_input(value)
    output = functional.linear(local.to_local(grad_placements=[Partial()]), of_own_heads(layer.weight), bias)
    fused = as_fused(output, mesh)
    if is_inside():
        return fused
    whole_input.forget()
    return whole_of_fused(fused)


def row_forward(mesh: DeviceMesh, whole_input: WholeInput, traffic: Traffic, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, each rank from the features of the input that it has, added up.

    Communication: one all_reduce of the output over the tensor group; of an input that was whole backward gathers the
    gradient.
    """
    whole_input.forget()
    if not isinstance(value, DTensor):
        if value.requires_grad:
            traffic.all_gather(value)
        value = DTensor.from_local(value, mesh, [Replicate()], run_check=False)
    divided = value.redistribute(placements=[Shard(value.dim() - 1)])
    output = functional.linear(divided, layer.weight)
    traffic.all_reduce(output)
    summed = gathered(output)
    return summed if layer.bias is None else summed + layer.bias


def vocab_forward(mesh: DeviceMesh, traffic: Traffic, layer: Any, indices: Tensor) -> Tensor:
    """Return the rows `(..., embedding_dim)`, each from the rank that has it.

    Communication: one all_reduce of the output over the tensor group.
    """
    rows = layer.weight.to_local()
    first = mesh.get_local_rank() * _longest(layer.num_embeddings, traffic.num_ranks)
    is_here = (indices >= first) & (indices < first + len(rows))
    padding = None if layer.padding_idx is None else layer.padding_idx - first
    found = functional.embedding(
        torch.where(is_here, indices - first, 0),
        rows,
        padding_idx=padding if padding is not None and 0 <= padding < len(rows) else None,
    )
    part = found.masked_fill(~is_here[..., None], 0.0)
    traffic.all_reduce(part)
    return gathered(DTensor.from_local(part, mesh, [Partial()], run_check=False))


def _longest(size: int, num_ranks: int) -> int:
    return -(-size // num_ranks)
