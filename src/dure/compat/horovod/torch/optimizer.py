"""Optimisers that reduce gradients over ranks while the backward pass goes on."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.common.basics import size
from dure.compat.horovod.common.process_sets import ProcessSet, global_process_set
from dure.compat.horovod.engine.requests import ADASUM, AVERAGE
from dure.compat.horovod.torch.compression import Compression
from dure.compat.horovod.torch.functions import broadcast_object
from dure.compat.horovod.torch.handles import synchronize
from dure.compat.horovod.torch.reductions import allreduce_async_, grouped_allreduce_async_, sparse_allreduce_async

_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally."
)
_ZERO_GRAD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition."
)
_NO_SKIP = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "Gradients are reduced twice: use the context."
)
Pending = tuple[Any, Any]
"""Handle of a reduction, or a function that waits, with what its compression needs; None and None before it began."""


class _Base(torch.optim.Optimizer):
    """Common part, mixed into the optimiser's own class: names of parameters, counts of backward passes, hooks."""

    def _set_up(
        self, named_parameters: Iterable[tuple[str, Tensor]] | None, compression: Any, backward_passes_per_step: int
    ) -> None:
        self._compression = compression
        self._parameter_names = self._named(named_parameters)
        self.backward_passes_per_step = backward_passes_per_step
        self._allreduce_delay = dict.fromkeys(self._parameter_names, backward_passes_per_step)
        self._handles: dict[Any, Pending] = {}
        self._requires_update: set[Tensor] = set()
        self._synchronized = False
        self._should_synchronize = True
        self._hooks: list[Any] = []

    def _named(self, named_parameters: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
        """Return the name of each parameter.

        Raises:
            ValueError: They are no pairs, a name occurs twice, or one has none.
        """
        own = [each for group in self.param_groups for each in group["params"]]
        if named_parameters is None:
            pairs = [
                (f"allreduce.noname.{i}.{j}", each)
                for i, group in enumerate(self.param_groups)
                for j, each in enumerate(group["params"])
            ]
        else:
            pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) for pair in pairs):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                "model.named_parameters()."
            )
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(
                f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
            )
        named = {id(parameter) for _, parameter in pairs}
        unnamed = [id(each) for each in own if id(each) not in named]
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named. Python object ids: "
                f"{', '.join(map(str, unnamed))}"
            )
        return {parameter: name for name, parameter in pairs}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes before a step."""
        self.backward_passes_per_step = passes
        for parameter in self._allreduce_delay:
            self._allreduce_delay[parameter] = passes

    def _add_hook(self, parameter: Tensor) -> None:
        self._requires_update.add(parameter)
        self._hooks.append(parameter.register_post_accumulate_grad_hook(self._after_gradient))

    def _take_new_parameters(self) -> None:
        """Reduce gradients also of parameters that were added, or are trained only since the start."""
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._requires_update:
                    self._parameter_names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                    self._allreduce_delay.setdefault(parameter, self.backward_passes_per_step)
                    self._add_hook(parameter)

    def _misses(self, parameter: Tensor) -> bool:
        """Return whether a step needs a gradient that was not computed; a frozen parameter needs none."""
        return parameter in self._requires_update and parameter.requires_grad

    def _after_gradient(self, parameter: Tensor) -> None:
        """Count the backward pass; after the last one before the step, begin to reduce the gradient."""
        delay = self._allreduce_delay[parameter]
        if delay <= 0:
            raise AssertionError(_TOO_MANY)
        self._allreduce_delay[parameter] = delay - 1
        if delay == 1:
            self._begin(parameter)
        else:
            self._handles[parameter] = None, None

    def _begin(self, parameter: Tensor) -> None:
        raise NotImplementedError

    def step_locally(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the optimiser's own step, without the other ranks."""
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: They are being reduced.
        """
        if self._handles:
            raise AssertionError(_ZERO_GRAD)
        super().zero_grad(*args, **kwargs)


class _DistributedOptimizer(_Base):
    """Optimiser whose gradients are reduced."""

    def _set_up_reduction(
        self,
        op: int,
        gradient_predivide_factor: float,
        groups: Any,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        _check_groups(groups)
        self._groups = groups
        self._p_to_group: dict[Tensor, tuple[Tensor, ...]] = {}
        self._group_counts: dict[tuple[Tensor, ...], int] = {}
        self._is_distributed = process_set.included() and (size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")
        if self._is_distributed:
            self._register_hooks()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; reductions that have begun are forgotten."""
        self._handles = {}
        self._synchronized = False
        self._should_synchronize = True
        self.set_backward_passes_per_step(self.backward_passes_per_step)
        super().load_state_dict(*args, **kwargs)

    def _register_hooks(self) -> None:
        trained = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        if self._groups is not None:
            self._form_groups(trained)
        for parameter in trained:
            self._add_hook(parameter)

    def _form_groups(self, trained: list[Tensor]) -> None:
        """Divide the parameters into groups that are reduced as one, in rank 0's order of names."""
        names = [self._parameter_names[each] for each in trained]
        order = broadcast_object(names, root_rank=(self.process_set.ranks or [0])[0], process_set=self.process_set)
        positions = {name: position for position, name in enumerate(order)}
        trained = sorted(trained, key=lambda each: positions[self._parameter_names[each]])
        if isinstance(self._groups, list):
            ids = {id(each) for each in trained}
            groups = [tuple(each for each in group if id(each) in ids) for group in self._groups]
            grouped = {id(each) for group in groups for each in group}
            groups += [(each,) for each in trained if id(each) not in grouped]
        else:
            few, more = divmod(len(trained), self._groups) if self._groups else (0, 0)
            ends = [index * few + min(index, more) for index in range(self._groups + 1)]
            groups = [tuple(trained[begin:end]) for begin, end in pairwise(ends)]
        for group in filter(None, groups):
            self._group_counts[group] = 0
            for parameter in group:
                self._p_to_group[parameter] = group
        if not self._p_to_group:
            self._groups = None

    def _begin(self, parameter: Tensor) -> None:
        group = self._p_to_group.get(parameter)
        if group is None:
            self._handles[parameter] = self._reduce(parameter)
            return
        self._handles[parameter] = None, None
        self._group_counts[group] += 1
        if self._group_counts[group] == len(group):
            self._group_counts[group] = 0
            for member in group:
                self._handles.pop(member, None)
            self._handles[group] = self._reduce_group(group)

    def _factors(self) -> dict[str, Any]:
        """Return factors before and after the sum, into which a predivided mean is split."""
        if self.op != AVERAGE or self.gradient_predivide_factor == 1.0:
            return {}
        return {
            "prescale_factor": 1.0 / self.gradient_predivide_factor,
            "postscale_factor": self.gradient_predivide_factor,
        }

    def _reduce(self, parameter: Tensor) -> Pending:
        if parameter.grad is None:  # another rank may have one, and waits for this
            parameter.grad = torch.zeros_like(parameter)
        name = self._parameter_names[parameter]
        gradient = parameter.grad
        if gradient.is_sparse:
            if not self.sparse_as_dense:
                return sparse_allreduce_async(gradient, name, self.op, self.process_set), None
            gradient = gradient.to_dense()
        sent, context = self._compression.compress(_contiguous(gradient))
        handle = allreduce_async_(sent, name=name, op=self.op, process_set=self.process_set, **self._factors())
        return handle, context

    def _reduce_group(self, group: tuple[Tensor, ...]) -> Pending:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in group]
        dense = [each.to_dense() if each.is_sparse else _contiguous(each) for each in gradients]
        pairs = [self._compression.compress(each) for each in dense]
        handle = grouped_allreduce_async_(
            [sent for sent, _ in pairs],
            name=self._parameter_names[group[0]],
            op=self.op,
            process_set=self.process_set,
            **self._factors(),
        )
        return handle, [context for _, context in pairs]

    def synchronize(self) -> None:
        """Wait until all gradients are reduced; those that were not computed count as zero."""
        if not self.process_set.included():
            self._synchronized = True
            return
        if self._is_distributed:
            self._take_new_parameters()
        begun = {each for key in self._handles for each in (key if isinstance(key, tuple) else (key,))}
        for parameter in [*self._parameter_names]:
            if self._misses(parameter) and parameter not in begun:
                self._handles[parameter] = None, None
        self._complete_groups()
        for key, (handle, _) in [*self._handles.items()]:
            if handle is None:
                self._handles[key] = self._reduce(key)
        for key, (handle, context) in self._handles.items():
            if isinstance(key, tuple):
                for parameter, output, one in zip(key, synchronize(handle), context, strict=True):
                    self._receive(parameter, self._compression.decompress(output, one))
                continue
            output = handle() if callable(handle) else synchronize(handle)
            self._receive(key, output if callable(handle) else self._compression.decompress(output, context))
        self._handles.clear()
        self._synchronized = True

    def _complete_groups(self) -> None:
        """Begin the groups of which some gradients were not computed: other ranks wait for whole groups."""
        open_groups = dict.fromkeys(
            self._p_to_group[key] for key, (handle, _) in self._handles.items()
            if not isinstance(key, tuple) and handle is None and key in self._p_to_group
        )  # fmt: skip
        for group in open_groups:
            self._group_counts[group] = 0
            for member in group:
                self._handles.pop(member, None)
            self._handles[group] = self._reduce_group(group)

    def _receive(self, parameter: Tensor, reduced: Tensor) -> None:
        self._allreduce_delay[parameter] = self.backward_passes_per_step
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and not reduced.is_sparse:
            reduced = reduced.to_sparse(gradient.sparse_dim())
        if gradient is None and not parameter.requires_grad:
            return  # frozen since its group was formed
        if gradient is None or gradient.is_sparse:
            parameter.grad = reduced
        elif reduced is not gradient:
            gradient.data.copy_(reduced)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` reduce nothing, after `synchronize` has done so."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless that is skipped, and make the optimiser's step."""
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_NO_SKIP, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        return self.step_locally(closure)


class _DistributedAdasumOptimizer(_Base):
    """Optimiser whose changes of parameters are combined by Adasum."""

    def _set_up_reduction(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    self._add_hook(parameter)

    def _begin(self, parameter: Tensor) -> None:
        """Make the optimiser's step for one parameter, and begin to combine the change."""
        start = parameter.detach().clone()
        groups = [group["params"] for group in self.param_groups]
        for group, members in zip(self.param_groups, groups, strict=True):
            group["params"] = [parameter] if any(each is parameter for each in members) else []
        try:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.step_locally()
        finally:
            for group, members in zip(self.param_groups, groups, strict=True):
                group["params"] = members
        change = parameter.detach() - start
        sent, context = self._compression.compress(_contiguous(change))
        handle = allreduce_async_(sent, name=self._parameter_names[parameter], op=ADASUM)
        self._handles[parameter] = handle, (context, start)

    def synchronize(self) -> None:
        """Do nothing: changes are combined in `step`."""

    def skip_synchronize(self) -> Any:
        """Refuse: changes are combined in `step`.

        Raises:
            AssertionError: Always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the changes of all ranks, and apply them."""
        loss = None if closure is None else closure()
        self._take_new_parameters()
        for parameter in [*self._parameter_names]:
            waits = parameter in self._handles and self._handles[parameter][0] is not None
            if self._misses(parameter) and not waits:
                self._begin(parameter)
        for parameter, (handle, (context, start)) in self._handles.items():
            change = self._compression.decompress(synchronize(handle), context)
            with torch.no_grad():
                parameter.copy_(start + change)
            self._allreduce_delay[parameter] = self.backward_passes_per_step
        self._handles.clear()
        return loss


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _check_groups(groups: Any) -> None:
    if groups is None:
        return
    if not isinstance(groups, list):
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[int] = set()
    for parameter in (each for group in groups for each in group):
        if not isinstance(parameter, Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if id(parameter) in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(id(parameter))


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimiser of the same class that reduces gradients over ranks before each step.

    A reduction begins as soon as a gradient is computed, while the backward pass goes on; small ones are fused.

    Args:
        optimizer: Optimiser. Its groups and its state are taken over.
        named_parameters: `model.named_parameters()`; names match the gradients of different ranks.
        compression: Conversion on the way.
        backward_passes_per_step: Backward passes, whose gradients add up, before each step.
        op: Reduction; with `Adasum`, the optimiser's changes are combined, not the gradients.
        gradient_predivide_factor: Part of the mean's division that happens before the sum.
        num_groups: Deprecated; use `groups`.
        groups: Number of groups of gradients that are reduced as one, or the groups.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones.
        process_set: Ranks that take part.

    Raises:
        ValueError: An argument is invalid.

    Communication: one all_reduce for each gradient, fused up to `HOROVOD_FUSION_THRESHOLD` bytes.
    """
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    is_adasum = op == ADASUM and size() > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    own = type(optimizer)
    if isinstance(optimizer, _Base):
        raise ValueError("the optimizer is a DistributedOptimizer already: give the one that it was made of")
    mixin = _DistributedAdasumOptimizer if is_adasum else _DistributedOptimizer
    distributed: Any = object.__new__(type(own.__name__, (mixin, own), {"__module__": __name__}))
    # a scheduler has replaced `step` on the instance, and would step the optimiser that is given
    distributed.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    distributed._set_up(named_parameters, compression, backward_passes_per_step)
    if is_adasum:
        distributed._set_up_reduction()
    else:
        distributed._set_up_reduction(op, gradient_predivide_factor, groups, sparse_as_dense, process_set)
    return distributed
