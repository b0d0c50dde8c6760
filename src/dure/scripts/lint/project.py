"""Project: modules with the calls between them, and where values come from."""

import ast
import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dure.scripts.lint.modules import (
    FUNCTIONS,
    MOVES,
    Assignment,
    Function,
    Module,
    Scope,
    argument,
    constant,
    last,
    method,
    plain_name,
    subtree,
)

MOST_STEPS = 14
"""Maximum assignments, arguments and returns that are followed from a value to its origin."""
MOST_ORIGINS = 60
"""Maximum origins of a value that are looked at."""
MOST_VALUES = 100
"""Maximum assignments to a name in a function; of one with more it is not known which has given its value."""
PASSING = {
    *MOVES, "cpu", "half", "float", "double", "bfloat16", "train", "eval", "requires_grad_", "compile", "apply",
    "convert_sync_batchnorm", "convert_syncbn_model", "contiguous", "type",
}  # fmt: skip
"""Methods and functions whose result is, for the rules, the model or tensor that they are given."""
COMMON_METHODS = {
    "train", "eval", "step", "forward", *MOVES, "parameters", "load", "save", "update", "reset", "close", "write",
    "add", "get", "append", "run", "log", "backward", "state_dict", "load_state_dict", "zero_grad", "format", "join",
    "test", "fit", "start", "setup", "read", "print", "sum", "mean", "max", "size", "item",
}  # fmt: skip
"""Methods that objects of other packages have too: a name alone does not tell whose it is."""


class Origin(NamedTuple):
    """Expression that a value comes from."""

    node: ast.expr | ast.arg
    """A call, a constant and the like; a parameter if no call of its function is known."""
    module: Module
    item: int | None
    """Index of the item of the result; None for the result."""


class CallSite(NamedTuple):
    """Call of a function of the project."""

    call: ast.Call
    module: Module
    is_spawn: bool
    """True if it starts processes that call the function with their rank first."""
    skipped: int
    """Parameters that the call does not give: `self`."""


