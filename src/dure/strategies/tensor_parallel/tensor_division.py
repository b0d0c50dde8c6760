"""Layers of a model divided over the ranks of a tensor group, and the context in which the model computes."""

import gc
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

from dure.comm.groups import Group
from dure.comm.mesh import Mesh
from dure.errors import RanksDisagree, TaskInvalid
from dure.strategies.contract.step_facts import DeferredRead
from dure.strategies.state.containers import attributes_of, map_leaves, set_attribute
from dure.strategies.state.module_patterns import shortened
from dure.strategies.state.module_replicas import INTERNAL, Intercepted
from dure.strategies.tensor_parallel.boundary import Traffic, counted_by, released
from dure.strategies.tensor_parallel.gradient_messages import bytes_of, exchange_gradients, messages_of
from dure.strategies.tensor_parallel.layers import (
    DividedLayer,
    WholeInput,
    column_forward,
    fused_forward,
    gathered_forward,
    row_forward,
    sequence_part,
    vocab_forward,
)
from dure.strategies.tensor_parallel.plan import OPTION, STYLES, TensorPlan, shard_dim, whole_layers
from dure.strategies.tensor_parallel.rules import has_no_rule
from dure.strategies.tensor_parallel.values import DividedValues, has_origins, undivided, whole_arguments
from dure.torchcompat.compilation import without_compilation
from dure.torchcompat.devices import default_generator
from dure.torchcompat.gradients import arguments_of_functions, modes_in_backward

_DRAW_BITS = 20
"""Bits in a fingerprint of the generators, so that its product with a few thousand ranks is exact in float32."""


