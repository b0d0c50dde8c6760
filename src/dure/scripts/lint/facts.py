"""Facts on a project's scripts: libraries, models and their wrappers, loaders, samplers, loops, evaluations."""

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from dure.scripts.lint.modules import (
    ACCELERATORS,
    FUNCTIONS,
    LOOPS,
    Function,
    Module,
    argument,
    below,
    body_of,
    constant,
    is_script,
    keyword,
    last,
    method,
    plain_name,
    subtree,
    words,
)
from dure.scripts.lint.project import Project, exclusive
from dure.scripts.lint.ranks import Ranks

DDP = {"DistributedDataParallel", "DDP", "NativeDDP", "ApexDDP", "DistributedDataParallelCPU"}
FSDP = {"FullyShardedDataParallel", "FSDP", "fully_shard"}
DP = {"DataParallel", "BalancedDataParallel", "DataParallelModel"}
REDUCING = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "gather", "all_gather_object", "gather_object",
    "all_reduce_coalesced", "_all_gather_base", "allreduce", "allgather", "allreduce_", "reduce_scatter",
    "allgather_object", "all_gather_list", "gather_for_metrics", "all_gather_variable", "allreduce_async",
    "grouped_allreduce", "reduce_scatter_tensor",
}  # fmt: skip
COLLECTIVES = REDUCING | {
    "barrier", "broadcast", "broadcast_object_list", "monitored_barrier", "scatter", "all_to_all",
    "all_to_all_single", "scatter_object_list", "new_group", "wait_for_everyone", "broadcast_", "broadcast_parameters",
    "broadcast_optimizer_state", "broadcast_object", "alltoall", "join", "new_subgroups", "init_device_mesh",
}  # fmt: skip
TORCH, HOROVOD = "torch.distributed.", "horovod."
HOROVOD_FACE = ".".join(("dure", "compat", "horovod"))
OPTIMIZERS = {
    "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "LBFGS", "Rprop", "ASGD",
    "SparseAdam", "FusedAdam", "FusedLAMB", "LAMB", "Lion", "FusedSGD", "ZeroRedundancyOptimizer", "LARS", "AdamW8bit",
    "Adafactor", "create_optimizer", "BertAdam", "Ranger", "DistributedFusedAdam", "Muon",
}  # fmt: skip
_PASSED_ON = ("tqdm", "enumerate", "iter", "islice", "trange")
"""Functions that yield the items of their first argument."""
EVALUATING = ("eval", "valid", "test", "infer", "predict", "score", "val")


class Wrap(NamedTuple):
    """Call that wraps a model."""

    call: ast.Call
    module: Module
    kind: str
    """`ddp`, `fsdp` or `dp`."""
    model: ast.expr | None


class Loader(NamedTuple):
    """Construction of a DataLoader."""

    call: ast.Call
    module: Module
    use: str
    """`train`, `eval` or an empty string if it is not known."""
    data: ast.expr | None
    sampler: ast.expr | None
    shuffle: ast.expr | None
    has_unknown: bool
    """True if keywords are given that cannot be read (`**kwargs`)."""


