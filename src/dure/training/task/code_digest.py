"""Digests of a task's code, definition by definition, to detect changes of what is trained.

Comments, formatting and docstrings do not count, nor does code that the task cannot reach. Installed libraries are
excluded, because their versions are recorded.
"""

import ast
import functools
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from dure.failures.frames import OWN_ROOT, is_installed, is_of_engine
from dure.training.task.digests import class_digest

_MOST_DEFINITIONS = 2000
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@functools.cache
def code_digests(cls: type) -> dict[str, str]:
    """Return the digest of every definition that a class can reach, by `file.py:name`.

    The source is read once per class and process, at the first call. That is soon after its import, so that edits of a
    file during a run do not count.
    """
    reader = _Reader()
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__ != "__main__" and _is_library(base.__module__):
            continue
        if module is None or not reader.reach(module, base.__name__):
            reader.found[base.__name__] = [class_digest(base)]  # the source cannot be read again, as in a notebook
    # files of one name are not distinguished
    return {
        name: each[0] if len(each) == 1 else _digest("".join(sorted(each)))
        for name, each in sorted(reader.found.items())
    }


class _Reader:
    """Reader that follows names from definition to definition through the user's own modules."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self._sources: dict[str, _Source | None] = {}
        self._seen: set[tuple[str, str]] = set()
        self._read: set[str] = set()

    def reach(self, module: ModuleType, name: str) -> bool:
        """Add a module's definition of a name and all that it reaches; return whether there is such a definition."""
        source = self._source(module.__name__)
        if source is None or name not in source.definitions:
            return False
        waiting = [(source, name)]
        while waiting and len(self.found) < _MOST_DEFINITIONS:
            source, name = waiting.pop()
            if (source.file, name) in self._seen:
                continue
            self._seen.add((source.file, name))
            if source.file not in self._read:
                self._read.add(source.file)
                waiting += self._run_by_import(source)
            found: dict[str, str] = {}
            for node in source.definitions.get(name, []):
                for own, digest in _digests(node, f"{source.label}:{name}"):
                    found[own] = _digest(found[own] + digest) if own in found else digest
                waiting += self._reached(source, node)
            for own, digest in found.items():
                self.found.setdefault(own, []).append(digest)
            for origin, inner in source.imported.get(name, []):
                waiting += self._imported(origin, inner)
            if name not in source.definitions and name not in source.imported:
                stars = (self._source(origin) for origin in source.stars)
                waiting += [(other, name) for other in stars if other is not None]
        return True

    def _source(self, module_name: str) -> "_Source | None":
        if module_name not in self._sources:
            self._sources[module_name] = _Source.of(module_name)
        return self._sources[module_name]

    def _run_by_import(self, source: "_Source") -> Iterator[tuple["_Source", str]]:
        """Yield the statements that run when a module is imported, and those of the modules that it imports."""
        yield from ((source, statement) for statement in source.loose)
        origins = [origin for found in source.imported.values() for origin, _ in found] + source.stars
        yield from ((other, "") for origin in origins if (other := self._source(origin)) is not None)

    def _reached(self, source: "_Source", node: ast.AST) -> Iterator[tuple["_Source", str]]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):  # inside a function
                for _, origin, name in _imported(inner, source.package):
                    yield from self._imported(origin, name)
            elif isinstance(inner, ast.Name):
                yield source, inner.id

    def _imported(self, module_name: str, name: str | None) -> Iterator[tuple["_Source", str]]:
        source = self._source(module_name)
        if source is None and _is_library(module_name):
            return
        if name not in (None, "*") and (inner := self._source(f"{module_name}.{name}")) is not None:
            source, name = inner, None
        if source is not None:
            every = [*source.definitions, *source.imported]
            yield from ((source, each) for each in (every if name in (None, "*") else [name]) if each is not None)


class _Source:
    """Top-level definitions of one module."""

    def __init__(self, tree: ast.Module, file: str, package: str) -> None:
        self.file = file
        self.label = Path(file).name
        self.package = package
        self.definitions: dict[str, list[ast.AST]] = {}
        self.imported: dict[str, list[tuple[str, str | None]]] = {}
        self.stars: list[str] = []
        self.loose: list[str] = []
        """Statements that define nothing and may set something (a default dtype), by their text."""
        for node in tree.body:
            self._add(node)

    @classmethod
    def of(cls, module_name: str) -> "_Source | None":
        """Read a module's file; return None if it belongs to a library or has no readable file."""
        file = _file_of(module_name)
        if file is None or _is_library_file(file):
            return None
        module = sys.modules.get(module_name)
        is_package = Path(file).name == "__init__.py"
        package = getattr(module, "__package__", None) or (
            module_name if is_package else module_name.rpartition(".")[0] or module_name
        )
        try:
            return cls(ast.parse(Path(file).read_bytes()), file, package)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif names := _defined_names(node):
            for name in names:
                self.definitions.setdefault(name, []).append(node)
        elif not _starts_something(node):
            name = f"`{ast.unparse(node).splitlines()[0][:60]}`"
            self.definitions.setdefault(name, []).append(node)
            self.loose.append(name)
            for inner in _at_top_level(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    self._import(inner)
                for own in _defined_names(inner):
                    self.definitions.setdefault(own, []).append(inner)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for bound, origin, name in _imported(node, self.package):
            if name == "*":
                self.stars.append(origin)
            else:
                self.imported.setdefault(bound, []).append((origin, name))


def _imported(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield the names that an import binds, each with its module and its name there."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            yield bound, alias.name, None
            if not alias.asname and "." in alias.name:
                yield bound, bound, None
        return
    parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    origin = ".".join([*parents, *([node.module] if node.module else [])])
    for alias in node.names:
        yield alias.asname or alias.name, origin, alias.name


def _at_top_level(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield the statements in the branches of an `if`, `try`, `with` or loop, recursively."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ExceptHandler | ast.match_case):
            yield from (each for one in inner.body for each in (one, *_at_top_level(one)))
        elif isinstance(inner, ast.stmt):
            yield inner
            if not isinstance(inner, _Definition):
                yield from _at_top_level(inner)


def _file_of(module_name: str) -> str | None:
    """Return the file of a module, whether imported yet or not; None if it has none."""
    if (module := sys.modules.get(module_name)) is not None:
        file = getattr(module, "__file__", None)
        return file if isinstance(file, str) else None
    path, spec = None, None
    parents = module_name.split(".")
    for length in range(1, len(parents) + 1):
        try:
            spec = PathFinder.find_spec(".".join(parents[:length]), path)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return spec.origin if spec is not None and spec.has_location else None


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, _Definition):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [inner.id for target in targets for inner in ast.walk(target) if isinstance(inner, ast.Name)]


def _starts_something(node: ast.stmt) -> bool:
    """Return whether a statement belongs to the script itself, with settings that a resume may change."""
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or bool(names & {"dure", "__name__"})


def _digests(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield a definition's digest; for a class also those of its methods, by their own names."""
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
    paths = sysconfig.get_paths()
    folders = [Path(paths[key]) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(str(folder.resolve()) for folder in [*folders, Path(OWN_ROOT)])


def _is_library(module_name: str) -> bool:
    file = _file_of(module_name)
    return _is_library_file(file) if file is not None else module_name.partition(".")[0] in sys.stdlib_module_names


@functools.cache
def _is_library_file(file: str) -> bool:
    resolved = str(Path(file).resolve())
    return any(resolved.startswith(f"{folder}/") for folder in _library_folders()) or any(
        is_installed(name) or is_of_engine(name) for name in (file, resolved)
    )
