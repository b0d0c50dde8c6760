"""Messages about unknown names."""

import difflib
from collections.abc import Callable, Iterable

from dure.spec.foreign_names import place_of

_LIKENESS = 0.6
"""Similarity ratio from which a name is suggested."""
_MOST_NEAR = 3
_FEW = 20
"""Maximum number of names that are listed in full."""


def unknown_name(kind: str, name: str, known: Iterable[str], otherwise: str = "there is no similar name") -> str:
    """Return a sentence about an unknown name, with the most similar name if there is one, or the known ones if few.

    Args:
        kind: Kind of the name.
        name: Name as it was written.
        known: Known names; the most similar ones are listed first, the others in their own order.
        otherwise: Text if there are many names, and none is similar.
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
    otherwise: str = "there is no similar name",
    *,
    has_task: bool = True,
) -> str:
    """Return a sentence about an unknown setting, with its equivalent if another tool has it, or else similar names.

    Args:
        kind: Kind of the name: `flag`, `setting`, `environment variable`.
        name: Name as it was written.
        known: Accepted settings, by their names in `RunSpec`.
        spell: Spells a setting as the caller would.
        otherwise: Text if no name is similar.
        has_task: False if no task is run.
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
