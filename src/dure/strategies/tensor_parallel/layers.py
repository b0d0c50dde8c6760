"""Linear and embedding layers divided over a tensor group: the weight is a DTensor, and the forward is replaced."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from dure.comm.groups import Group
from dure.errors import TaskInvalid
from dure.strategies.state.module_replicas import Intercepted
from dure.strategies.state.tensor_shard import version_of
from dure.strategies.tensor_parallel.boundary import (
    from_local,
    longest_part,
    redistributed,
    released,
    storage_of,
    to_local,
)
from dure.strategies.tensor_parallel.fused import as_fused, whole_of_fused
from dure.torchcompat.gradients import copy_gradient_hooks
from dure.torchcompat.modes import has_saved_tensors_hooks
from dure.torchcompat.tensors import own_attributes

Sum = Callable[[Any], Tensor]
"""Function from the summands of every rank, as a DTensor, to their sum: `released` or `sequence_part`."""

_SEQUENCE = 1
"""Dimension that `sequence_part` divides: with the batch first, that of tokens."""


class WholeInput:
    """Conversion of an input of several layers into one DTensor, so that backward sums its gradient once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._seen: tuple[ref[Tensor], tuple[int, bool], Tensor] | None = None
        """Value, its version (which in-place changes increment), whether its gradient was recorded, and its DTensor."""
        self._saved: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value as a DTensor that every rank has whole.

        Communication: in backward one all_reduce of the value's size over the tensor group. A divided value is
        gathered, and its gradient summed and divided.
        """
        # what was converted without gradients, as in a checkpoint, would give the value none
        state = (version_of(value), value.requires_grad and torch.is_grad_enabled())
        if self._seen is not None and self._seen[0]() is value and self._seen[1] == state:
            return self._seen[2]
        whole: Tensor
        if isinstance(value, DTensor):
            part = _in_autocast(value)
            whole = redistributed(part, Replicate())
            # a checkpoint saves nothing of it: inner hooks would keep the part from before until backward
            is_saved = whole is not part and not has_saved_tensors_hooks()
            self._saved = SavedPart(part, whole).saving if is_saved else nullcontext
        else:
            whole, self._saved = from_local(value, self._mesh, Replicate()), nullcontext
        self._seen = (ref(value), state, whole)
        return whole

    def saved(self) -> AbstractContextManager[None]:
        """Return the context for computing with the value: only this rank's part of a divided one is saved."""
        return self._saved()

    def forget(self) -> None:
        """Release the value that was last converted."""
        self._seen, self._saved = None, nullcontext


class SavedPart:
    """Part of a divided value, saved for backward in place of the whole, which is gathered there again.

    As in Korthikanti et al. 2022, section 4.2.2: the whole would take as much memory as all other activations.
    """

    def __init__(self, part: Any, whole: Any) -> None:
        self._part = part.detach()
        self._version = version_of(part)
        self._whole = ref(whole)
        self._num_saved = 0
        self._again: Any = None
        """The whole, gathered for the first of the layers that saved it, until the last has it."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter the context of a computation with the whole."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, value: Tensor) -> Any:
        whole: Any = self._whole()
        storage = None if whole is None else storage_of(whole)
        if storage is None or storage_of(value) is not storage:
            return value
        if value.numel() != whole.numel() or not value.is_contiguous():
            return value
        self._num_saved += 1
        return value.shape, isinstance(value, DTensor)

    def _unpack(self, saved: Any) -> Any:
        if isinstance(saved, Tensor):
            return saved
        shape, is_divided = saved
        if version_of(self._part) != self._version:
            raise TaskInvalid(
                "the model changes a value in place after a divided layer has computed with it, and backward needs it "
                "as it was, which is an error on one device too: make a new value, as x = x * 2"
            )
        with torch.no_grad():
            whole = self._again
            if whole is None:
                whole = redistributed(self._part, Replicate(), is_counted=True)
            self._num_saved -= 1
            self._again = whole if self._num_saved > 0 else None
            found = whole.view(shape)
            return found if is_divided else found.to_local()


def _in_autocast(value: Any) -> Any:
    """Return a value in the dtype in which a layer would compute with it, in which it is cheaper to send."""
    kind = value.device.type
    if not torch.is_autocast_enabled(kind) or not value.is_floating_point():
        return value
    return value.to(torch.get_autocast_dtype(kind))


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
            copy_gradient_hooks(parameter, new)
            vars(new).update(own_attributes(parameter))
            self._parameters[id(parameter)] = new
        return self._parameters[id(parameter)]


def follow_placement(parameter: nn.Parameter, placement: Placement) -> None:
    """Constrain a parameter's gradient to its placement, whatever operations it comes from."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen one may be trained later
    # an autograd function may give a parameter no gradient, and hooks are called all the same
    parameter.register_hook(lambda gradient: None if gradient is None else redistributed(gradient, placement))
    parameter.requires_grad_(is_trained)