class Project:
    """Modules that belong together."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.modules = list(modules)
        self._by_name: dict[str, list[Module]] = {}
        for module in self.modules:
            self._by_name.setdefault(module.dotted[-1] if module.dotted else "", []).append(module)
        self._methods: dict[str, list[tuple[Module, ast.ClassDef, Function]]] = {}
        for module in self.modules:
            for cls in module.classes.values():
                for item in cls.body:
                    if isinstance(item, FUNCTIONS):
                        self._methods.setdefault(item.name, []).append((module, cls, item))
        self.targets: dict[ast.Call, list[tuple[Module, Function, int]]] = {}
        """Functions of the project that a call calls, with the number of parameters that it does not give."""
        self.sites: dict[Function, list[CallSite]] = {}
        self.module_of: dict[Function, Module] = {}
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._origins: dict[tuple[int, int | None], list[Origin]] = {}
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, FUNCTIONS):
                    self.module_of[node] = module
        self.kept: dict[str, dict[Any, Any]] = {}
        """Results of rules' questions that depend only on what is called, and so are the same in each part."""
        for module in self.modules:
            for call in module.calls:
                self._link(module, call)

    def part(self, modules: Sequence[Module]) -> "Project":
        """Return the project of some modules, which shares what does not depend on who calls whom."""
        part = copy.copy(self)
        part.modules = list(modules)
        members = set(modules)
        part.sites = {
            function: own
            for function, sites in self.sites.items()
            if (own := [site for site in sites if site.module in members])
        }
        part._origins = {}
        return part

    # --- names of the project

    def module_named(self, dotted: str) -> Module | None:
        """Return the module of the project that a dotted name means: that with the longest common ending."""
        parts = tuple(dotted.split("."))
        found = [m for m in self._by_name.get(parts[-1], []) if _ends_alike(m.dotted, parts)]
        return max(found, key=lambda m: -abs(len(m.dotted) - len(parts)), default=None)

    def definition(self, module: Module, node: ast.AST, depth: int = 0) -> tuple[Module, ast.AST] | None:
        """Return the function or class of the project that a name means."""
        if isinstance(node, ast.Name):
            for scope in self.scopes(module, node):
                for item in scope.body if depth == 0 else ():
                    if isinstance(item, (*FUNCTIONS, ast.ClassDef)) and item.name == node.id:
                        return module, item
            if (found := _top_level(module, node.id)) is not None:
                return module, found
            for star in module.stars:
                other = self.module_named(star)
                if other is not None and (found := _top_level(other, node.id)) is not None:
                    return other, found
        name = module.resolved(node)
        path, _, leaf = name.rpartition(".")
        other = self.module_named(path) if path else None
        if other is None or other is module or depth > 4:
            return None
        if (found := _top_level(other, leaf)) is not None:
            return other, found
        if leaf in other.imports:  # imported by a package's __init__
            return self.definition(other, ast.Name(id=leaf), depth + 1)
        return None

    def scopes(self, module: Module, node: ast.AST) -> Iterator[Scope]:
        """Yield the functions around a node and the module, from the inside."""
        scope = module.scope_of(node) if node in module.parents else module.source.tree
        while not isinstance(scope, ast.Module):
            yield scope
            scope = module.scope_of(scope)
        yield scope

    def _link(self, module: Module, call: ast.Call) -> None:
        name = last(module.called(call)) or method(call)
        is_spawn = name in ("spawn", "start_processes", "Process", "notebook_launcher", "run")
        if is_spawn:
            spawned = argument(call, "target", 1 if name == "Process" else 0) or argument(call, "fn", 0)
            spawned = spawned or argument(call, "function", 0)
            if isinstance(spawned, ast.Name | ast.Attribute):
                for other, function, skipped in self._functions(module, spawned):
                    self.sites.setdefault(function, []).append(CallSite(call, other and module, True, skipped))
                    self.targets.setdefault(call, []).append((other, function, skipped))
        for other, function, skipped in self._functions(module, call.func):
            self.sites.setdefault(function, []).append(CallSite(call, module, False, skipped))
            self.targets.setdefault(call, []).append((other, function, skipped))

    def _functions(self, module: Module, node: ast.expr) -> list[tuple[Module, Function, int]]:
        found = self.definition(module, node)
        if found is not None:
            other, item = found
            if isinstance(item, FUNCTIONS):
                return [(other, item, 0)]
            assert isinstance(item, ast.ClassDef)
            init = self.method_of(other, item, "__init__")
            return [(*init, 1)] if init is not None else []
        if not isinstance(node, ast.Attribute):
            return []
        cls = self._class_of_object(module, node.value)
        if cls is not None:
            own = self.method_of(*cls, node.attr)
            return [(*own, 1)] if own is not None else []
        named = self._methods.get(node.attr, [])
        owner = last(plain_name(node.value)).lower().replace("_", "")
        if len(named) == 1 and node.attr not in COMMON_METHODS and owner:
            other, cls_node, function = named[0]
            if owner in cls_node.name.lower() or cls_node.name.lower() in owner:
                return [(other, function, 1)]
        return []

    def _class_of_object(self, module: Module, node: ast.expr) -> tuple[Module, ast.ClassDef] | None:
        written = plain_name(node)
        if written == "self":
            cls = module.class_of(node)
            return (module, cls) if cls is not None else None
        values: list[Assignment] = []
        if isinstance(node, ast.Name):
            for scope in self.scopes(module, node):
                values = module.names.get(scope, {}).get(node.id, [])
                if values:
                    break
        elif written:
            values = module.attributes.get(written, [])
        if isinstance(node, ast.Call):
            values = [Assignment(node, node, None)]
        for assignment in values:
            if isinstance(assignment.value, ast.Call):
                found = self.definition(module, assignment.value.func)
                if found is not None and isinstance(found[1], ast.ClassDef):
                    return found[0], found[1]
        return None

    def method_of(self, module: Module, cls: ast.ClassDef, name: str, depth: int = 0) -> tuple[Module, Function] | None:
        """Return a method of a class, or of its bases in the project."""
        for item in cls.body:
            if isinstance(item, FUNCTIONS) and item.name == name:
                return module, item
        for base in cls.bases if depth < 5 else ():
            found = self.definition(module, base)
            if found is not None and isinstance(found[1], ast.ClassDef) and found[1] is not cls:
                inherited = self.method_of(found[0], found[1], name, depth + 1)
                if inherited is not None:
                    return inherited
        return None

    def calls_in(self, node: ast.AST) -> list[ast.Call]:
        """Return the calls in a node."""
        if node in self._calls:
            return self._calls[node]
        self._calls[node] = [item for item in subtree(node) if isinstance(item, ast.Call)]
        return self._calls[node]

    def called_functions(self, node: ast.AST, *, depth: int = 3) -> Iterator[tuple[Module, Function]]:
        """Yield the functions of the project that a node calls, and those that these call."""
        seen: set[Function] = set()
        pending: list[tuple[ast.AST, int]] = [(node, depth)]
        while pending:
            item, left = pending.pop()
            for call in self.calls_in(item):
                for module, function, _ in self.targets.get(call, ()):
                    if function not in seen:
                        seen.add(function)
                        yield module, function
                        if left > 1:
                            pending.append((function, left - 1))

    def with_called(self, module: Module, node: ast.AST, *, depth: int = 3) -> Iterator[tuple[Module, ast.AST]]:
        """Yield a node, and the functions of the project that it calls."""
        yield module, node
        yield from self.called_functions(node, depth=depth)

    # --- where values come from

    def origins(self, module: Module, node: ast.expr, index: int | None = None) -> list[Origin]:
        """Return what a value may be: calls, constants, parameters that nothing is known of."""
        key = (id(node), index)
        if key not in self._origins:
            found: list[Origin] = []
            self._follow(module, node, index, MOST_STEPS, set(), found)
            self._origins[key] = found
        return self._origins[key]

    def calls_behind(self, module: Module, node: ast.expr) -> Iterator[tuple[Module, ast.Call, str]]:
        """Yield the calls among the origins of a value, each with its resolved name."""
        for origin in self.origins(module, node):
            if isinstance(origin.node, ast.Call):
                yield origin.module, origin.node, origin.module.called(origin.node) or method(origin.node)

    def _follow(
        self, module: Module, node: ast.expr, index: int | None, left: int, seen: set[object], found: list[Origin]
    ) -> None:
        if (id(node), index) in seen or len(found) >= MOST_ORIGINS:
            return
        seen.add((id(node), index))
        if left <= 0:
            found.append(Origin(node, module, index))
            return
        more: list[tuple[Module, ast.expr, int | None]] = []
        if isinstance(node, ast.Name):
            more = self._values_of_name(module, node, index, found)
        elif isinstance(node, ast.Attribute):
            more = self._values_of_attribute(module, node, index)
        elif isinstance(node, ast.IfExp):
            more = [(module, node.body, index), (module, node.orelse, index)]
        elif isinstance(node, ast.BoolOp):
            more = [(module, value, index) for value in node.values]
        elif isinstance(node, ast.NamedExpr | ast.Starred | ast.Await):
            more = [(module, node.value, index)]
        elif isinstance(node, ast.Tuple | ast.List) and index is not None and index < len(node.elts):
            more = [(module, node.elts[index], None)]
        elif isinstance(node, ast.Call):
            more = self._values_of_call(module, node, index)
        if not more and not (isinstance(node, ast.Name) and found and isinstance(found[-1].node, ast.arg)):
            found.append(Origin(node, module, index))
        for other, value, position in more:
            self._follow(other, value, position, left - 1, seen, found)

    def _values_of_name(
        self, module: Module, node: ast.Name, index: int | None, found: list[Origin]
    ) -> list[tuple[Module, ast.expr, int | None]]:
        for scope in self.scopes(module, node):
            values = module.names.get(scope, {}).get(node.id, [])
            if not isinstance(scope, ast.Module):
                parameter = next((a for a in _parameters(scope) if a.arg == node.id), None)
            else:
                parameter = None
            reaching, is_certain = reaching_values(module, values, node, scope)
            more = [(module, a.value, a.item if index is None else index) for a in reaching]
            if parameter is not None and not is_certain:
                given = self._values_of_parameter(scope, parameter)
                if not given and not more:
                    found.append(Origin(parameter, module, index))
                more += [(other, value, index) for other, value in given]
            if more or parameter is not None:
                return more
        if node.id in module.imports:
            other = self.module_named(module.imports[node.id].rpartition(".")[0] or "?")
            if other is not None and other is not module:
                values = other.names.get(other.source.tree, {}).get(last(module.imports[node.id]), [])
                return [(other, a.value, a.item if index is None else index) for a in values]
        return []

    def _values_of_parameter(self, scope: Scope, parameter: ast.arg) -> list[tuple[Module, ast.expr]]:
        if isinstance(scope, ast.Module):
            return []
        found: list[tuple[Module, ast.expr]] = []
        for site in self.sites.get(scope, ()):
            value = bound(site, scope, parameter)
            if value is not None:
                found.append((site.module, value))
        return found

    def _values_of_attribute(
        self, module: Module, node: ast.Attribute, index: int | None
    ) -> list[tuple[Module, ast.expr, int | None]]:
        written = plain_name(node)
        if not written:
            return []
        values = module.attributes.get(written, [])
        if written.startswith("self."):
            cls = module.class_of(node)
            values = [a for a in values if module.class_of(a.statement) is cls]
            own = [a for a in values if module.scope_of(a.statement) is module.scope_of(node)]
            if own:
                reaching, is_certain = reaching_values(module, own, node, module.scope_of(node))
                if is_certain:
                    values = reaching
                elif reaching:
                    values = [*reaching, *(a for a in values if a not in own)]
                else:
                    values = [a for a in values if a not in own]
            if not values and cls is not None:
                for base in cls.bases:
                    found = self.definition(module, base)
                    if found is not None and isinstance(found[1], ast.ClassDef):
                        inherited = [a for a in found[0].attributes.get(written, [])
                                     if found[0].class_of(a.statement) is found[1]]  # fmt: skip
                        return [(found[0], a.value, a.item if index is None else index) for a in inherited]
        else:
            scope = module.scope_of(node)
            own = [a for a in values if module.scope_of(a.statement) is scope]
            if own:
                reaching, is_certain = reaching_values(module, own, node, scope)
                values = reaching if is_certain else [*reaching, *(a for a in values if a not in own)]
            cls_found = self._class_of_object(module, node.value) if not values else None
            if cls_found is not None:
                other, cls = cls_found
                values = [
                    a for a in other.attributes.get(f"self.{node.attr}", []) if other.class_of(a.statement) is cls
                ]
                return [(other, a.value, a.item if index is None else index) for a in values]
        return [(module, a.value, a.item if index is None else index) for a in values]

    def _values_of_call(
        self, module: Module, node: ast.Call, index: int | None
    ) -> list[tuple[Module, ast.expr, int | None]]:
        name = method(node)
        if name in PASSING and index is None:
            is_method = isinstance(node.func, ast.Attribute) and not module.called(node).startswith(("torch.", "apex."))
            if is_method and isinstance(node.func, ast.Attribute) and not self.targets.get(node):
                return [(module, node.func.value, None)]
            if node.args and (not is_method or name.startswith("convert")):
                return [(module, node.args[0], None)]
        found: list[tuple[Module, ast.expr, int | None]] = []
        for other, function, skipped in self.targets.get(node, ()):
            if skipped and function.name == "__init__":
                return []
            for item in subtree(function):
                is_own = isinstance(item, ast.Return) and other.scope_of(item) is function
                if is_own and isinstance(item, ast.Return) and item.value is not None:
                    found.append((other, item.value, index))
        return found