class TensorDivision:
    """Division of a plan's layers over the axis `tensor` of a mesh."""

    def __init__(
        self, plan: TensorPlan, mesh: Mesh, group: Group, device: torch.device, *, is_sequence_parallel: bool
    ) -> None:
        """Set the parameters of the division.

        Args:
            plan: Layers to divide, and how.
            mesh: Mesh with the axis `tensor`.
            group: All ranks, which start with rank 0's values.
            device: Device of this rank.
            is_sequence_parallel: Whether values between divided layers are divided along the sequence.
        """
        self.plan = plan
        self._sum = sequence_part if is_sequence_parallel else released
        self.mesh = mesh
        self.traffic = Traffic(mesh.size("tensor"))
        self.values = DividedValues()
        self._group, self._device = group, device
        self._is_dividing = False
        self._modules: list[nn.Module] = []
        self._resources = ExitStack()
        self._drifting: list[list[nn.Parameter]] = []
        self._draws_before: DeferredRead | None = None
        """Fingerprint of the draws in the step before, on an accelerator."""

    def divide(self, model: nn.Module, blocks: Sequence[str] | None = None) -> None:
        """Divide the layers, and replace the model's forward by one that returns whole tensors.

        Communication: a broadcast of each divided parameter over all ranks; one is whole on the device at a time.

        Args:
            model: Whole model.
            blocks: Modules in which this rank divides layers; None for all.
        """
        # masks and tables made by a model are equal on every rank: combined with divided values, they are whole
        self._resources.enter_context(implicit_replication())
        self._resources.enter_context(arguments_of_functions(whole_arguments))
        self._resources.enter_context(modes_in_backward(has_origins))
        # the fast path of nn.TransformerEncoder uses weights without calling the layers
        had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._resources.callback(torch.backends.mha.set_fastpath_enabled, had_fast_path)
        prefixes = None if blocks is None else tuple(f"{block}." for block in blocks)
        names = self.plan.styles
        self._divide_layers(model, [name for name in names if prefixes is None or f"{name}.".startswith(prefixes)])
        self._modules = list(model.modules())
        model.forward = Intercepted(model.forward, self._forward, in_copies=True)

    def _divide_layers(self, model: nn.Module, names: Sequence[str]) -> None:
        device_mesh = self.mesh.device_mesh
        assert device_mesh is not None
        mesh = device_mesh["tensor"]
        whole_input = WholeInput(mesh)
        divided: dict[int, nn.Parameter] = {}
        plan: dict[str, Any] = {}
        for name in names:
            style = self.plan.styles[name]
            forward = {
                "column": partial(column_forward, whole_input),
                "fused": partial(fused_forward, mesh, whole_input, lambda: self._is_dividing),
                "gathered": partial(gathered_forward, whole_input),
                "row": partial(row_forward, mesh, whole_input, self._sum),
                "vocab": partial(vocab_forward, mesh, self._sum),
            }[style]
            plan[name] = DividedLayer(shard_dim(style), forward, self._group, divided)
        held = {
            f"{name}.{kind}": weakref.ref(parameter)
            for name in plan
            for kind, parameter in model.get_submodule(name).named_parameters(recurse=False)
        }
        replaced = _parameters_of(model)
        parallelize_module(model, mesh, plan)
        _replace_aliases(model, replaced)
        del replaced
        _check_holders(held, {id(parameter) for parameter in model.parameters()})

    # computation

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, and return its output as whole tensors."""
        with self.dividing():
            return undivided(forward(*args, **kwargs))

    @contextmanager
    def dividing(self) -> Iterator[None]:
        """Enter the context in which the model computes, forward and backward."""
        if self._is_dividing:
            yield
            return
        self._is_dividing = True
        try:
            with without_compilation(), self.values, counted_by(self.traffic):
                yield
                self._gather_buffers()
        except (RuntimeError, NotImplementedError) as error:
            if not has_no_rule(error):
                raise
            raise TaskInvalid(
                "the model does something with divided values that DTensor has no rule for "
                f"({str(error).splitlines()[0]:.200}): say with {OPTION} what to divide, leaving out, "
                "or making gathered, the column layers before that"
            ) from error
        finally:
            self._is_dividing = False

    def _gather_buffers(self) -> None:
        """Make buffers whole that the model replaced by divided values: what reads and saves them knows no others."""
        for module in self._modules:
            if not module._buffers:  # nearly all, and this is done for each microbatch
                continue
            for name, buffer in module.named_buffers(recurse=False):
                if isinstance(buffer, DTensor):
                    setattr(module, name, released(buffer))

    @contextmanager
    def differentiating(self) -> Iterator[None]:
        """Enter the context of a backward pass, in which checkpoints are recomputed: it must run in this thread."""
        with self.dividing(), torch.autograd.set_multithreading_enabled(False):
            yield

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use divided weights and values, and return its result undivided."""
        try:
            with self.dividing():
                return undivided(function(*args))
        except RuntimeError as error:
            kinds = {
                "functorch transforms": "torch.func (vmap, grad, jacrev ...)",
                "forward mode AD": "derivatives in forward mode (torch.autograd.forward_ad)",
            }
            used = next((kind for words, kind in kinds.items() if words in str(error)), None)
            if used is None:
                raise
            raise TaskInvalid(
                f"the task's {function.__name__} uses {used}, which cannot go through divided layers: use ddp, or fsdp "
                "without an axis tensor"
            ) from error

    # ranks of a tensor group must compute and draw the same

    def may_drift(self) -> bool:
        """Return whether gradients may differ in bits between ranks of a tensor group that compute the same.

        On an accelerator some kernels add in any order, and each rank chooses cuDNN's by its own timing.
        """
        is_reproducible = self._device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        return self.mesh.size("tensor") > 1 and not is_reproducible

    def watch_undivided(self, parameters: list[nn.Parameter], most_bytes: int) -> None:
        """Set the parameters whose gradients `keep_alike` makes the same.

        Args:
            parameters: Parameters that every rank of the tensor group has whole, or in shards over other ranks.
            most_bytes: Bytes of a message.
        """
        self._drifting = list(messages_of(parameters, most_bytes)) if self.may_drift() else []

    def keep_alike(self) -> None:
        """Copy the first rank's gradients of undivided parameters to the others of the tensor group.

        Communication: one broadcast for each message over the tensor group, and one for each sparse gradient, on
        accelerators without deterministic algorithms.
        """
        group = self.mesh.group("tensor")
        messages = [[p for p in message if p.grad is None or not p.grad.is_sparse] for message in self._drifting]
        exchange_gradients(filter(None, messages), lambda message: group.broadcast([message]))
        for parameter in (p for message in self._drifting for p in message):
            if parameter.grad is not None and parameter.grad.is_sparse:
                # of the same rows on all these ranks; each row once, so that the optimiser adds in one order
                parameter.grad = parameter.grad.coalesce()
                group.broadcast([parameter.grad.values()])

    def sent_bytes(self) -> int:
        """Return the bytes that this rank sent over the tensor group in this step."""
        num_ranks = self.mesh.size("tensor")
        return self.traffic.sent_bytes + (num_ranks - 1) * bytes_of(self._drifting) // num_ranks

    def draws(self) -> float:
        """Return a fingerprint of the generators, weighted so that equal ones of a tensor group sum to 0."""
        states = [torch.default_generator.get_state()]
        if self._device.type != "cpu":
            states.append(default_generator(self._device).get_state())
        found = 0
        for state in states:
            found = zlib.crc32(state.numpy().tobytes(), found)
        found &= (1 << _DRAW_BITS) - 1
        return float(found if self.mesh.coordinate("tensor") else -found * (self.mesh.size("tensor") - 1))

    def check_draws(self, total: Tensor) -> None:
        """Raise on all ranks if those of a tensor group have drawn differently; deferred on an accelerator.

        Args:
            total: Sum of all ranks' fingerprints, of one element.

        Raises:
            RanksDisagree: State that should be equal on these ranks would differ from then on.
        """
        now = DeferredRead(total)
        before = now if self._device.type == "cpu" else self._draws_before
        self._draws_before = now
        if before is not None and before.read() != [0.0]:
            raise RanksDisagree(
                "ranks of a tensor group did not draw the same random numbers: something in the model draws for "
                "divided values other than by functional.dropout, or on some ranks alone; draw on all ranks alike, or "
                f"leave the layers before it whole with {OPTION}"
            )

    # description, closing

    def describe(self, model: nn.Module) -> list[str]:
        """Return lines about the divided layers of a model, and those that are not."""
        lines = [
            f"{style} ({meaning}): {shortened(names)}"
            for style, meaning in STYLES.items()
            if (names := [name for name, given in self.plan.styles.items() if given == style])
        ]
        if whole := whole_layers(model, self.plan):
            lines.append(f"whole on every rank of a tensor group: {shortened(whole)}")
        return lines + self.plan.notes

    def close(self) -> None:
        """Restore torch's settings."""
        self._resources.close()


def _parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _replace_aliases(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Replace parameters by the divided ones in lists and dictionaries of modules."""
    now = _parameters_of(model)
    new = {id(parameter): now[name] for name, parameter in before.items() if now[name] is not parameter}
    for module in model.modules():
        for name, value in attributes_of(module).items():
            if name not in INTERNAL:
                changed = map_leaves(value, lambda leaf: new.get(id(leaf), leaf))
                if changed is not value:
                    set_attribute(module, name, changed)


def _check_holders(held: "dict[str, weakref.ref[nn.Parameter]]", own: set[int]) -> None:
    """Refuse a parameter that is still referenced, although the model has a divided one in its place.

    Raises:
        TaskInvalid: Computations with it would train nothing.
    """

    def still_held() -> list[str]:
        return [name for name, reference in held.items() if (one := reference()) is not None and id(one) not in own]

    if still_held():
        gc.collect()
    if names := still_held():
        raise TaskInvalid(
            f"{shortened(names)} is kept by something besides the model's layers (the task, or a function that was "
            "made with it), and would stay whole and untrained there: ask the model for it when it is needed, or leave "
            f"the layer whole with {OPTION}"
        )
