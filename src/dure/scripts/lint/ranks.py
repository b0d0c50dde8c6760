"""Ranks that reach a place: tests of the rank, branches for one process alone, functions that only some ranks call."""

import ast
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from dure.scripts.lint.modules import FUNCTIONS, Function, Module, constant, last, method, plain_name, subtree, words
from dure.scripts.lint.project import Project

Who = Literal["some", "others"]
"""Ranks for which a test is true: rank 0 or another certain one, or all but that."""

RANK_NAMES = {
    "rank", "local_rank", "global_rank", "ddp_rank", "ddp_local_rank", "node_rank", "process_index", "proc_id",
    "local_process_index", "process_id", "worker_rank", "dist_rank", "world_rank", "rank_id", "my_rank", "RANK",
    "LOCAL_RANK", "machine_rank", "data_parallel_rank", "dp_rank", "proc_index",
}  # fmt: skip
RANK_CALLS = {"get_rank", "get_local_rank", "local_rank", "rank", "get_global_rank", "get_node_local_rank", "comm_rank"}
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "GROUP_RANK"}
MAIN_NAMES = {
    "is_main_process", "is_master", "master_process", "main_process", "is_rank_zero", "is_rank0", "is_rank_0",
    "is_chief",
    "is_main", "is_global_zero", "is_local_main_process", "is_primary", "is_first_rank", "is_world_process_zero",
    "is_root", "on_main_process", "is_logger", "is_master_process", "rank_zero", "is_distributed_primary", "is_host0",
    "is_last_process", "is_global_primary", "is_local_primary", "is_local_master", "is_local_zero", "is_coordinator",
}  # fmt: skip
MAIN_DECORATORS = {"rank_zero_only", "on_main_process", "on_local_main_process", "main_process_only", "master_only",
                   "is_master_decorator", "rank0_only", "on_rank_zero", "rank_zero_only_decorator"}  # fmt: skip
SINGLE_WORDS = {
    "distributed", "is_distributed", "use_ddp", "ddp", "is_ddp", "use_distributed", "multi_gpu", "multigpu",
    "world_size", "num_gpus", "n_gpu", "ngpus", "n_gpus", "is_initialized", "is_dist_initialized", "num_processes",
    "is_dist", "dist_train", "is_dist_avail_and_initialized", "get_world_size", "data_parallel", "dataparallel",
    "multiprocessing_distributed", "is_available_and_initialized", "launcher", "is_distributed_env", "fsdp",
    "is_parallel", "parallel", "use_dp", "dp", "device_count", "horovod", "use_horovod", "ddp_enabled", "distrib",
    "is_torchelastic_launched", "is_torchelastic", "nprocs", "use_fsdp", "is_dist_available", "gpus", "multi",
    "is_multi_gpu", "num_nodes", "nnodes", "world", "n_procs", "enable_ddp", "distributed_training", "use_cuda_dp",
    "using_distributed", "single_gpu", "is_single", "deepspeed", "sharded", "use_multi_gpu", "dist_on", "parallelism",
}  # fmt: skip
"""Names in tests of whether there are several ranks at all."""


MAIN_PATTERN = re.compile(
    r"(is|am|on|if|only|should)?_?(local_|global_|world_|dist_)?(leader|master|chief|primary|main_process|main_proc|rank_?zero|rank_?0|coordinator"
    r"|main_worker|global_zero|root_process|main_rank|master_rank)(_process|_rank|_node|_proc|_only)?"
)
"""Further names of functions and variables that are true on one rank."""


def names_main(name: str) -> bool:
    """Return whether a name is one of those that are true on one rank."""
    return name in MAIN_NAMES or (
        MAIN_PATTERN.fullmatch(name.lower().lstrip("_")) is not None and name != "main_worker"
    )


class Guard(NamedTuple):
    """Test that must have a certain result for a place to be reached."""

    test: ast.expr
    is_true: bool
    is_exit: bool = False
    """True if the other result leaves the function or loop before the place."""