def column_forward(whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, divided along its last dimension."""
    whole = whole_input(value)
    with whole_input.saved():
        return functional.linear(whole, layer.weight, layer.bias)


def gathered_forward(whole_input: WholeInput, layer: Any, value: Tensor) -> Tensor:
    """Return the same, gathered.

    Communication: one all_gather of the output over the tensor group.
    """
    output = column_forward(whole_input, layer, value)
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
    weight = of_own_heads(layer.weight)
    with whole_input.saved():
        fused = as_fused(functional.linear(local, weight, bias), mesh)
    if is_inside():
        return fused
    whole_input.forget()
    return whole_of_fused(fused)


def row_forward(mesh: DeviceMesh, whole_input: WholeInput, summed: Sum, layer: Any, value: Tensor) -> Tensor:
    """Return `value @ weight.T + bias` `(..., out)`, summed over ranks, each of which uses its features of the input.

    Communication: that of the sum over the tensor group; for an input that was whole, backward gathers the gradient.
    """
    whole_input.forget()
    given = value if isinstance(value, DTensor) else from_local(value, mesh, Replicate())
    divided = redistributed(given, Shard(value.dim() - 1))
    output = functional.linear(divided, layer.weight)
    if isinstance(output, DTensor):  # without a rule, as for some empty inputs, it was computed with whole values
        output = summed(output)
    return output if layer.bias is None else output + layer.bias


def vocab_forward(mesh: DeviceMesh, summed: Sum, layer: Any, indices: Tensor) -> Tensor:
    """Return the rows `(..., embedding_dim)`, each from the rank that has it.

    Communication: that of the sum over the tensor group.
    """
    rows = to_local(layer.weight)
    first = mesh.get_local_rank() * longest_part(layer.num_embeddings, mesh.size())
    is_here = (indices >= first) & (indices < first + len(rows))
    padding = None if layer.padding_idx is None else layer.padding_idx - first
    # what no rank has is an error here, as it is on one device
    is_elsewhere = (indices >= 0) & (indices < layer.num_embeddings) & ~is_here
    found = functional.embedding(
        torch.where(is_elsewhere, 0, indices - first),
        rows,
        padding_idx=padding if padding is not None and 0 <= padding < len(rows) else None,
    )
    return summed(from_local(found.masked_fill(~is_here[..., None], 0.0), mesh, Partial()))


def sequence_part(value: Any) -> Tensor:
    """Return summands `(N, T, ...)` of every rank, added up, with each rank's part of the second dimension.

    Korthikanti et al. 2022, section 4.2.2: norms, dropout and sums between divided layers are computed once by the
    ranks together, and not by each. A value with fewer dimensions, or of a sequence shorter than the ranks are many, is
    whole on every rank.

    Communication: one reduce_scatter of the output over the tensor group; in backward an all_gather of its gradient.
    """
    if value.dim() < 3 or value.size(_SEQUENCE) < value.device_mesh.size():
        return released(value)
    part: Tensor = redistributed(value, Shard(_SEQUENCE))
    return part
