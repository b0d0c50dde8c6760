"""Sentences about names that are not known."""

import difflib
from collections.abc import Callable, Iterable

from dure.spec.foreign_names import place_of

_LIKENESS = 0.6
"""Ratio from which a name may be what was meant."""
_MOST_NEAR = 3
_FEW = 20
"""Most names that are listed in full."""


def unknown_name(kind: str, name: str, known: Iterable[str], otherwise: str = "nothing is called so") -> str:
    """Say in one sentence that a name is unknown: what was meant, if that can be guessed, and the known ones if few.

    Args:
        kind: What it is.
        name: As it was written.
        known: The nearest of them come first, the others in their own order.
        otherwise: What is said where there are many, and none is near.
    """
    names = list(known)
    if not names:
        return f"unknown {kind} {name!r}: there is none"
    near = _nearest(name, names)
    if len(names) > _FEW:
        return f"unknown {kind} {name!r}: " + (f"did you mean {_either(near)}?" if near else otherwise)
    guess = f"did you mean {near[0]}? " if near else ""
    ordered = [*near, *(one for one in names if one not in near)]
    return f"unknown {kind} {name!r}: {guess}known: {', '.join(ordered)}"


def unknown_setting(
    kind: str,
    name: str,
    known: Iterable[str],
    spell: Callable[[str], str],
    otherwise: str = "nothing is called so",
    *,
    has_task: bool = True,
) -> str:
    """Say that a setting is unknown: what takes its place if another tool has it, or else what is near.

    Args:
        kind: What it is: `flag`, `setting`, `environment variable`.
        name: As it was written.
        known: Settings that are taken, by their names in `RunSpec`.
        spell: Writes a setting as the caller would.
        otherwise: What is said where none is near.
        has_task: False if what runs is no task.
    """
    settings = list(known)
    instead = place_of(name, settings, spell, has_task=has_task)
    if instead is not None:
        return f"unknown {kind} {name!r}: {instead}"
    return unknown_name(kind, name, map(spell, settings), otherwise)


def _nearest(name: str, names: list[str]) -> list[str]:
    likeness = {one: difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio() for one in names}
    near = [one for one in names if likeness[one] >= _LIKENESS]
    return sorted(near, key=lambda one: -likeness[one])[:_MOST_NEAR]


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
