"""Tensor parallelism: layers divided over ranks that work on the same samples.

Shoeybi et al. 2019 (Megatron-LM), section 3, by DTensor and `parallelize_module`. Ranks of a tensor group hold parts of
the weights and compute parts of each layer's output; partial results are summed inside forward and backward. With
`--mesh data=D,tensor=T` there are D such groups, each with its share of the batch, whose gradients are summed over the
data axis.

Parameters that are not divided are plain tensors that every rank of a group has and changes in the same way. Their
gradient is the same on all of them, because it is computed from the same whole values, or is made the same if kernels
are not deterministic. The optimiser gets them together with the local parts of the divided ones (see
`strategies/sharded/local_shards.py`). As DTensors, they would send every operation of the model through DTensor's
dispatch, without a benefit.
"""

import gc
import weakref
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

from dure.comm.buckets import as_gradient_of
from dure.comm.mesh import Mesh, coordinate_of
from dure.errors import RanksDisagree, TaskInvalid
from dure.spec import RunSpec
from dure.spec.mesh import parse_mesh
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import Findings
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.step_facts import DeferredRead, Requests, StepFacts
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.sharded.local_shards import ShardedStrategy, share_bytes, whole_bytes
from dure.strategies.state.containers import attributes_of, map_leaves, set_attribute
from dure.strategies.state.module_patterns import shortened
from dure.strategies.state.module_replicas import INTERNAL, Intercepted
from dure.strategies.tensor_parallel.boundary import Traffic, counted_by
from dure.strategies.tensor_parallel.layers import (
    DividedLayer,
    WholeInput,
    column_forward,
    fused_forward,
    gathered_forward,
    row_forward,
    vocab_forward,
)
from dure.strategies.tensor_parallel.options import TensorParallelOptions
from dure.strategies.tensor_parallel.plan import STYLES, TensorPlan, find_plan, read_plan, shard_dim, whole_layers
from dure.strategies.tensor_parallel.rules import has_no_rule
from dure.strategies.tensor_parallel.values import DividedValues, undivided
from dure.torchcompat import default_generator, give_data, gradient_hooks_of, run_backward, without_compilation
from dure.units import format_bytes

AXES = ("data", "tensor")

_DRAW_BITS = 20
"""Bits in a fingerprint of the generators, so that its product with a few thousand ranks is exact in float32."""