class Facts:
    """Facts of a project, found when they are first needed."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.ranks = Ranks(project)
        self._evaluates: dict[ast.AST, bool] = {}
        self._backward: dict[tuple[ast.AST, int], bool] = project.kept.setdefault("backward", {})
        self._evaluating: dict[Function, bool] = project.kept.setdefault("evaluating", {})
        self._about_ranks: dict[Module, bool] = {}

    def calls(self) -> list[tuple[Module, ast.Call, str]]:
        """Return all calls, each with its resolved name."""
        return self._named_calls

    @cached_property
    def reported(self) -> list[Module]:
        """Modules in which findings are reported."""
        return [module for module in self.project.modules if not module.is_context]

    @cached_property
    def reported_calls(self) -> list[tuple[Module, ast.Call, str]]:
        """Calls in modules in which findings are reported, each with its resolved name."""
        return [item for item in self._named_calls if not item[0].is_context]

    @cached_property
    def _named_calls(self) -> list[tuple[Module, ast.Call, str]]:
        return [(module, call, name) for module in self.project.modules for call, name in module.named_calls]

    @cached_property
    def names(self) -> set[str]:
        """Last parts of the names of everything that is called."""
        return {last(name) for _, _, name in self.calls()}

    @cached_property
    def words(self) -> set[str]:
        """All names and attributes of the project, and its short strings."""
        return {word for module in self.project.modules for word in module.words}

    # --- libraries

    def uses(self, package: str) -> bool:
        """Return whether a module imports a package."""
        return any(
            name == package or name.startswith(f"{package}.")
            for module in self.project.modules
            for name in (*module.imports.values(), *module.stars)
        )

    @cached_property
    def accelerate(self) -> bool:
        """Return whether Accelerate starts the ranks and divides the data."""
        return self.uses("accelerate") and any(
            last(name) == "Accelerator" and self.is_reached(module, call) for module, call, name in self.calls()
        )

    @cached_property
    def fabric(self) -> bool:
        """Return whether Lightning Fabric does."""
        if not (self.uses("lightning") or self.uses("lightning_fabric")) or "Fabric" not in self.names:
            return False
        made = [call for module, call, name in self.calls() if last(name) == "Fabric" and self.is_reached(module, call)]
        return any(constant(keyword(call, "devices")) != 1 for call in made) or not made

    @cached_property
    def lightning(self) -> bool:
        """Return whether Lightning's trainer does."""
        is_used = (
            self.uses("lightning.pytorch")
            or self.uses("pytorch_lightning")
            or (self.uses("lightning") and not self.fabric)
        )
        return is_used and "Fabric" not in self.names

    @cached_property
    def deepspeed(self) -> bool:
        """Return whether DeepSpeed wraps the model."""
        return self.uses("deepspeed")

    @cached_property
    def horovod(self) -> bool:
        """Return whether Horovod does."""
        return self.uses("horovod") or self.uses(HOROVOD_FACE)

    @cached_property
    def _reached(self) -> set[ast.AST] | None:
        """Functions and classes that the script names, or that such ones name; None for all, without a script.

        A package has modules for one process and for many, and a script that imports it uses some of them.
        """
        script, *others = self.project.modules
        if not others or not is_script(script):
            return None
        by_name: dict[str, list[ast.AST]] = {}
        for module in others:
            definitions: list[tuple[str, ast.AST]] = [*module.functions.items(), *module.classes.items()]
            for name, definition in definitions:
                by_name.setdefault(name, []).append(definition)
        found: set[ast.AST] = {*script.functions.values(), *script.classes.values()}
        pending = [words(script.source.tree), *(self._top_level_words(module) for module in others)]
        while pending:
            for name in pending.pop():
                for definition in by_name.pop(name, ()):
                    found.add(definition)
                    pending.append(words(definition))
        return found

    @staticmethod
    def _top_level_words(module: Module) -> set[str]:
        """Return the names in what runs when a module is imported."""
        return {
            item.id if isinstance(item, ast.Name) else item.attr
            for item in below(module.source.tree, into_functions=False)
            if isinstance(item, ast.Name | ast.Attribute)
        }

    def is_reached(self, module: Module, node: ast.AST) -> bool:
        """Return whether the script may run a place, as far as names say."""
        if self._reached is None or module is self.project.modules[0]:
            return True
        definitions = [above for above in module.above(node) if isinstance(above, (*FUNCTIONS, ast.ClassDef))]
        return not definitions or definitions[-1] in self._reached

    @cached_property
    def has_group(self) -> bool:
        """Return whether a process group is opened or a model wrapped for several processes by the script itself."""
        opens = any(
            last(name) in ("init_process_group", "init_distributed_mode", "init_distributed", "init_distributed_device")
            and self.is_reached(module, call)
            for module, call, name in self.calls()
        )
        if self.lightning and not any(last(name) == "init_process_group" for _, _, name in self.calls()):
            return False
        return opens or any(wrap.kind != "dp" for wrap in self.wraps) or self.horovod

    @cached_property
    def has_ranks(self) -> bool:
        """Return whether the scripts run on several ranks by any library."""
        return self.has_group or self.accelerate or self.fabric or self.lightning or self.deepspeed

    @cached_property
    def divides_itself(self) -> bool:
        """Return whether the script itself must give each rank its own data: no library does it for it."""
        helps = self.accelerate or self.fabric or self.lightning or self.uses("ray") or self.uses("ignite")
        return self.has_group and not helps

    @cached_property
    def on_accelerators(self) -> bool:
        """Return whether the scripts use a device on which kernels run ahead of Python."""
        found = ACCELERATORS & {word.partition(":")[0] for word in self.words}
        imported = any(
            ACCELERATORS & {*name.split(".")} for module in self.project.modules for name in module.imports.values()
        )
        return bool(found) or imported or self.accelerate or self.fabric or self.deepspeed

    def is_about_ranks(self, module: Module) -> bool:
        """Return whether a module has to do with ranks: it trains, wraps models, or names ranks or their libraries."""
        if module not in self._about_ranks:
            named = {name.partition(".")[0] for name in module.imports.values()}
            named |= {name for name in module.imports.values() if "distributed" in name}
            found = any(m is module for m, _ in self.step_loops) or any(w.module is module for w in self.wraps)
            found = found or bool(named & {"accelerate", "horovod", "torch.distributed", "lightning", "deepspeed"})
            found = found or any("distributed" in name for name in named) or any(
                last(plain_name(node)) in ("rank", "local_rank", "world_size")
                for node in module.nodes
            )  # fmt: skip
            self._about_ranks[module] = found
        return self._about_ranks[module]

    # --- models

    @cached_property
    def wraps(self) -> list[Wrap]:
        """Wraps of models for several devices or processes."""
        found = []
        for module, call, name in self.calls():
            kind = self._kind(last(name))
            has_model = call.args or keyword(call, "module") is not None
            if kind and has_model and not self._is_own_class(module, call) and self.is_reached(module, call):
                found.append(Wrap(call, module, kind, argument(call, "module", 0)))
        return found

    @staticmethod
    def _kind(name: str) -> str:
        return "ddp" if name in DDP else "fsdp" if name in FSDP else "dp" if name in DP else ""

    def _is_own_class(self, module: Module, call: ast.Call) -> bool:
        return any(isinstance(above, ast.ClassDef) and above.name in DDP | DP for above in module.above(call))

    def wrap_behind(self, module: Module, node: ast.expr, kinds: str = "ddp fsdp") -> Wrap | None:
        """Return the wrap that a value may come from."""
        for _, call, _ in self.project.calls_behind(module, node):
            for wrap in self.wraps:
                if wrap.call is call and wrap.kind in kinds.split():
                    return wrap
        return None

    @cached_property
    def optimizers(self) -> list[tuple[Module, ast.Call]]:
        """Constructions of optimisers."""
        return [
            (module, call)
            for module, call, name in self.calls()
            if last(name) in OPTIMIZERS and (call.args or call.keywords) and not _is_method(module, call)
        ]

    # --- data

    @cached_property
    def loaders(self) -> list[Loader]:
        """Constructions of DataLoaders."""
        found = []
        for module, call, name in self.calls():
            if last(name) in ("DataLoader", "MultiEpochsDataLoader") and (call.args or call.keywords):
                unknown = any(item.arg is None for item in call.keywords)
                options = {item.arg: item.value for item in call.keywords if item.arg}
                for item in call.keywords:
                    if item.arg is None:
                        known = self._read_options(module, item.value)
                        unknown = unknown and known is None
                        options = {**(known or {}), **options}
                        unknown = known is None
                positions = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers")
                options |= dict(zip(positions, call.args, strict=False))
                sampler = options.get("sampler")
                batch_sampler = options.get("batch_sampler")
                sampler = batch_sampler if sampler is None or constant(sampler) is None else sampler
                found.append(
                    Loader(call, module, self._use_of(module, call), options.get("dataset"),
                           None if constant(sampler) is None else sampler, options.get("shuffle"), unknown)
                )  # fmt: skip
        return found

    def _read_options(self, module: Module, node: ast.expr) -> dict[str, ast.expr] | None:
        """Return the keywords that a dictionary gives; None if they are not known."""
        found: dict[str, ast.expr] = {}
        if not isinstance(node, ast.Name):
            return None
        origins = self.project.origins(module, node)
        for origin in origins:
            if isinstance(origin.node, ast.Dict):
                for key, value in zip(origin.node.keys, origin.node.values, strict=True):
                    if not isinstance(constant(key), str):
                        return None
                    found[str(constant(key))] = value
            elif isinstance(origin.node, ast.Call) and method(origin.node) == "dict" and not origin.node.args:
                found |= {item.arg: item.value for item in origin.node.keywords if item.arg}
            else:
                return None
        scope = module.scope_of(node)
        for item in subtree(scope):  # train_kwargs.update(cuda_kwargs), train_kwargs["sampler"] = ...
            if isinstance(item, ast.Call) and method(item) == "update" and isinstance(item.func, ast.Attribute):
                if plain_name(item.func.value) == node.id:
                    more = [self._read_options(module, arg) for arg in item.args] if item.args else [None]
                    for known in more:
                        if known is None and not (item.args and isinstance(item.args[0], ast.Dict)):
                            return None
                        found |= known or {}
                    for arg in item.args:
                        if isinstance(arg, ast.Dict):
                            found |= {str(constant(k)): v for k, v in zip(arg.keys, arg.values, strict=True)}
            elif (
                isinstance(item, ast.Assign)
                and isinstance(item.targets[0], ast.Subscript)
                and plain_name(item.targets[0].value) == node.id
            ):
                found[str(constant(item.targets[0].slice))] = item.value
        return found if origins else None

    def _use_of(self, module: Module, call: ast.Call) -> str:
        """Return what a loader is for: where it is iterated, or else what it is called."""
        uses = set()
        for other, loop, source in self.iterations:
            if any(origin.node is call for origin in self.project.origins(other, source)):
                uses.add(
                    "train" if self.has_backward(other, loop) else "eval" if self.is_evaluation(other, loop) else ""
                )
        uses.discard("")
        if uses:
            return "train" if "train" in uses else "eval"
        statement = module.statement_of(call)
        names = [last(plain_name(t)) for t in getattr(statement, "targets", [])]
        scope = module.scope_of(call)
        names += [scope.name] if isinstance(scope, FUNCTIONS) and not names else []
        text = " ".join(names).lower()
        data = argument(call, "dataset", 0)
        text = text or " ".join(words(data) if data is not None else ()).lower()
        is_eval = any(word in text for word in ("val", "test", "eval", "dev"))
        is_train = "train" in text
        return "eval" if is_eval and not is_train else "train" if is_train and not is_eval else ""

    @cached_property
    def iterations(self) -> list[tuple[Module, ast.AST, ast.expr]]:
        """Loops over something, each with what is iterated: the loader inside `enumerate`, `tqdm` and the like."""
        kept = self.project.kept.setdefault("iterations", {})
        for module in self.project.modules:
            if module not in kept:
                kept[module] = list(_iterations(module))
        return [item for module in self.project.modules for item in kept[module]]

    def samplers_behind(self, module: Module, node: ast.expr) -> list[tuple[Module, ast.Call, str]]:
        """Return the samplers that a value may be."""
        found = []
        for other, call, name in self.project.calls_behind(module, node):
            found.append((other, call, last(name)))
            if last(name) in ("BatchSampler", "GroupedBatchSampler") and call.args:
                found += self.samplers_behind(other, call.args[0])
        return found

    # --- loops and evaluation

    def has_backward(self, module: Module, node: ast.AST, *, depth: int = 3) -> bool:
        """Return whether a node computes gradients, itself or by functions of the project that it calls."""
        key = (node, depth)
        if key not in self._backward:
            self._backward[key] = any(
                is_backward(call)
                for _, part in self.project.with_called(module, node, depth=depth)
                for call in self.project.calls_in(part)
            )
        return self._backward[key]

    @cached_property
    def step_loops(self) -> list[tuple[Module, ast.AST]]:
        """Innermost loops that compute gradients: one pass is one microbatch."""
        kept = self.project.kept.setdefault("step loops", {})
        for module in self.project.modules:
            if module not in kept:
                kept[module] = list(self._step_loops_of(module))
        return [item for module in self.project.modules for item in kept[module]]

    def _step_loops_of(self, module: Module) -> Iterator[tuple[Module, ast.AST]]:
        for node in module.nodes:
            if not isinstance(node, LOOPS) or not self.has_backward(module, body_of(node)):
                continue
            has_inner = any(
                item is not node and isinstance(item, LOOPS) and self.has_backward(module, body_of(item))
                for item in below(node)
            )
            is_outside = has_inner or any(
                isinstance(item, ast.For | ast.While) and self.has_backward(other, body_of(item))
                for other, function in self.project.called_functions(body_of(node))
                for item in subtree(function)
            )
            if not is_outside:
                yield module, node

    def in_training(self, module: Module, node: ast.AST) -> bool:
        """Return whether a place is in a step loop or in a function that such a loop calls."""
        if not self.step_loops or self.is_evaluation(module, node):
            return False
        loops = set(module.loops_of(node))
        if any(loop in loops for _, loop in self.step_loops):
            return True
        return module.scope_of(node) in self._step_functions

    @cached_property
    def _step_functions(self) -> set[ast.AST]:
        """Return the functions that step loops call."""
        return {function for _, loop in self.step_loops for _, function in self.project.called_functions(body_of(loop))}

    def is_evaluation(self, module: Module, node: ast.AST) -> bool:
        """Return whether a place is in an evaluation: without gradients, or after `model.eval()` without a backward."""
        if node in self._evaluates:
            return self._evaluates[node]
        self._evaluates[node] = False
        found = any(
            isinstance(above, ast.With) and any(_is_without_gradients(module, item) for item in above.items)
            for above in module.within(node)
        )
        scope = module.scope_of(node)
        found = found or (isinstance(scope, FUNCTIONS) and self.is_evaluating_function(module, scope))
        self._evaluates[node] = found
        return found

    def is_evaluating_function(self, module: Module, function: Function) -> bool:
        """Return whether a function evaluates a model."""
        if function not in self._evaluating:
            self._evaluating[function] = self._evaluates_model(module, function)
        return self._evaluating[function]

    def _evaluates_model(self, module: Module, function: Function) -> bool:
        if any(_names_no_grad(item) for item in function.decorator_list):
            return True
        if self.has_backward(module, function, depth=2):
            return False
        for item in below(function, into_functions=False):
            if isinstance(item, ast.Call):
                if method(item) == "eval" and isinstance(item.func, ast.Attribute) and not item.args:
                    return True
                if method(item) in ("no_grad", "inference_mode"):
                    return True
        return function.name.lower().startswith(EVALUATING) and any(
            isinstance(item, ast.For | ast.While) for item in below(function, into_functions=False)
        )

    # --- collectives

    def collective(self, module: Module, call: ast.Call) -> str:
        """Return the name of the collective that a call is; "" if it is none, or one of a smaller group."""
        name = module.called(call)
        leaf = last(name) or method(call)
        if leaf not in COLLECTIVES or keyword(call, "group") is not None or keyword(call, "process_set") is not None:
            return ""
        if name.startswith((TORCH, HOROVOD, HOROVOD_FACE)) and not name.startswith("torch.distributed.nn"):
            return leaf if leaf != "join" or not name.startswith(TORCH) else ""
        if leaf == "wait_for_everyone" or leaf in ("gather_for_metrics",):
            return leaf
        owner = plain_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if last(owner) in ("accelerator", "fabric") and leaf in (
            "gather",
            "reduce",
            "barrier",
            "all_gather",
            "all_reduce",
            "broadcast",
        ):
            return leaf
        if last(owner) in ("dist", "hvd", "distributed", "comm") and leaf not in ("join", "reduce", "gather"):
            return leaf
        return ""

    def collectives_below(self, module: Module, node: ast.AST) -> Iterator[tuple[Module, ast.Call, str]]:
        """Yield the collectives in a node and in the functions that it calls."""
        for other, part in self.project.with_called(module, node):
            for item in below(part, into_functions=part is not node):
                if isinstance(item, ast.Call) and (name := self.collective(other, item)):
                    yield other, item, name

    @cached_property
    def reduces(self) -> bool:
        """Return whether anything is summed or gathered over the ranks."""
        return bool(self.names & REDUCING)

    @cached_property
    def is_entry(self) -> bool:
        """Return whether the project has a script that is started, and not only modules for others."""
        return any(
            isinstance(node, ast.If) and "__name__" in words(node.test) and isinstance(module.parents[node], ast.Module)
            for module in self.project.modules
            for node in module.source.tree.body
        ) or any(
            isinstance(node, ast.For | ast.While) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            for module in self.project.modules
            for node in module.source.tree.body
        )


