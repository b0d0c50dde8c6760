"""Fully sharded data parallelism: parameters, gradients and optimiser state divided over the ranks.

ZeRO stage 3 (Rajbhandari et al. 2020, section 5.3) by torch's `fully_shard` (Zhao et al. 2023, section 3; its second
version, whose parameters are DTensors). Before a unit of the model computes, its parameters are gathered from all
ranks, and freed afterwards. Backward gathers them again, and leaves each rank its shard of the summed gradient. With
`--no-fsdp.reshard-after-forward` they are kept from forward to backward, so that backward sends gradients only, as in
stage 2. With `--mesh replica=R,shard=S` R groups of S ranks each hold the whole, and shards are summed over the groups.

With `--mesh shard=S,tensor=T` groups of T ranks work on the same samples and divide layers as `tensor_parallel` does;
what each of them has of a parameter is divided again over S ranks.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from dure.comm.mesh import Mesh
from dure.errors import TaskInvalid
from dure.host.device_kinds import copies_beside
from dure.host.devices import resolve_device
from dure.spec import RunSpec
from dure.spec.mesh import parse_mesh
from dure.strategies.contract.batch_parts import DataShare
from dure.strategies.contract.batches import Microbatch, map_tensors
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.declarations import Findings
from dure.strategies.contract.reduced_facts import reduced_facts
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts
from dure.strategies.contract.watch.parameter_watch import ParameterWatch
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.division.local_shards import ShardedStrategy
from dure.strategies.sharded.fsdp_units import Unit, UnitCalls, find_units, has_batchnorm, parameter_bytes, unit_faults
from dure.strategies.sharded.options import FSDPOptions
from dure.strategies.sharded.outside_use import explained, without_shards
from dure.strategies.sharded.reached_parameters import ReachedParameters, is_sharded
from dure.strategies.state.batchnorm import convert_sync_batchnorm
from dure.strategies.state.module_patterns import shortened
from dure.strategies.state.objects.object_state import ObjectState
from dure.strategies.state.saved_state import StateSource, StrategyState
from dure.strategies.tensor_parallel.plan import axis_faults, needless_options, plan_of
from dure.strategies.tensor_parallel.tensor_division import TensorDivision
from dure.terminal import few
from dure.torchcompat.gradients import arguments_of_functions, run_backward
from dure.torchcompat.modules import reduce_unused_too
from dure.torchcompat.tensors import give_data, own_attributes, read_whole_numbers
from dure.units import format_bytes

AXES = ("replica", "shard", "tensor")

_MESSAGE_BYTES = 25 << 20
"""Bytes of a message of gradients that ranks of a tensor group make the same."""

_GATHERED = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REDUCED = {"bf16": torch.bfloat16, "fp32": torch.float32}

_aten = torch.ops.aten
_DEAR = [
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.convolution.default),
    *(
        getattr(_aten, f"_scaled_dot_product_{kind}").default
        for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
    ),
]
"""Operators whose results `recompute` cheap keeps."""


class ObjectiveModule(nn.Module):
    """Task's loss as the root of the sharded modules, so that the task may use the model in any way.

    Parameters outside the units belong to it. They are gathered before the loss is computed and kept until backward is
    done with them, so that the task can use them anywhere, and not only in the model's own forward.
    """

    def __init__(self, model: nn.Module, loss_term: Callable[[nn.Module, Microbatch, int], LossTerm]) -> None:
        super().__init__()
        self.model = model
        self._loss_term = loss_term
        self.term: LossTerm | None = None

    def forward(self, microbatch: Microbatch | None, global_samples: int) -> Tensor | None:
        """Return the tensor from which backward starts; without a microbatch only make the modules find their root."""
        if microbatch is None:
            return None
        self.term = self._loss_term(self.model, microbatch, global_samples)
        return _without_base(self.term.root)


class FSDP(ShardedStrategy):
    """`fully_shard` over repeated blocks and over the model."""

    options: FSDPOptions

    rules = WeightRules(
        sparse_gradients="none",
        changes_in_step_only=True,
        follows_groups=False,
        freezing="refused",
        undoes_writes=True,
        divides_gradients=True,
        divides_state=True,
        divides_groups=True,
    )

    @classmethod
    def check_model(cls, model: nn.Module, spec: RunSpec) -> list[str]:
        """Refuse models that cannot be sharded, and settings without effect."""
        options = FSDPOptions.of(spec)
        faults = [] if options.units is None else list(unit_faults(model, options.units))
        faults += [
            f"{name} gives sparse gradients (sparse=True), which have no shards: set sparse=False, or use ddp"
            for name, module in model.named_modules()
            if getattr(module, "sparse", False) is True
        ]
        faults += [
            f"the parameter {name} has no elements, which fully_shard does not take: leave it out, or use ddp"
            for name, parameter in model.named_parameters()
            if not parameter.numel()
        ]
        units = [] if faults else find_units(model, options.units)
        for name, module in [*((unit.name, unit.module) for unit in units), ("", model)]:
            faults += _dtype_faults(name, module, {unit.module for unit in units})
        if options.activation_checkpointing and not faults and all(unit.has_batchnorm for unit in units):
            faults.append(
                "activation_checkpointing finds no unit to compute twice (one with BatchNorm would count its batch "
                "twice): name some with --fsdp.units, or leave it out"
            )
        axes = _axes(spec, spec.num_devices)
        if axes["tensor"] > 1:
            settings = {
                "compile": spec.compile,
                "sync_batchnorm": spec.sync_batchnorm,
                "cpu_offload": options.cpu_offload,
            }
            faults += axis_faults(model, axes["tensor"], options.tensor_plan, settings, "replica and shard")
        else:
            faults += needless_options("shard", options.tensor_plan, is_sequence_parallel=options.sequence_parallel)
        num_shards = axes["shard"]
        if options.reshard_size is not None and (
            num_shards % options.reshard_size or options.reshard_size == num_shards
        ):
            faults.append(
                f"reshard_size is {options.reshard_size}, and parameters are divided over {num_shards} ranks: choose a "
                "smaller number that divides it, or leave it out"
            )
        if options.prefetch is not None and not faults and len(units) < 2:
            faults.append(
                "prefetch gathers units ahead of others, and the model has fewer than two: name some with --fsdp.units,"
                " or leave it out"
            )
        if options.cpu_offload and (kind := resolve_device(spec.device)) == "cpu":
            faults.append(
                f"cpu_offload moves shards from the device to host memory, and the device is {kind}: leave it out"
            )
        return faults

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._axes = _axes(self.spec, self.group.world_size)
        self.division: TensorDivision | None = None
        """Division of layers, if the mesh has several ranks along its axis `tensor`."""
        num_alike = self._axes["tensor"]
        self.random_stream, position = divmod(self.group.rank, num_alike)
        num_shares = self.group.world_size // num_alike
        self.take_share(DataShare(index=self.random_stream, count=num_shares, leads=position == 0, is_joint=True))

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse units that ranks may use differently often, and to compute twice those that change their own state."""
        faults = super().check_traits(model)
        units = [] if faults else self._find_units(model)
        if varying := [unit.name for unit in units if self._varies(unit)]:
            faults.append(
                f"some calls of the model use {few(varying)} and others do not, by chance or depending on data, but "
                "all ranks must gather the same units at the same time: leave out --fsdp.units, or use ddp"
            )
        if self.options.activation_checkpointing and units and not self._can_be_recomputed(units):
            changed = few([path for unit in units for path in self._changed_in(unit)])
            faults.append(
                f"activation_checkpointing finds no unit to compute twice, because {changed} would change twice: name "
                "other units with --fsdp.units, or leave it out"
            )
        return faults

    def _find_units(self, model: nn.Module) -> list[Unit]:
        """Return the units; of those that were found, without the ones that ranks may use differently often."""
        units = find_units(model, self.options.units)
        return [unit for unit in units if self.options.units is not None or not self._varies(unit)]

    def _varies(self, unit: Unit) -> bool:
        return self.group.world_size > 1 and unit.name in self.traits.varying_modules

    def place(self, model: nn.Module) -> nn.Module:
        """Shard the model, starting with the units; 0-dim parameters stay whole, having no dimension to divide."""
        if self.spec.sync_batchnorm:
            model = convert_sync_batchnorm(model, self.device)
        read_whole_numbers()  # the loss may use weights of a unit, which are divided outside of it
        self.mesh = Mesh(self._axes, self.group, self.device, divides_tensors=True)
        self.shard_groups = {axis: self.mesh.group(axis) for axis in ("shard", "tensor")}
        self.units = self._find_units(model)
        self.scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
        for scalar in self.scalars:
            give_data(scalar, scalar.data.to(self.device))
        self.group.broadcast([scalar.data for scalar in self.scalars])
        for buffer in model.buffers():  # fully_shard would, which fails on kinds of devices from outside
            give_data(buffer, buffer.to(self.device))
        self._parameter_bytes = parameter_bytes(model)
        if self.mesh.size("tensor") > 1:
            plan = plan_of(model, self.mesh.size("tensor"), self.options.tensor_plan)
            self.division = TensorDivision(
                plan, self.mesh, self.group, self.device, is_sequence_parallel=self.options.sequence_parallel
            )
            self.division.divide(model)
        self._change_forwards(model)
        self.gathered = [self._shard(unit.module, is_root=False) for unit in reversed(self.units)]
        self.objective = ObjectiveModule(model, self.loss_term)
        self.gathered.append(self._shard(self.objective, is_root=True))
        # for uses of the model without its objective, in an evaluation
        model.register_forward_pre_hook(lambda module, inputs: self._gather_root())
        self.group.broadcast([buffer for buffer in model.buffers() if buffer.numel()])
        return model

    def _change_forwards(self, model: nn.Module) -> None:
        """Compile units, which is what runs between the hooks of fully_shard, and let them compute activations twice.

        What is recomputed is compiled code, and not the other way round: a compiler cannot trace all of a checkpoint.
        """
        if self.spec.compile:
            for module in self._compiled_modules(model):
                module.forward = torch.compile(module.forward, mode=self.spec.compile_mode)
        if self.options.activation_checkpointing:
            contexts = noop_context_fn
            if self.options.recompute == "cheap":
                contexts = functools.partial(create_selective_checkpoint_contexts, _DEAR)
            for unit in self._recomputed_units():
                unit.module.forward = functools.partial(_recomputed, unit.module.forward, contexts)

    def _compiled_modules(self, model: nn.Module) -> list[nn.Module]:
        """Return the units without units inside of them, whose hooks the compiler cannot trace; else the model."""
        units = [unit.module for unit in self.units]
        return [unit for unit in units if not {*unit.modules()} & ({*units} - {unit})] or [model]

    def _recomputed_units(self) -> list[Unit]:
        return self._can_be_recomputed(self.units)[:: self.options.recompute_every]

    def _can_be_recomputed(self, units: Sequence[Unit]) -> list[Unit]:
        return [unit for unit in units if not unit.has_batchnorm and not self._changed_in(unit)]

    def _changed_in(self, unit: Unit) -> list[str]:
        """Return buffers and counters of a unit that the loss was seen to change; other plain state is declared."""
        traits = self.traits
        counters = [path.removeprefix("model.") for path in traits.counted_state if path.startswith("model.")]
        changed = dict.fromkeys((*traits.learned_buffers, *traits.counted_buffers, *traits.model_buffers, *counters))
        return [path for path in changed if path.startswith(f"{unit.name}.")]

    def _reshard_after_forward(self) -> bool | int:
        return self.options.reshard_size or self.options.reshard_after_forward

    def _prefetch(self, ahead: int) -> None:
        """Gather units before they are needed, in the order of the model's modules, which most forwards follow."""
        modules: list[Any] = [unit.module for unit in self.units]
        root: Any = self.objective
        root.set_modules_to_forward_prefetch(modules[:ahead])
        for i, module in enumerate(modules):
            module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + ahead])
            module.set_modules_to_backward_prefetch(modules[max(0, i - ahead) : i][::-1])

    def _shard(self, module: nn.Module, *, is_root: bool) -> "Gathered":
        """Shard the parameters of a module that are in none of its units, with rank 0's values.

        Communication: a broadcast of each parameter from rank 0. Whole parameters are on the device one unit at a time.
        """
        ignored = set(self.scalars)
        own = [p for p in module.parameters() if not is_sharded(p) and p not in ignored]
        whole = [p for p in own if not isinstance(p, DTensor)]  # the others have rank 0's values already
        for parameter in whole:
            give_data(parameter, parameter.data.to(self.device).contiguous())
        self.group.broadcast([parameter.data for parameter in whole])
        lowered = None if has_batchnorm(module) else _GATHERED.get(self.precision.name)
        gathered = Gathered(own, self.mesh, lowered, self._reduce_dtype(lowered), self.options.reshard_size)
        attributes = {name: own_attributes(p) for name, p in module.named_parameters() if vars(p)}
        if not is_root:
            module.register_forward_hook(lambda module, inputs, outputs: map_tensors(outputs, _without_base))
        self._fully_shard(
            module,
            reshard_after_forward=not is_root and self._reshard_after_forward(),
            # Parameters are gathered in half precision, and the shards stay in their own. With autocast alone, each
            # unit would keep its casts of parameters until backward, and nothing would be freed after forward. The
            # model's inputs are not cast: only autocast knows which of them may be rounded.
            mp_policy=MixedPrecisionPolicy(
                param_dtype=lowered,
                reduce_dtype=self._reduce_dtype(lowered),
                cast_forward_inputs=not is_root,
            ),
            ignored_params=ignored,
        )
        for name, parameter in module.named_parameters():
            vars(parameter).update(attributes.get(name, {}))
        return gathered

    def _reduce_dtype(self, lowered: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype in which gradients are added up; None for that of the parameters."""
        if self.options.reduce_dtype is not None:
            return _REDUCED[self.options.reduce_dtype]
        return None if lowered is None else torch.float32

    def _fully_shard(self, module: nn.Module, **settings: Any) -> None:
        device_mesh = self.mesh.device_mesh
        assert device_mesh is not None
        fully_shard(
            module,
            mesh=device_mesh["replica", "shard"] if self.mesh.size("replica") > 1 else device_mesh["shard"],
            offload_policy=self._offload_policy(),
            **settings,
        )
        kind: Any = type(module)
        kind.__deepcopy__ = _refuse_copy

    def _offload_policy(self) -> OffloadPolicy:
        if not self.options.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=copies_beside(self.device.type))

    def distribute(self) -> None:
        """Record which parameters are used, and pass the shards to the optimiser."""
        self._refuse_changes()
        # gradients are only summed: every loss is already divided by the global count
        for module in self._sharded():
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        shards = {id(parameter) for parameter in self.model.parameters() if is_sharded(parameter)}
        self._resources = ExitStack()
        self._resources.enter_context(arguments_of_functions(functools.partial(without_shards, shards)))
        self._own_scalars = [parameter for parameter in self.trainable if parameter.dim() == 0]
        fills_unused = not all(reduce_unused_too(module) for module in self._sharded())
        self.reached = ReachedParameters(self.model, self.trainable, fills_unused=fills_unused)
        for unit in self.units:
            self.reached.watch_when_gathered(f"{unit.name}.", unit.module, unit.module)
        self.reached.watch_when_gathered("", self.model, self.objective)
        # a compiler would trace the hooks
        is_watched = bool(self.units) and self.group.world_size > 1 and not self.spec.compile
        self._unit_calls = UnitCalls(self.units, self.group) if is_watched else None
        self._is_accumulating = False
        self.objective(None, 1)
        self._reshard()
        super().distribute()
        if self.division is not None:
            undivided = [parameter for parameter in self.trainable if "tensor" not in self.shards.axes_of(parameter)]
            self.division.watch_undivided(undivided, _MESSAGE_BYTES)
        if self.options.prefetch is not None:
            self._prefetch(self.options.prefetch)

    def _refuse_changes(self) -> None:
        """Refuse parameters that `build_optimizer` added to a sharded model, and copies that it made of others."""
        added = [name for name, p in self.model.named_parameters() if p.dim() and not isinstance(p, DTensor)]
        if added:
            raise TaskInvalid(
                f"build_optimizer adds or replaces parameters ({few(added)}), and fsdp divides the model before it: do "
                "that in build_model, or use ddp"
            )
        own = {id(parameter) for parameter in self.model.parameters()}
        for path, value in ObjectState(self.objects).first.items():
            tensors = value.parameters() if isinstance(value, nn.Module) else [value]
            if any(isinstance(tensor, DTensor) and id(tensor) not in own for tensor in tensors):
                raise TaskInvalid(
                    f"build_optimizer left a copy of weights in {path}, which under fsdp has shards in their place: "
                    "make it in build_model, where weights are whole, or use ddp"
                )

    def compile_model(self) -> None:
        """Do nothing more: `place` has told what to compile, before the parameters were divided."""

    def watched_parameters(self) -> ParameterWatch:
        """Watch the parameters that exist when the loss is called: gathered ones outside the units, and shards."""
        return ParameterWatch(
            self.model, self.info.name, sees_writes=self.rules.undoes_writes, named=self.model.named_parameters
        )

    def _sharded(self) -> list[Any]:
        """Return the sharded modules, as extended by fully_shard."""
        return [*(unit.module for unit in self.units), self.objective]

    def _gather_root(self) -> None:
        root: Any = self.objective
        root.unshard()

    def forward_backward(self, microbatches: Iterable[Microbatch], *, global_samples: int, requests: Requests) -> None:
        """Accumulate whole gradients without communication; the last microstep's backward sums and shards them.

        Communication: per unit and microstep one all_gather in forward and, unless parameters are kept, one in
        backward; per unit and step one reduce_scatter, and with several replicas one all_reduce of the shards.
        """
        self.sums.begin(requests)
        self.reached.begin_step()
        if self._unit_calls is not None:
            self._unit_calls.begin_step()
        if self.division is not None:
            self.division.traffic.sent_bytes = 0
        pending = iter(microbatches)
        microbatch: Microbatch | None = next(pending)
        while microbatch is not None:
            following = next(pending, None)
            self._accumulate(following is not None)
            with explained():
                with self._dividing():
                    root = self.objective(microbatch, global_samples)
                with self._dividing(is_backward=True):
                    run_backward(self.precision.scale(root))
            assert self.objective.term is not None
            self.sums.add(self.objective.term)
            self.objective.term = None
            microbatch = following

    def _dividing(self, *, is_backward: bool = False) -> AbstractContextManager[None]:
        """Return the context in which divided layers compute."""
        if self.division is None:
            return nullcontext()
        return self.division.differentiating() if is_backward else self.division.dividing()

    def computed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the task, which may use divided weights and values, and return its result undivided."""
        return super().computed(function, *args) if self.division is None else self.division.computed(function, *args)

    def _accumulate(self, is_accumulating: bool) -> None:
        if is_accumulating == self._is_accumulating:
            return
        root: Any = self.objective
        root.set_requires_gradient_sync(not is_accumulating)
        if not self.options.reshard_after_forward:
            root.set_reshard_after_backward(not is_accumulating)  # parameters that are kept are kept for the whole step
        self._is_accumulating = is_accumulating

    def sync_gradients(self) -> StepFacts:
        """Sum what fully_shard does not: the gradients of 0-dim parameters, flags of used parameters, and the facts."""
        self.shards.take_gradients()
        if self.division is not None:
            self.division.keep_alike()
        is_all_reached, used = self.reached.used(self.sums.dtype, self.device)
        # of ranks with the same samples, which have the same gradients, the first one's count
        own = [p.grad if self.share.leads else None for p in self._own_scalars]
        scalars = [torch.zeros(1, dtype=used.dtype) if gradient is None else gradient.reshape(1) for gradient in own]
        drawn = [] if self.division is None else [used.new_full((1,), self.division.draws())]
        called = [] if self._unit_calls is None else [used.new_full((1,), self._unit_calls.fingerprint())]
        together = torch.cat([*called, used, *(scalar.to(used) for scalar in scalars), *drawn])
        check = None if self._unit_calls is None else self._unit_calls.check
        facts = reduced_facts(self, together, num_checked=len(called), check=check)
        beside = together[len(called) :]
        if self.division is not None:
            self.division.check_draws(beside[-1:])
        if self.options.cpu_offload and self.expectation is not None:
            self.sums.count = float(self.sums.count)  # offloaded gradients are on the host and are multiplied there
        for parameter, gradient in zip(self._own_scalars, beside[len(self.trainable) :], strict=False):
            parameter.grad = gradient.to(parameter)
        if not is_all_reached:
            # a parameter that no rank used has no gradient: a zero would still apply weight decay and momentum
            for parameter, by_any in zip(self.trainable, beside.tolist(), strict=False):
                if not by_any:
                    parameter.grad = None
        return facts

    def optimizer_step(self) -> None:
        """Step the shards, and let parameters, gathered or not, have another version, as code that caches expects."""
        super().optimizer_step()
        self.reached.increment_versions()

    def evaluation_models(self) -> list[nn.Module]:
        """Return the model, with the parameters outside its units gathered.

        Communication: one all_gather of these.
        """
        self._gather_root()
        return [self.model]

    def state_dict(self) -> StrategyState:
        """Free the gathered parameters, and return this rank's shards."""
        self._reshard()
        return super().state_dict()

    def load_state_dict(self, source: StateSource) -> None:
        """Load the parts of a checkpoint that this rank's shards need."""
        self._reshard()
        super().load_state_dict(source)

    def _reshard(self) -> None:
        for module in self._sharded():
            module.reshard()

    def declared_by_row(self, found: Findings) -> list[str]:
        """Return the row's declarations: with one share of the data, statistics and draws are those of one device."""
        has_own_draws = self.division is not None and self.division.values.have_own_draws
        return [
            text
            for text in super().declared_by_row(found)
            if (
                has_own_draws
                if text.startswith("random numbers inside")
                else self.share.count > 1 or not text.startswith(("BatchNorm", "random numbers"))
            )
        ]

    def not_preserved(self) -> list[str]:
        """Return the differences from the one-device run; those of half precision only if it is used."""
        texts = super().not_preserved()
        own = {parameter.dtype for parameter in self.trainable}
        reduced = self.options.reduce_dtype
        if reduced is not None and any(dtype.itemsize > _REDUCED[reduced].itemsize for dtype in own):
            texts.append(f"reduce_dtype is {reduced}: gradients are rounded to it, and added up in it")
        return [text for text in texts if self.precision.name in _GATHERED or not text.startswith("bf16")]

    def describe(self) -> list[str]:
        """Return lines about the units that are gathered together, and what a rank keeps."""
        sizes = [gathered.num_bytes for gathered in self.gathered]
        num_shards = self.mesh.size("shard")
        when = "only while it computes" if self.options.reshard_after_forward else "from forward to backward"
        if self.options.reshard_size is not None:
            when += f", then divided over {self.options.reshard_size} ranks until backward"
        lines = [
            f"{format_bytes(self._parameter_bytes)} of parameters in {num_shards} shard(s)"
            + (f" and {self.mesh.size('replica')} replicas" if self.mesh.size("replica") > 1 else "")
        ]
        if self.division is not None:
            lines[0] += f", of what each of {self.mesh.size('tensor')} ranks of a tensor group has"
            lines += self.division.describe(self.model)
        if self.units:
            names = shortened(unit.name for unit in self.units)
            lines.append(f"units, each whole {when}: {names} (at most {format_bytes(max(sizes[:-1]))})")
        lines.append(f"gathered once per microstep: {format_bytes(sizes[-1])} outside the units")
        if self.options.activation_checkpointing:
            twice = shortened(unit.name for unit in self._recomputed_units())
            kept = "activations not kept" if self.options.recompute == "all" else "only results of products kept"
            lines.append(f"forward computed twice, {kept}: {twice}")
        return lines

    def sent_bytes(self, num_microsteps: int) -> int:
        """Return the bytes of all gathers and reductions, and of the facts."""
        keeps = not self.options.reshard_after_forward
        world_size = self.group.world_size
        num_facts = 4 + len(self.trainable) + len(self._own_scalars)
        num_facts += (self.division is not None) + (self._unit_calls is not None)
        facts_bytes = 2 * (world_size - 1) * num_facts * self.sums.dtype.itemsize // world_size
        gathers = sum(unit.gather_bytes for unit in self.gathered)
        if not keeps:
            gathers = num_microsteps * (gathers + sum(unit.regather_bytes for unit in self.gathered[:-1]))
        layers = 0 if self.division is None else self.division.sent_bytes()
        return gathers + sum(gathered.reduce_bytes for gathered in self.gathered) + facts_bytes + layers

    def close(self) -> None:
        """Release the sharded modules before the process group is destroyed."""
        del self.objective
        self._resources.close()
        if self.division is not None:
            self.division.close()


class Gathered:
    """Parameters that are gathered in one message, and whose gradients are reduced in one."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        lowered: torch.dtype | None,
        reduced: torch.dtype | None,
        reshard_size: int | None,
    ) -> None:
        """Count the bytes.

        Args:
            parameters: Parameters, not yet sharded, possibly divided over a tensor group.
            mesh: Mesh with the axes `replica` and `shard`.
            lowered: Dtype in which they are gathered; None for their own.
            reduced: Dtype in which their gradients are added up; None for their own.
            reshard_size: Ranks from which they are gathered in backward; None for all.
        """
        num_shards, num_replicas = mesh.size("shard"), mesh.size("replica")
        wholes = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.num_bytes = sum(p.numel() * p.element_size() for p in wholes)
        """Bytes of the parameters that this rank has while it computes."""
        # every shard is padded to the length of the first, which is the longest
        shards = [(p, -(-p.size(0) // num_shards) * (p.numel() // p.size(0) if p.numel() else 0)) for p in wholes]
        self.gather_bytes = (num_shards - 1) * sum(n * (lowered or p.dtype).itemsize for p, n in shards)
        """Bytes that each rank sends for one all_gather."""
        size = reshard_size or num_shards
        self.regather_bytes = self.gather_bytes // (num_shards - 1 or 1) * (num_shards // size) * (size - 1)
        """Bytes that each rank sends for the all_gather in backward."""
        num_reduced = sum(n * (reduced or p.dtype).itemsize for p, n in shards if p.requires_grad)
        self.reduce_bytes = (num_shards - 1) * num_reduced + 2 * (num_replicas - 1) * num_reduced // num_replicas
        """Bytes that each rank sends for the reduce_scatter and the all_reduce over replicas."""


def _axes(spec: RunSpec, num_devices: int) -> dict[str, int]:
    return parse_mesh(spec.mesh, AXES, num_devices, main="shard")


def _recomputed(forward: Callable[..., Any], contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, saving only its inputs for backward (Chen et al. 2016, section 4).

    Args:
        forward: Its forward.
        contexts: Function that returns the contexts in which it is computed, and computed again.
        *args: Positional arguments of forward.
        **kwargs: Keyword arguments of forward.
    """
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _without_base(tensor: Tensor) -> Tensor:
    """Copy a view: if the caller changed it in place, it would lose the hook that gathers for backward."""
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor


def _refuse_copy(*_: Any) -> NoReturn:
    raise TaskInvalid(
        "the task copies the model or a part of it (copy.deepcopy), which under fsdp has shards in place of weights: "
        "make the copy in build_model, where they are whole, or use ddp"
    )


def _dtype_faults(name: str, module: nn.Module, units: set[nn.Module]) -> list[str]:
    """Refuse a unit whose trained parameters have several dtypes: its gradients are sent in one message."""
    inner = {id(p) for unit in units if unit is not module and unit in set(module.modules()) for p in unit.parameters()}
    own = [p for p in module.parameters() if id(p) not in inner and p.requires_grad and p.dim()]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in own})
    if len(dtypes) < 2:
        return []
    where = f"the module {name}" if name else "the model, outside its units,"
    return [f"{where} trains parameters in {' and '.join(dtypes)}, which cannot share a message: use one, or ddp"]