class TensorParallel(ShardedStrategy):
    """Layers divided over the tensor axis, batches over the data axis."""

    options: TensorParallelOptions

    rules = WeightRules(
        changes_in_step_only=True, follows_groups=False, holds_memory=True, divides_gradients=True, divides_state=True
    )

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse a model with nothing to divide, and a plan that does not fit it."""
        axes = parse_mesh(spec.mesh, AXES, spec.num_devices)
        num_ranks = axes["tensor"]
        plan = _plan(model, num_ranks, TensorParallelOptions.of(spec))
        plan.faults += [
            f"{name} gives sparse gradients (sparse=True), which are not added up over the data axis: set sparse=False"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True and axes["data"] > 1
        ]
        plan.faults += [
            f"{name} has a hook on its gradient, which would get the gradient of one data rank's samples: use a mesh "
            "of tensor ranks alone, or remove the hook"
            for name, parameter in model.named_parameters()
            if axes["data"] > 1 and gradient_hooks_of(parameter)
        ]
        if plan.faults or plan.styles:
            return plan.faults
        whole = whole_layers(model, plan)
        shown = shortened(whole[:8]) + (f" and {len(whole) - 8} more" if len(whole) > 8 else "")
        reasons = "".join(f"; {note}" for note in plan.notes)
        return [
            f"there is no layer to divide over {num_ranks} ranks, since the rules know nn.Linear and nn.Embedding and "
            f"the model's layers are {shown}{reasons}: use fsdp, which divides any parameter"
        ]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._draws_before: DeferredRead | None = None
        """Fingerprint of the draws in the step before, on an accelerator."""
        self._axes = parse_mesh(self.spec.mesh, AXES, self.group.world_size)
        index, position = (coordinate_of(self._axes, axis, self.group.rank) for axis in ("data", "tensor"))
        self.take_share(DataShare(index=index, count=self._axes["data"], leads=position == 0))
        self._values = DividedValues()

    def place(self, model: nn.Module) -> nn.Module:
        """Divide the layers of the plan, and send rank 0's values to all ranks.

        Communication: a broadcast of each parameter and buffer over all ranks; one is whole on the device at a time.
        """
        self.mesh = Mesh(self._axes, self.group, self.device, divides_tensors=True)
        self.shard_group = self.mesh.group("tensor")
        self.random_stream = self.mesh.coordinate("data")
        self.plan = _plan(model, self.mesh.size("tensor"), self.options)
        self.traffic = Traffic(self.mesh.size("tensor"))
        self._is_dividing = False
        self._resources = ExitStack()
        # masks and tables made by a model are equal on every rank: combined with divided values, they are whole
        self._resources.enter_context(implicit_replication())
        # the fast path of nn.TransformerEncoder uses weights without calling the layers
        had_fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        self._resources.callback(torch.backends.mha.set_fastpath_enabled, had_fast_path)
        self._divide(model)
        self._place_rest(model)
        model.forward = Intercepted(model.forward, self._forward, in_copies=True)
        return model

    def _divide(self, model: nn.Module) -> None:
        device_mesh = self.mesh.device_mesh
        assert device_mesh is not None
        mesh = device_mesh["tensor"]
        inputs = {region: WholeInput(mesh) for region in map(self.plan.region_of, self.plan.styles)}
        divided: dict[int, nn.Parameter] = {}
        plan: dict[str, Any] = {}
        for name, style in self.plan.styles.items():
            whole_input = inputs[self.plan.region_of(name)]
            forward = {
                "column": partial(column_forward, whole_input),
                "fused": partial(fused_forward, mesh, whole_input, lambda: self._is_dividing),
                "gathered": partial(gathered_forward, whole_input),
                "row": partial(row_forward, mesh, whole_input),
                "vocab": partial(vocab_forward, mesh),
            }[style]
            plan[name] = DividedLayer(shard_dim(style), forward, self.group, divided)
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

    def _place_rest(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if not isinstance(parameter, DTensor):
                give_data(parameter, parameter.data.to(self.device))
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        rest: list[Tensor] = [p.data for p in model.parameters() if not isinstance(p, DTensor)]
        self.group.broadcast([*rest, *(buffer for buffer in model.buffers() if buffer.numel())])

    def distribute(self) -> None:
        """Pass this rank's parts to the optimiser, and group the gradients into messages for the data axis."""
        super().distribute()
        self._messages = list(_messages(self.trainable, self.options.bucket_bytes))
        undivided = [parameter for parameter in self.trainable if not self.shards.is_divided(parameter)]
        self._drifting = list(_messages(undivided, self.options.bucket_bytes)) if self._may_drift() else []

    # forward and backward

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own forward, and return its output as whole tensors."""
        with self._dividing():
            return undivided(forward(*args, **kwargs))

    @contextmanager
    def _dividing(self) -> Any:
        if self._is_dividing:
            yield
            return
        self._is_dividing = True
        try:
            with without_compilation(), self._values, counted_by(self.traffic):
                yield
        except (RuntimeError, NotImplementedError) as error:
            if not has_no_rule(error):
                raise
            raise TaskInvalid(
                "the model does something with divided values that DTensor has no rule for "
                f"({str(error).splitlines()[0]:.200}): say with --tensor-parallel.plan what to divide, leaving out, "
                "or making gathered, the column layers before that"
            ) from error
        finally:
            self._is_dividing = False

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate gradients of the parts; ranks of a tensor group compute the same microbatches together.

        Communication: that of the layers in each forward and backward, over the tensor group.
        """
        self.sums.begin(requests)
        self.traffic.sent_bytes = 0
        for microbatch in microbatches:
            term = self.loss_term(self.model, microbatch, global_samples)
            # checkpoints are recomputed in backward, so it must run in this thread
            with self._dividing(), torch.autograd.set_multithreading_enabled(False):
                run_backward(self.precision.scale(term.root))
            self.sums.add(term)

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use divided weights and values, and return its result undivided."""
        try:
            with self._dividing():
                return undivided(function(*args))
        except RuntimeError as error:
            if "functorch transforms" not in str(error):
                raise
            raise TaskInvalid(
                f"the task's {function.__name__} uses torch.func (vmap, grad, jacrev ...), which cannot go through "
                "divided layers: use ddp or fsdp"
            ) from error

    def sync_gradients(self) -> StepFacts:
        """Sum gradients over the data axis, and the facts over all ranks."""
        self.shards.take_gradients()
        flags = [float(parameter.grad is not None) for parameter in self.trainable]
        # filled on the device where that is possible: a copy of a list would wait for it
        drawn = torch.full((1,), self._draws(), dtype=self.sums.dtype, device=self.device)
        used = drawn.new_ones(len(flags)) if all(flags) else drawn.new_tensor(flags)
        beside = torch.cat([drawn, used])
        facts = reduced_facts(self, beside)
        if self.mesh.size("data") > 1:
            self._add_up_over_data()
        self._keep_undivided_alike()
        if not all(flags):
            # a parameter that no rank used has no gradient: a zero would still apply weight decay and momentum
            for parameter, by_any in zip(self.trainable, beside[1:].tolist(), strict=True):
                if not by_any:
                    parameter.grad = None
        self._check_draws(beside[:1])
        return facts

    def _add_up_over_data(self) -> None:
        """Sum gradients. Communication: one blocking all_reduce per `bucket_bytes` of gradients over the data axis."""
        _exchange_gradients(self._messages, self.mesh.group("data").all_reduce_sum)

    def _may_drift(self) -> bool:
        """Return whether gradients may differ in bits between ranks of a tensor group that compute the same.

        On an accelerator some kernels add in any order, and each rank chooses cuDNN's by its own timing.
        """
        is_reproducible = self.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        return self.mesh.size("tensor") > 1 and not is_reproducible

    def _keep_undivided_alike(self) -> None:
        """Copy the first rank's gradients of parameters that every rank of the tensor group has whole.

        Communication: one broadcast for each `bucket_bytes` of them over the tensor group, and one for each sparse
        gradient, on accelerators without deterministic algorithms.
        """
        group = self.mesh.group("tensor")
        messages = [[p for p in message if p.grad is None or not p.grad.is_sparse] for message in self._drifting]
        _exchange_gradients(filter(None, messages), lambda message: group.broadcast([message]))
        for parameter in (p for message in self._drifting for p in message):
            if parameter.grad is not None and parameter.grad.is_sparse:
                # of the same rows on all these ranks; each row once, so that the optimiser adds in one order
                parameter.grad = parameter.grad.coalesce()
                group.broadcast([parameter.grad.values()])

    # ranks of a tensor group must draw the same

    def _draws(self) -> float:
        """Return a fingerprint of the generators, weighted so that equal ones of a tensor group sum to 0."""
        states = [torch.default_generator.get_state()]
        if self.device.type != "cpu":
            states.append(default_generator(self.device).get_state())
        found = 0
        for state in states:
            found = zlib.crc32(state.numpy().tobytes(), found)
        found &= (1 << _DRAW_BITS) - 1
        return float(found if self.mesh.coordinate("tensor") else -found * (self.mesh.size("tensor") - 1))

    def _check_draws(self, total: Tensor) -> None:
        """Raise on all ranks if those of a tensor group have drawn differently; deferred on an accelerator.

        Raises:
            RanksDisagree: State that should be equal on these ranks would differ from then on.
        """
        now = DeferredRead(total)
        before = now if self.device.type == "cpu" else self._draws_before
        self._draws_before = now
        if before is not None and before.read() != [0.0]:
            raise RanksDisagree(
                "ranks of a tensor group did not draw the same random numbers: something in the model draws for "
                "divided values other than by functional.dropout, or on some ranks alone; draw on all ranks alike, or "
                "leave the layers before it whole with --tensor-parallel.plan"
            )

    # declarations, description, closing

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the row's declarations: with one data rank batches and draws are those of one device."""
        texts = super().declared_by_row(found)
        is_inside = {text: text.startswith("random numbers inside") for text in texts}
        return [text for text in texts if (self._values.have_own_draws if is_inside[text] else self.share.count > 1)]

    def describe(self) -> list[str]:
        """Return lines about the divided layers, and those that are not."""
        own, everything = share_bytes(self.model.parameters()), whole_bytes(self.model.parameters())
        lines = [
            f"{self.mesh.size('tensor')} ranks of a tensor group hold {format_bytes(own)} each of "
            f"{format_bytes(everything)} of parameters"
            + (f", in {self.share.count} groups" if self.share.count > 1 else "")
        ]
        for style, meaning in STYLES.items():
            if names := [name for name, given in self.plan.styles.items() if given == style]:
                lines.append(f"{style} ({meaning}): {shortened(names)}")
        if whole := whole_layers(self.model, self.plan):
            lines.append(f"whole on every rank: {shortened(whole)}")
        return lines + self.plan.notes

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes sent by the layers in this step, the gradients' sum over the data axis, and the facts."""
        data, tensor, everyone = self.mesh.size("data"), self.mesh.size("tensor"), self.group.world_size
        facts = (4 + 1 + len(self.trainable)) * self.sums.dtype.itemsize
        return (
            self.traffic.sent_bytes
            + 2 * (data - 1) * _bytes_of(self._messages) // data
            + (tensor - 1) * _bytes_of(self._drifting) // tensor
            + 2 * (everyone - 1) * facts // everyone
        )

    def close(self) -> None:
        """Restore torch's settings."""
        self._resources.close()


def _plan(model: nn.Module, num_ranks: int, options: TensorParallelOptions) -> TensorPlan:
    if options.plan is None:
        return find_plan(model, num_ranks)
    return read_plan(options.plan, model, num_ranks)


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
            "the layer whole with --tensor-parallel.plan"
        )


def _exchange_gradients(messages: Iterable[list[nn.Parameter]], exchange: Callable[[Tensor], None]) -> None:
    """Apply a collective to gradients, on one vector for each list of parameters."""
    for parameters in messages:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        message = torch.cat([gradient.reshape(-1) for gradient in gradients])
        exchange(message)
        parts = message.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = as_gradient_of(parameter, part)


def _bytes_of(messages: list[list[nn.Parameter]]) -> int:
    return sum(parameter.numel() * parameter.element_size() for message in messages for parameter in message)


def _messages(parameters: list[nn.Parameter], most_bytes: int) -> Iterable[list[nn.Parameter]]:
    """Yield the parameters in lists of one dtype and about `most_bytes` bytes."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        message: list[nn.Parameter] = []
        for parameter in same:
            message.append(parameter)
            if sum(p.numel() * p.element_size() for p in message) >= most_bytes:
                yield message
                message = []
        if message:
            yield message