def is_backward(call: ast.Call) -> bool:
    """Return whether a call computes gradients."""
    if isinstance(call.func, ast.Name) and "scaler" in call.func.id and len(call.args) > 1:
        return True  # timm's NativeScaler and its like: loss_scaler(loss, optimizer)
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("backward", "manual_backward"):
        return False
    return not plain_name(call.func).startswith(("torch.autograd.Function", "ctx.", "super."))


def _iterations(module: Module) -> Iterator[tuple[Module, ast.AST, ast.expr]]:
    """Yield the loops of a module, each with what is iterated."""
    for node in module.nodes:
        if isinstance(node, ast.For | ast.AsyncFor):
            yield from ((module, node, source) for source in _iterated(module, node.iter))
        elif isinstance(node, ast.Call) and method(node) == "next" and node.args:
            loops = module.loops_of(node)
            if loops:
                yield from ((module, loops[0], item) for item in _iterated(module, node.args[0]))


def _iterated(module: Module, node: ast.expr, seen: tuple[ast.expr, ...] = ()) -> list[ast.expr]:
    """Return what a loop takes its items from, without `enumerate`, `tqdm`, `zip` and the like.

    `seen` are the values that have led here: in `loader = tqdm(loader)` a name leads to itself.
    """
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and method(node) in ("log_every", "track"):
            return [node.args[0]] if node.args else []
        if not node.args or method(node) == "range":
            return []
        if method(node) == "zip":
            return [item for arg in node.args for item in _iterated(module, arg, seen)]
        node = node.args[0]
    if isinstance(node, ast.Name):  # pbar = tqdm(loader)
        for scope in (module.scope_of(node), module.source.tree):
            for assignment in module.names.get(scope, {}).get(node.id, []):
                value = assignment.value
                if isinstance(value, ast.Call) and method(value) in _PASSED_ON and value not in seen:
                    return _iterated(module, value, (*seen, value))
    return [node]


def _is_without_gradients(module: Module, item: ast.withitem) -> bool:
    return _names_no_grad(item.context_expr)


def _names_no_grad(node: ast.expr) -> bool:
    name = plain_name(node.func if isinstance(node, ast.Call) else node)
    return last(name) in ("no_grad", "inference_mode")


def _is_method(module: Module, call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and plain_name(call.func).startswith("self.")


__all__ = ["Facts", "Loader", "Wrap", "exclusive", "is_backward"]
