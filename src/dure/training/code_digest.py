"""Digests of the code that a task consists of, definition by definition: what changes them changes what is trained.

Comments, formatting and docstrings do not count, nor does code that the task cannot reach. Code of installed libraries
is left out: their versions are recorded.
"""

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dure.training.digests import class_digest

_MOST_DEFINITIONS = 2000
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def code_digests(cls: type) -> dict[str, str]:
    """Return the digest of every definition that a class can reach, by `file.py:name`.

    The source is read once per class and process, when the class is first asked about: soon after its import, so that a
    file which is edited while a run goes on does not count for it.
    """
    reader = _Reader()
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__ in ("builtins", "abc") or (module is not None and _is_library(module)):
            continue
        if module is None or not reader.reach(module, base.__name__):
            reader.found[base.__name__] = class_digest(base)  # its source cannot be read again: a notebook's
    return dict(sorted(reader.found.items()))


class _Reader:
    """Reader that follows names from definition to definition, through the modules of the user's own."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._modules: dict[str, _Source | None] = {}
        self._seen: set[tuple[str, str]] = set()

    def reach(self, module: ModuleType, name: str) -> bool:
        """Add a module's definition of a name and what that reaches; return whether there is such a definition."""
        source = self._source(module)
        if source is None or name not in source.definitions:
            return False
        waiting = [(source, name), *((source, statement) for statement in source.loose)]
        while waiting and len(self._seen) < _MOST_DEFINITIONS:
            source, name = waiting.pop()
            if (source.label, name) in self._seen:
                continue
            self._seen.add((source.label, name))
            for node in source.definitions.get(name, []):
                self.found |= dict(_digests(node, f"{source.label}:{name}"))
                waiting += self._reached(source, node)
        return True

    def _source(self, module: ModuleType) -> "_Source | None":
        name = module.__name__
        if name not in self._modules:
            self._modules[name] = None if _is_library(module) else _Source.of(module)
        return self._modules[name]

    def _reached(self, source: "_Source", node: ast.AST) -> Iterator[tuple["_Source", str]]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and inner.id in source.definitions:
                yield source, inner.id
            elif isinstance(inner, ast.Name) and inner.id in source.imported:
                yield from self._imported(*source.imported[inner.id])

    def _imported(self, module_name: str, name: str | None) -> Iterator[tuple["_Source", str]]:
        if name is not None and f"{module_name}.{name}" in sys.modules:
            module_name, name = f"{module_name}.{name}", None
        module = sys.modules.get(module_name)
        source = None if module is None else self._source(module)
        if source is None:
            return
        for definition in source.definitions if name is None else [name]:
            yield source, definition
        if name is not None and name in source.imported:  # handed on by a package's __init__
            yield from self._imported(*source.imported[name])


class _Source:
    """The definitions of one module at its top level."""

    def __init__(self, module: ModuleType, tree: ast.Module, label: str) -> None:
        self.label = label
        self.definitions: dict[str, list[ast.AST]] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}
        self.loose: list[str] = []
        """Statements that define nothing and may set something (a default dtype), by their text."""
        for node in tree.body:
            self._add(module, node)

    @classmethod
    def of(cls, module: ModuleType) -> "_Source | None":
        """Read a module's file; None if it has none that can be read."""
        file = getattr(module, "__file__", None)
        if not isinstance(file, str):
            return None
        try:
            return cls(module, ast.parse(Path(file).read_bytes()), Path(file).name)
        except (OSError, SyntaxError, ValueError):
            return None

    def _add(self, module: ModuleType, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or name] = (name, None)
        elif isinstance(node, ast.ImportFrom):
            package = module.__package__ or module.__name__
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                self.imported[alias.asname or alias.name] = (origin, alias.name)
        elif names := _defined_names(node):
            for name in names:
                self.definitions.setdefault(name, []).append(node)
        elif not _starts_something(node):
            name = f"`{ast.unparse(node).splitlines()[0][:60]}`"
            self.definitions[name] = [node]
            self.loose.append(name)


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, _Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        inner.id
        for target in targets
        if target is not None
        for inner in ast.walk(target)
        if isinstance(inner, ast.Name)
    ]


def _starts_something(node: ast.stmt) -> bool:
    """Return whether a statement is the script's own part, with settings that a resume may choose again."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or bool(names & {"dure", "__name__"})


def _digests(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield a definition's digest; of a class those of its methods, each by its own name."""
    if isinstance(node, ast.ClassDef):
        methods = [inner for inner in node.body if isinstance(inner, _Definition)]
        for method in methods:
            yield from _digests(method, f"{name}.{method.name}")
        rest = [inner for inner in node.body if not isinstance(inner, _Definition) and not _is_docstring(inner)]
        parts = [*node.bases, *node.keywords, *node.decorator_list, *rest]
        yield name, _digest(";".join(ast.dump(part) for part in parts))
        return
    yield name, _digest(ast.dump(_WithoutDocstrings().visit(ast.parse(ast.unparse(node)))))


class _WithoutDocstrings(ast.NodeTransformer):
    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(node, _Definition) and body and _is_docstring(body[0]):
            node.body = body[1:] or [ast.Pass()]
        return node


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _library_folders() -> tuple[str, ...]:
    import dure

    paths = sysconfig.get_paths()
    folders = [Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(str(folder.resolve()) for folder in [*folders, Path(dure.__file__).parent])


def _is_library(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return module.__name__ in sys.builtin_module_names
    resolved = str(Path(file).resolve())
    return any(resolved.startswith(f"{folder}/") for folder in _library_folders()) or "/site-packages/" in resolved
