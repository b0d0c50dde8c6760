"""What to say of a name that is not known."""

import difflib
from collections.abc import Iterable


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Order the known names by their likeness to a name that is not among them."""
    return sorted(known, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say in one sentence that a name is unknown: what was meant, if that can be guessed, and the known ones."""
    ordered = nearest_first(name, known)
    if not ordered:
        return f"unknown {kind} {name!r}: there is none"
    is_near = difflib.SequenceMatcher(None, name.lower(), ordered[0].lower()).ratio() >= 0.6
    guess = f"did you mean {ordered[0]}? " if is_near else ""
    return f"unknown {kind} {name!r}: {guess}known: {', '.join(ordered)}"