class Ranks:
    """Facts on which ranks reach what."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._who: dict[Function, Who | None] = {}
        self._who_of: dict[ast.expr, Who | None] = {}
        self._single: dict[Function, bool] = {}
        self._is_rank: dict[int, bool] = {}
        self._exits: dict[int, list[ast.If]] = {}
        self._under_way: set[object] = set()
        self.spawned = [
            function
            for function, sites in project.sites.items()
            if any(s.is_spawn and _is_ranks(s.call) for s in sites)
        ]
        self._rank_code = self._reached(self.spawned) if self.spawned else set()

    def _reached(self, roots: list[Function]) -> set[Function]:
        found = set(roots)
        pending = list(roots)
        while pending:
            function = pending.pop()
            for called in self._called_or_passed(function):
                if called not in found:
                    found.add(called)
                    pending.append(called)
        # methods of classes that ranks build are called on objects whose class is not always known
        for module in self.project.modules:
            for cls in module.classes.values():
                own = [item for item in cls.body if isinstance(item, FUNCTIONS)]
                if any(item.name == "__init__" and item in found for item in own):
                    new = [item for item in own if item not in found]
                    found.update(new)
                    for item in new:
                        found.update(f for _, f in self.project.called_functions(item, depth=3))
        return found

    def _called_or_passed(self, function: Function) -> Iterator[Function]:
        yield from (called for _, called in self.project.called_functions(function, depth=1))
        calls = [site.call for site in self.project.sites.get(function, ()) if site.is_spawn]
        calls += [item for item in subtree(function) if isinstance(item, ast.Call)]
        module = self.project.module_of[function]
        for call in calls:
            for value in [*call.args, *(item.value for item in call.keywords)]:
                for name in value.elts if isinstance(value, ast.Tuple | ast.List) else [value]:
                    if isinstance(name, ast.Name):
                        found = self.project.definition(module, name)
                        if found is not None and isinstance(found[1], FUNCTIONS):
                            yield found[1]

    def runs_on_ranks(self, module: Module, node: ast.AST) -> bool:
        """Return whether a place is in code of ranks, and not of the process that starts them."""
        if not self.spawned:
            return True
        scope = module.scope_of(node)
        while not isinstance(scope, ast.Module):
            if scope in self._rank_code:
                return True
            scope = module.scope_of(scope)
        return False

    # --- values and tests

    def is_rank(self, module: Module, node: ast.AST, depth: int = 0) -> bool:
        """Return whether an expression is the number of the rank, or computed from it by a conversion alone."""
        if isinstance(node, ast.Call):
            name = method(node)
            if name in ("int", "getenv", "get", "str"):
                is_variable = any(constant(arg) in RANK_VARIABLES for arg in node.args)
                return is_variable or (
                    name in ("int", "str") and bool(node.args) and self.is_rank(module, node.args[0], depth + 1)
                )
            if name in RANK_CALLS:
                return True
            return any(
                self.is_rank(other, item.value, depth + 1)
                for other, function, _ in self.project.targets.get(node, ())
                for item in subtree(function)
                if isinstance(item, ast.Return) and item.value is not None and depth < 3
            )
        if isinstance(node, ast.Subscript):
            return constant(node.slice) in RANK_VARIABLES
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.is_rank(module, node.left, depth + 1)
        name = last(plain_name(node))
        if not name:
            return False
        if name in RANK_NAMES:
            return True
        if depth > 2 or not isinstance(node, ast.Name | ast.Attribute):
            return False
        key = id(node)
        if key not in self._is_rank:
            self._is_rank[key] = False
            self._is_rank[key] = any(
                (isinstance(o.node, ast.arg) and self._is_spawned_rank(o.module, o.node))
                or (
                    o.node is not node
                    and not isinstance(o.node, ast.arg)
                    and o.item is None
                    and self.is_rank(o.module, o.node, depth + 1)
                )
                for o in self.project.origins(module, node)
            )
        return self._is_rank[key]

    def _is_spawned_rank(self, module: Module, parameter: ast.arg) -> bool:
        function = module.parents[module.parents[parameter]]
        if parameter.arg in RANK_NAMES:
            return True
        if function not in self.spawned or not isinstance(function, FUNCTIONS):
            return False
        return bool(function.args.args) and function.args.args[0] is parameter

    def depends_on_rank(self, module: Module, node: ast.AST) -> bool:
        """Return whether an expression's value is another on each rank, as far as its names say."""
        return any(
            self.is_rank(module, item)
            for item in subtree(node)
            if isinstance(item, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        ) or any(
            not isinstance(o.node, ast.arg) and o.node is not item and self._mentions_rank(o.module, o.node)
            for item in subtree(node)
            if isinstance(item, ast.Name | ast.Attribute)
            for o in self.project.origins(module, item)
        )

    def _mentions_rank(self, module: Module, node: ast.AST) -> bool:
        return any(
            self.is_rank(module, item, 1)
            for item in subtree(node)
            if isinstance(item, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        )

    def who(self, module: Module, test: ast.expr, depth: int = 0) -> Who | None:
        """Return for which ranks a test is true; None if it does not depend on the rank."""
        if depth or self._under_way:
            return self._who_at(module, test, depth)
        if test not in self._who_of:
            self._who_of[test] = self._who_at(module, test, 0)
        return self._who_of[test]

    def _who_at(self, module: Module, test: ast.expr, depth: int) -> Who | None:
        if depth > 6:
            return None
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return _turned(self.who(module, test.operand, depth + 1)) or (
                "some" if self.is_rank(module, test.operand) else None
            )
        if isinstance(test, ast.BoolOp):
            found = [self.who(module, value, depth + 1) for value in test.values]
            return next((who for who in found if who is not None), None)
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._who_compare(module, test)
        if isinstance(test, ast.Call):
            name = method(test)
            if name == "bool" and test.args:
                return self.who(module, test.args[0], depth + 1)
            if names_main(name):
                return "some"
            for other, function, _ in self.project.targets.get(test, ()):
                returns = [item.value for item in subtree(function) if isinstance(item, ast.Return) and item.value]
                if len(returns) <= 3 and function.name != "__init__":
                    for value in returns:
                        if (who := self.who(other, value, depth + 2)) is not None:
                            return who
            return None
        name = last(plain_name(test))
        if name and names_main(name):
            return "some"
        if isinstance(test, ast.Attribute) and (returned := self._property(module, test)) is not None:
            return self.who(returned[0], returned[1], depth + 2)
        if name in RANK_NAMES and not isinstance(test, ast.Call):
            return "others"
        if name and ("device", id(test)) not in self._under_way:
            self._under_way.add(("device", id(test)))
            try:
                for origin in self.project.origins(module, test):
                    is_test = isinstance(origin.node, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Call)
                    if is_test and origin.item is None and not isinstance(origin.node, ast.arg):
                        who = self.who(origin.module, origin.node, depth + 2)
                        if who is not None:
                            return who
            finally:
                self._under_way.discard(("device", id(test)))
        return None

    def _property(self, module: Module, node: ast.Attribute) -> tuple[Module, ast.expr] | None:
        """Return what a property of `self` returns, if it is one that returns a single value."""
        cls = module.class_of(node)
        if cls is None or plain_name(node.value) != "self":
            return None
        found = self.project.method_of(module, cls, node.attr)
        if found is None or not any("property" in last(plain_name(item)) for item in found[1].decorator_list):
            return None
        returns = [item.value for item in subtree(found[1]) if isinstance(item, ast.Return) and item.value is not None]
        return (found[0], returns[0]) if len(returns) == 1 else None

    def _who_compare(self, module: Module, test: ast.Compare) -> Who | None:
        left, op, right = test.left, test.ops[0], test.comparators[0]
        if not self.is_rank(module, left):
            if not self.is_rank(module, right):
                return None
            left, right = right, left
        value = constant(right)
        if isinstance(op, ast.In | ast.NotIn):
            items = [_number(item) for item in right.elts] if isinstance(right, ast.Tuple | ast.List | ast.Set) else []
            if items and any(item is not None and item >= 0 for item in items):
                return "some" if isinstance(op, ast.In) else "others"
            return None
        number = _number(right)
        if value is None or (number is not None and number < 0):
            return None  # `rank == -1`: there are no ranks
        if isinstance(op, ast.Eq):
            return "some"
        if isinstance(op, ast.NotEq):
            return "others"
        if isinstance(op, ast.Gt) and number == 0:
            return "others"
        if isinstance(op, ast.Lt | ast.LtE) and number is not None and number <= 1:
            return "some"
        return None

    # --- places

    def guards(self, module: Module, node: ast.AST) -> Iterator[Guard]:
        """Yield the tests on the way to a place in its function, from the inside."""
        under = node
        for above in module.within(node):
            if isinstance(above, ast.If):
                if any(item is under for item in above.body):
                    yield Guard(above.test, True)
                elif any(item is under for item in above.orelse):
                    yield Guard(above.test, False)
            elif isinstance(above, ast.IfExp) and under is not above.test:
                yield Guard(above.test, under is above.body)
            elif isinstance(above, ast.BoolOp) and under is not above.values[0]:
                position = next(i for i, item in enumerate(above.values) if item is under)
                for value in above.values[:position]:
                    yield Guard(value, isinstance(above.op, ast.And))
            if isinstance(under, ast.stmt):
                for earlier in self._exits_of(module.block_of(under)):
                    if earlier.lineno < under.lineno:
                        yield Guard(earlier.test, False, True)
            under = above

    def _exits_of(self, block: list[ast.stmt]) -> list[ast.If]:
        """Return the tests in a block after which some ranks are no longer there."""
        if id(block) not in self._exits:
            self._exits[id(block)] = [
                item for item in block if isinstance(item, ast.If) and not item.orelse and leaves(item.body)
            ]
        return self._exits[id(block)]

    def local_guard(self, module: Module, node: ast.AST) -> tuple[Who, Guard] | None:
        """Return which ranks reach a place within its function, and the innermost test that decides it."""
        for guard in self.guards(module, node):
            who = self.who(module, guard.test)
            if who is not None:
                if isinstance(guard.test, ast.BoolOp) and not guard.is_true and isinstance(guard.test.op, ast.And):
                    continue  # the other parts may have failed, on all ranks
                return (who if guard.is_true else _turned(who) or who), guard
        scope = module.scope_of(node)
        if isinstance(scope, FUNCTIONS) and any(self._is_for_main(item) for item in scope.decorator_list):
            return "some", Guard(ast.Constant(value=True), True)
        return None

    @staticmethod
    def _is_for_main(decorator: ast.expr) -> bool:
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        return last(plain_name(name)) in MAIN_DECORATORS or names_main(last(plain_name(name)))

    def reached_by(self, module: Module, node: ast.AST) -> Who | None:
        """Return which ranks reach a place, calls of its function included; None for all, or if it is not known."""
        local = self.local_guard(module, node)
        if local is not None:
            return local[0]
        scope = module.scope_of(node)
        return self.calling(scope) if isinstance(scope, FUNCTIONS) else None

    def calling(self, function: Function) -> Who | None:
        """Return which ranks call a function; None if all do, or if no call is known."""
        if function not in self._who:
            self._who[function] = None  # in a recursion
            found = {
                self.reached_by(site.module, site.call)
                for site in self.project.sites.get(function, ())
                if not site.is_spawn
            }
            spawned = any(site.is_spawn for site in self.project.sites.get(function, ()))
            self._who[function] = found.pop() if len(found) == 1 and not spawned else None
        return self._who[function]

    def is_single(self, module: Module, node: ast.AST) -> bool:
        """Return whether a place is in a branch that tests for one or several ranks, or is called from such branches.

        What it does there is for one of the cases, and no rule knows whether it is right in the other.
        """
        for guard in self.guards(module, node):
            if self.asks_for_ranks(module, guard.test):
                return True
        scope = module.scope_of(node)
        if not isinstance(scope, FUNCTIONS):
            return False
        if scope not in self._single:
            self._single[scope] = False
            sites = [site for site in self.project.sites.get(scope, ()) if not site.is_spawn]
            self._single[scope] = bool(sites) and all(self.is_single(site.module, site.call) for site in sites)
        return self._single[scope]

    def is_without_ranks(self, module: Module, node: ast.AST) -> bool:
        """Return whether a place is in the branch for one process, such as the `else` of `if args.distributed`."""
        for guard in self.guards(module, node):
            truth = self.means_ranks(module, guard.test)
            if truth is not None and truth != guard.is_true:
                return True
        scope = module.scope_of(node)
        if not isinstance(scope, FUNCTIONS) or ("single", scope) in self._under_way:
            return False
        self._under_way.add(("single", scope))
        try:
            sites = [site for site in self.project.sites.get(scope, ()) if not site.is_spawn]
            return bool(sites) and all(self.is_without_ranks(site.module, site.call) for site in sites)
        finally:
            self._under_way.discard(("single", scope))

    def means_ranks(self, module: Module, test: ast.expr) -> bool | None:
        """Return the result of a test that stands for several ranks; None if it is no such test, or a mixed one."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.means_ranks(module, test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            found = {self.means_ranks(module, value) for value in test.values} - {None}
            return found.pop() if len(found) == 1 else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            op, right = test.ops[0], test.comparators[0]
            number = _number(right)
            if self.is_rank(module, test.left):
                if number is not None and number < 0:
                    return not isinstance(op, ast.Eq | ast.Lt | ast.LtE)
                if constant(right) is None:
                    return not isinstance(op, ast.Eq | ast.Is)
                return None
            if constant(right) is None and words(test.left) & {"sampler", "train_sampler", "gpu", "args.gpu"}:
                return True if isinstance(op, ast.IsNot) else None if "gpu" not in words(test.left) else True
            if not words(test.left) & SINGLE_WORDS and not (words(test.left) & {"environ"} and _mentions(test.left)):
                return None
            if isinstance(op, ast.Gt | ast.GtE | ast.NotEq | ast.In | ast.IsNot):
                return True
            if isinstance(op, ast.Eq | ast.Lt | ast.LtE | ast.NotIn | ast.Is):
                return False
            return None
        name = last(plain_name(test)) or (method(test) if isinstance(test, ast.Call) else "")
        if name in ("single_gpu", "is_single"):
            return False
        return True if name in SINGLE_WORDS else None

    def asks_for_ranks(self, module: Module, test: ast.expr) -> bool:
        """Return whether a test is about there being several ranks."""
        if isinstance(test, ast.Compare) and self._who_compare_single(module, test):
            return True
        return any(
            last(plain_name(item)) in SINGLE_WORDS
            for item in subtree(test)
            if isinstance(item, ast.Name | ast.Attribute)
        ) or (any(constant(item) in {"WORLD_SIZE", "RANK", "LOCAL_RANK"} for item in subtree(test)))

    def _who_compare_single(self, module: Module, test: ast.Compare) -> bool:
        number = _number(test.comparators[0])
        is_none = constant(test.comparators[0]) is None
        is_rank = self.is_rank(module, test.left) or last(plain_name(test.left)) == "gpu"
        return is_rank and (is_none or (number is not None and number < 0))


def leaves(block: list[ast.stmt]) -> bool:
    """Return whether a block of statements ends with leaving the loop, the function or the program."""
    if not block:
        return False
    end = block[-1]
    if isinstance(end, ast.Return | ast.Continue | ast.Break | ast.Raise):
        return True
    return (
        isinstance(end, ast.Expr) and isinstance(end.value, ast.Call) and method(end.value) in ("exit", "_exit", "quit")
    )


def _turned(who: Who | None) -> Who | None:
    return None if who is None else "others" if who == "some" else "some"


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _number(node.operand)
        return None if number is None else -number
    value = constant(node)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _mentions(node: ast.AST) -> bool:
    return any(constant(item) in {"WORLD_SIZE", "RANK", "LOCAL_RANK"} for item in subtree(node))


def _is_ranks(call: ast.Call) -> bool:
    """Return whether a call starts ranks; a `Process` does if a rank is among its arguments."""
    if method(call) in ("spawn", "start_processes", "notebook_launcher"):
        return True
    return method(call) == "Process" and any(words(item.value) & RANK_NAMES for item in call.keywords)
