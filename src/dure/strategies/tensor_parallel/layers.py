"""Linear and embedding layers divided over a tensor group: the weight is a DTensor, and the forward is replaced."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from dure import torchcompat
from dure.comm.groups import Group
from dure.strategies.state.module_replicas import Intercepted
from dure.strategies.state.tensor_shard import version_of
from dure.strategies.tensor_parallel.boundary import from_local, longest_part, redistributed, released, to_local
from dure.strategies.tensor_parallel.fused import as_fused, whole_of_fused


class WholeInput:
    """Conversion of an input of several layers into one DTensor, so that backward sums its gradient once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._seen: tuple[ref[Tensor], tuple[int, bool], Tensor] | None = None
        """Value, its version (which in-place changes increment), whether its gradient was recorded, and its DTensor."""

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value as a DTensor that every rank has whole.

        Communication: in backward one all_reduce of the value's size over the tensor group. A divided value is
        gathered, and its gradient summed and divided.
        """
        if isinstance(value, DTensor):
            whole: Tensor = redistributed(value, Replicate())
            return whole
        # what was converted without gradients, as in a checkpoint, would give the value none
        state = (version_of(value), value.requires_grad and torch.is_grad_enabled())
        if self._seen is not None and self._seen[0]() is value and self._seen[1] == state:
            return self._seen[2]
        whole = from_local(value, self._mesh, Replicate())
        self._seen = (ref(value), state, whole)
        return whole

    def forget(self) -> None:
        """Release the value that was last converted."""
        self._seen = None


class DividedLayer(ParallelStyle):
    """Style that divides the parameters of one layer and replaces its forward."""

    def __init__(
        self, dim: int, forward: Callable[..., Tensor], everyone: Group, parameters: dict[int, nn.Parameter]
    ) -> None:
        """Set the parameters of the division.

        Args:
            dim: Dimension along which the weight is divided; the bias is divided if that is the first.
            forward: Function of the layer and its input.
            everyone: All ranks of the run, which start with rank 0's values.
            parameters: The divided parameters so far, by the id of the original ones: tied ones stay tied.
        """
        self._dim = dim
        self._forward = forward
        self._everyone = everyone
        self._parameters = parameters

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "weight" or self._dim == 0:
                setattr(module, name, self._divided(parameter, device_mesh))
        module.forward = Intercepted(module.forward, self._call, in_copies=True)
        return module

    def _call(self, original: Any, input: Tensor) -> Tensor:
        # only its owner is needed, the layer or a copy of it
        layer = original.__self__
        if isinstance(layer, nn.Linear) and input.dim() == 1:
            # torch removes the row again in place, of which a DTensor's gradient is not aware
            return self._forward(layer, input.unsqueeze(0)).squeeze(0)
        return self._forward(layer, input)

    def _divided(self, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        if id(parameter) not in self._parameters:
            whole = parameter.detach().to(mesh.device_type).contiguous()
            self._everyone.broadcast([whole])
            # every rank has the whole already, and keeps only its part
            divided = distribute_tensor(whole, mesh, [Shard(self._dim)], src_data_rank=None)
            part = divided.to_local().clone()
            shape, stride = divided.shape, divided.stride()
            divided = DTensor.from_local(part, mesh, [Shard(self._dim)], run_check=False, shape=shape, stride=stride)
            new = nn.Parameter(divided, requires_grad=parameter.requires_grad)
            follow_placement(new, Shard(self._dim))
            torchcompat.copy_gradient_hooks(parameter, new)
            vars(new).update(torchcompat.own_attributes(parameter))
            self._parameters[id(parameter)] = new
        return self._parameters[id(parameter)]


def follow_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Constrain a parameter's gradient to its placement, whatever operations it comes from."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one may be trained later
    parameter.register_hook(lambda gradient: redistributed(gradient, placement))
    parameter.requires_grad_(is_trained)


def column_forward(whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, divided along its last dimension."""
    return functional.linear(whole_input(value), layer.weight, layer.bias)


def gathered_forward(whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return the same, gathered.

    Communication: one all_gather of the output over the tensor group.
    """
    output = functional.linear(whole_input(value), layer.weight, layer.bias)
    whole_input.forget()
    return released(output)


def fused_forward(
    mesh: DeviceMesh, whole_input: WholeInput, is_inside: Callable[[], bool], layer: Any, value: Tensor
) -> Tensor:
    """Return queries, keys and values `(..., 3 width)` of this rank's heads.

    The rank's rows of the weight do not correspond to heads, as in any other layer, so that optimiser and checkpoints
    need no special case. Here every rank gathers all rows and takes those of its heads. That costs the size of the
    weight, whereas gathering the output would cost that of the batch.

    Communication: one all_gather of weight and bias over the tensor group; in backward a reduce_scatter of their
    gradients, and an all_reduce of the input's.
    """
    width = layer.out_features // 3
    heads = width // mesh.size()
    first = mesh.get_local_rank() * heads

    def of_own_heads(parameter: Any) -> Tensor:
        whole = to_local(redistributed(parameter, Replicate()), gradient=Partial())
        return torch.cat([whole.narrow(0, third * width + first, heads) for third in range(3)])

    bias = None if layer.bias is None else of_own_heads(layer.bias)
    local = to_local(whole_input(value), gradient=Partial())
    fused = as_fused(functional.linear(local, of_own_heads(layer.weight), bias), mesh)
    if is_inside():
        return fused
    whole_input.forget()
    return whole_of_fused(fused)


def row_forward(mesh: DeviceMesh, whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, summed over ranks, each of which uses its features of the input.

    Communication: one all_reduce of the output over the tensor group; for an input that was whole, backward gathers the
    gradient.
    """
    whole_input.forget()
    given = value if isinstance(value, DTensor) else from_local(value, mesh, Replicate())
    divided = redistributed(given, Shard(value.dim() - 1))
    summed = released(functional.linear(divided, layer.weight))
    return summed if layer.bias is None else summed + layer.bias


def vocab_forward(mesh: DeviceMesh, layer: Any, indices: Tensor) -> Tensor:
    """Return the rows `(..., embedding_dim)`, each from the rank that has it.

    Communication: one all_reduce of the output over the tensor group.
    """
    rows = to_local(layer.weight)
    first = mesh.get_local_rank() * longest_part(layer.num_embeddings, mesh.size())
    is_here = (indices >= first) & (indices < first + len(rows))
    padding = None if layer.padding_idx is None else layer.padding_idx - first
    found = functional.embedding(
        torch.where(is_here, indices - first, 0),
        rows,
        padding_idx=padding if padding is not None and 0 <= padding < len(rows) else None,
    )
    return released(from_local(found.masked_fill(~is_here[..., None], 0.0), mesh, Partial()))
