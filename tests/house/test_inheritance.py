"""Inheritance: a class is found in three places at most, itself among them; what else it needs are objects it has."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MOST_LEVELS = 3

Bases = dict[tuple[str, str], list[tuple[str, str]]]
"""Bases of each class, both by module and name; those of other packages are left out."""


def bases_of(sources: dict[str, str]) -> Bases:
    """Read the classes of modules, given by their names with their texts."""
    found: Bases = {}
    for module, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        imported = [
            (alias.asname or alias.name, node.module, alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
        ]
        known = {name: (origin, original) for name, origin, original in imported if origin in sources}
        known |= {node.name: (module, node.name) for node in classes}
        modules = {name: f"{origin}.{original}" for name, origin, original in imported}
        for node in classes:
            found[module, node.name] = []
            for base in node.bases:
                prefix, _, name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")
                if prefix and modules.get(prefix) in sources:
                    found[module, node.name].append((modules[prefix], name))
                elif not prefix and name in known:
                    found[module, node.name].append(known[name])
    return found


def levels(bases: Bases, cls: tuple[str, str]) -> int:
    """Count the classes on the longest way from a class to one without a base of ours, both among them."""
    return 1 + max((levels(bases, base) for base in bases.get(cls, ()) if base != cls), default=0)


def too_deep(sources: dict[str, str]) -> list[str]:
    """Return the classes with more levels than there may be."""
    bases = bases_of(sources)
    return [f"{module}:{name}" for module, name in bases if levels(bases, (module, name)) > MOST_LEVELS]


@pytest.mark.slow
def test_classes_when_their_bases_are_counted_then_none_is_deeper_than_three() -> None:
    paths = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in (SOURCE / "dure").rglob("*.py")}
    assert too_deep({name: path.read_text(encoding="utf-8") for path, name in paths.items()}) == []


@pytest.mark.parametrize(
    "last",
    [
        "from p.b import C\nclass D(C): ...",
        "import x\nfrom p.b import C as E\nclass D(x.Y, E): ...",
        "from p import b\nclass D(b.C): ...",
        "from p.b import C\nclass D(C[int]): ...",
    ],
)
def test_too_deep_when_a_fourth_class_is_derived_then_it_is_found(last: str) -> None:
    sources = {"a": "class A: ...\nclass B(A): ...", "p.b": "from a import B\nclass C(B): ...", "c": last}
    assert too_deep(sources) == ["c:D"]


def test_too_deep_when_a_base_of_another_package_has_a_familiar_name_then_it_is_not_counted() -> None:
    sources = {"a": "class A: ...\nclass B(A): ...", "b": "import z\nclass C(z.B): ...\nclass D(C): ..."}
    assert too_deep(sources) == []
