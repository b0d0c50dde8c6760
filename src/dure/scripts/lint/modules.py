"""Modules of a project as the rules see them: parents, names through imports, functions, calls and assignments."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

from dure.scripts.lint.source import Source

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOVES = frozenset({"to", "cuda", "xpu"})
"""Methods by which scripts move models and tensors to a device."""
ACCELERATORS = frozenset({"cuda", "nccl", "npu", "xpu", "hpu"})
"""Words in scripts that use a device whose kernels run while Python goes on."""
_SPAN, _BODY = "dure_span", "dure_body"
"""Attributes of nodes: the place of a subtree in its module's list of nodes, and the body of a loop."""
_LONG_TEXT = 80
LOOPS = (ast.For, ast.AsyncFor, ast.While)
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


class Assignment(NamedTuple):
    """Assignment to a name, or to an attribute."""

    statement: ast.AST
    value: ast.expr
    item: int | None
    """Index of the value's item that is assigned; None if it is the value itself."""


@dataclass(eq=False)
class Module:
    """Parsed file with its indexes."""

    source: Source
    dotted: tuple[str, ...]
    """Name of the module as its path below the project's root."""
    is_context: bool = False
    """True if it was read for what others import from it; nothing is reported in it."""
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    blocks: dict[ast.AST, list[ast.stmt]] = field(default_factory=dict)
    """Block of statements that each statement is in."""
    imports: dict[str, str] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    """Top-level functions by name."""
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    nodes: list[ast.AST] = field(default_factory=list)
    """All nodes in the order of the text."""
    calls: list[ast.Call] = field(default_factory=list)
    names: dict[Scope, dict[str, list[Assignment]]] = field(default_factory=dict)
    """Assignments to names by scope."""
    attributes: dict[str, list[Assignment]] = field(default_factory=dict)
    """Assignments to attributes by the written target, `self.model` or `args.rank`."""

    def __post_init__(self) -> None:
        pending: list[ast.AST | None] = [self.source.tree]
        under_way: list[tuple[ast.AST, int]] = []
        while pending:
            node = pending.pop()
            if node is None:  # all below the node that was begun last has been seen
                ended, start = under_way.pop()
                vars(ended)[_SPAN] = self.nodes, start, len(self.nodes)
                continue
            under_way.append((node, len(self.nodes)))
            pending.append(None)
            self.nodes.append(node)
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    self.blocks.update((statement, block) for statement in block)
            children = list(ast.iter_child_nodes(node))
            for child in children:
                # contexts and operators are shared between nodes; no rule asks for their parents
                self.parents[child] = node
            pending += reversed(children)
        for node in self.nodes:
            self._index(node)

    def _index(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.calls.append(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.imports[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            base = self._absolute(node)
            for alias in node.names:
                if alias.name == "*":
                    self.stars.append(base)
                else:
                    self.imports[alias.asname or alias.name] = f"{base}.{alias.name}".lstrip(".")
        elif isinstance(node, FUNCTIONS):
            if isinstance(self.parents.get(node), ast.Module | ast.If | ast.Try):
                self.functions.setdefault(node.name, node)
        elif isinstance(node, ast.ClassDef):
            self.classes.setdefault(node.name, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(node, target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            if node.value is not None:
                self._assign(node, node.target, node.value)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node, node.optional_vars, node.context_expr)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.dotted[: max(0, len(self.dotted) - node.level)]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _assign(self, statement: ast.AST, target: ast.expr, value: ast.expr, index: int | None = None) -> None:
        if isinstance(target, ast.Name):
            scope = self.scope_of(statement)
            self.names.setdefault(scope, {}).setdefault(target.id, []).append(Assignment(statement, value, index))
        elif isinstance(target, ast.Attribute):
            written = plain_name(target)
            if written:
                self.attributes.setdefault(written, []).append(Assignment(statement, value, index))
        elif isinstance(target, ast.Tuple | ast.List) and index is None:
            for position, item in enumerate(target.elts):
                if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                    self._assign(statement, item, value.elts[position])
                else:
                    self._assign(statement, item, value, position)

    # --- names

    def resolved(self, node: ast.AST) -> str:
        """Return a dotted name with imports followed: `dist.barrier` as `torch.distributed.barrier`; "" for others."""
        written = plain_name(node)
        if not written:
            return ""
        first, _, rest = written.partition(".")
        base = self.imports.get(first, first)
        return f"{base}.{rest}" if rest else base

    def called(self, call: ast.Call) -> str:
        """Return the resolved name of what a call calls."""
        return self.resolved(call.func)

    @cached_property
    def words(self) -> frozenset[str]:
        """All names and attributes of the module, and its short strings."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < _LONG_TEXT:
                found.add(node.value)
        return frozenset(found)

    @cached_property
    def named_calls(self) -> list[tuple[ast.Call, str]]:
        """Calls, each with its resolved name."""
        return [(call, self.called(call) or method(call)) for call in self.calls]

    # --- places

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, or the module, in which a node is evaluated."""
        above = self.parents.get(node)
        while above is not None and not isinstance(above, (*FUNCTIONS, ast.Module)):
            above = self.parents.get(above)
        return above if above is not None else self.source.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class in which a node is."""
        return next((above for above in self.above(node) if isinstance(above, ast.ClassDef)), None)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain a node, from the inside."""
        above = self.parents.get(node)
        while above is not None:
            yield above
            above = self.parents.get(above)

    def within(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes above a node up to the function that it is in, which is the last one."""
        for above in self.above(node):
            yield above
            if isinstance(above, (*FUNCTIONS, ast.Module)):
                return

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the statement of a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def block_of(self, statement: ast.AST) -> list[ast.stmt]:
        """Return the block of statements that contains a statement."""
        return self.blocks.get(statement, [])

    def loops_of(self, node: ast.AST) -> list[ast.AST]:
        """Return the loops around a node in its function, from the inside."""
        found: list[ast.AST] = []
        below = node
        for above in self.within(node):
            if isinstance(above, LOOPS) and any(item is below for item in above.body):
                found.append(above)
            below = above
        return found


def is_script(module: Module) -> bool:
    """Return whether a module is made to be started: it tests for `__main__`."""
    return any(
        getattr(getattr(getattr(node, "test", None), "left", None), "id", "") == "__name__"
        for node in module.source.tree.body
    )


def plain_name(node: ast.AST) -> str:
    """Return a name with its attributes as `a.b.c`; an empty string if something else has the attributes."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def last(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def method(call: ast.Call) -> str:
    """Return the last part of the name of what is called, whatever has it."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else plain_name(call.func)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a call's keyword argument."""
    return next((item.value for item in call.keywords if item.arg == name), None)


def argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """Return an argument that may be given by position or by name."""
    given = keyword(call, name)
    if given is None and position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return given


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant; an ellipsis for anything else."""
    return node.value if isinstance(node, ast.Constant) else ...


def subtree(node: ast.AST) -> Sequence[ast.AST]:
    """Return a node and all below it, in the order of the text."""
    span = vars(node).get(_SPAN)
    if span is None:  # not of a module's tree
        return [*below(node)]
    nodes, start, end = span
    return cast("list[ast.AST]", nodes[start:end])


def body_of(loop: ast.AST) -> ast.Module:
    """Return the body of a loop as a node, the same at each call."""
    kept = vars(loop).get(_BODY)
    if kept is None:
        kept = vars(loop)[_BODY] = ast.Module(body=[*getattr(loop, "body", [])], type_ignores=[])
        spans = [vars(statement).get(_SPAN) for statement in kept.body]
        if spans and spans[0] is not None and spans[-1] is not None:
            vars(kept)[_SPAN] = spans[0][0], spans[0][1], spans[-1][2]
    return cast("ast.Module", kept)


def below(node: ast.AST, *, into_functions: bool = True) -> Iterator[ast.AST]:
    """Yield a node and all below it, in the order of the text.

    Args:
        node: Node at the top.
        into_functions: Whether functions that are defined below it are entered.
    """
    if into_functions and _SPAN in vars(node):
        yield from subtree(node)
        return
    pending = [node]
    while pending:
        node = pending.pop()
        yield node
        children = list(ast.iter_child_nodes(node))
        if not into_functions:
            children = [item for item in children if not isinstance(item, (*FUNCTIONS, ast.ClassDef, ast.Lambda))]
        pending += reversed(children)


def words(node: ast.AST) -> set[str]:
    """Return all names and attributes in a node."""
    return {item.id if isinstance(item, ast.Name) else item.attr for item in subtree(node)
            if isinstance(item, ast.Name | ast.Attribute)}  # fmt: skip