def bound(site: CallSite, function: Function, parameter: ast.arg) -> ast.expr | None:
    """Return the argument of a call that a parameter gets; None if it is not given."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)][site.skipped :]
    call = site.call
    if site.is_spawn:
        args = argument(call, "args", 1 if method(call) != "Process" else 3)
        is_process = method(call) in ("Process", "notebook_launcher")
        if isinstance(args, ast.Tuple | ast.List) and parameter.arg in names:
            position = names.index(parameter.arg) - (0 if is_process else 1)
            return args.elts[position] if 0 <= position < len(args.elts) else None
        return None
    for item in call.keywords:
        if item.arg == parameter.arg:
            return item.value
    if parameter.arg in names:
        position = names.index(parameter.arg)
        if position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1]):
            return call.args[position]
    return _default(function, parameter)


def _default(function: Function, parameter: ast.arg) -> ast.expr | None:
    plain = [*function.args.posonlyargs, *function.args.args]
    defaults = function.args.defaults
    for item, value in zip(plain[len(plain) - len(defaults) :], defaults, strict=True):
        if item is parameter:
            return value
    for item, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
        if item is parameter:
            return default
    return None


def reaching_values(
    module: Module, values: Sequence[Assignment], use: ast.AST, scope: Scope
) -> tuple[list[Assignment], bool]:
    """Return the assignments that may have given a name its value at a use, and whether one of them certainly has.

    Assignments in the other branch of an `if` are left out, and those before one that lies on every way to the use.
    """
    if len(values) > MOST_VALUES:
        return [], False
    if module.scope_of(use) is not scope or not values:
        return list(values), False
    chain = {use, *module.within(use)}
    loops = set(module.loops_of(use))
    before = [a for a in values if _position(a.statement) < _position(use) and not _contains(a.statement, chain)]
    own = [a for a in values if _contains(a.statement, chain)]
    after = [a for a in values if a not in before and a not in own and loops & set(module.loops_of(a.statement))]
    after += [a for a in own if loops]
    before = [a for a in before if not exclusive(module, a.statement, use)]
    after = [a for a in after if not exclusive(module, a.statement, use)]
    for number in range(len(before) - 1, -1, -1):
        if module.parents.get(module.statement_of(before[number].statement)) in chain or isinstance(
            before[number].statement, ast.withitem
        ):
            kept = before[number:]
            return kept + [a for a in after if a not in kept], True
    return before + after, False


def exclusive(module: Module, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in different branches of one `if` or `try`."""
    below_one: dict[ast.AST, ast.AST] = {}
    under = one
    for above in module.within(one):
        below_one[above] = under
        under = above
    under = other
    for above in module.within(other):
        if above in below_one:
            return isinstance(above, ast.If) and _branch(above, below_one[above]) != _branch(above, under)
        under = above
    return False


def _branch(node: ast.If, child: ast.AST) -> int:
    return 1 if any(item is child for item in node.body) else 2 if any(item is child for item in node.orelse) else 0


def _position(node: ast.AST) -> tuple[int, int]:
    if isinstance(node, ast.withitem):
        node = node.context_expr
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _contains(statement: ast.AST, chain: set[ast.AST]) -> bool:
    return statement in chain


def _parameters(function: Function) -> list[ast.arg]:
    args = function.args
    more = [a for a in (args.vararg, args.kwarg) if a is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *more]


def _top_level(module: Module, name: str) -> ast.AST | None:
    return module.functions.get(name) or module.classes.get(name)


def _ends_alike(dotted: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    number = min(len(dotted), len(parts))
    return number > 0 and dotted[-number:] == parts[-number:]


__all__ = ["CallSite", "Origin", "Project", "bound", "constant", "exclusive", "reaching_values"]
