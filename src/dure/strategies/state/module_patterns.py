"""Patterns for names of modules, as in settings: `blocks.*.mlp`."""

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module for each module whose dotted name matches, outer ones before those inside them.

    Args:
        model: Model; its own name is empty and matches nothing.
        pattern: Dotted name in which `*` and `?` match parts of a name between two dots.
    """
    wanted = pattern.strip().split(".")
    for name, module in model.named_modules():
        parts = name.split(".")
        if name and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
            yield name, module


def shortened(names: Iterable[str]) -> str:
    """Return names with their first numbers merged: `blocks.0.up, blocks.1.up` as `blocks.0-1.up`."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in names:
        before, number, after = _numbered(name)
        found.setdefault((before, after), []).extend([] if number is None else [number])
    return ", ".join(f"{before}{_ranges(numbers)}{after}" for (before, after), numbers in found.items())


def _numbered(name: str) -> tuple[str, int | None, str]:
    """Split a name at its first part that is a number."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdecimal():
            before = "".join(f"{rest}." for rest in parts[:position])
            return before, int(part), "".join(f".{rest}" for rest in parts[position + 1 :])
    return name, None, ""


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
