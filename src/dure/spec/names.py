"""What to say of a name that is not known."""

import difflib
from collections.abc import Iterable

_LIKENESS = 0.6
"""From which a name may be what was meant."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say in one sentence that a name is unknown: what was meant, if that can be guessed, and the known ones.

    The nearest come first, the others in their own order.
    """
    names = list(known)
    if not names:
        return f"unknown {kind} {name!r}: there is none"
    likeness = {one: difflib.SequenceMatcher(None, name.lower(), one.lower()).ratio() for one in names}
    near = sorted((one for one in names if likeness[one] >= _LIKENESS), key=lambda one: -likeness[one])[:3]
    guess = f"did you mean {near[0]}? " if near else ""
    ordered = [*near, *(one for one in names if one not in near)]
    return f"unknown {kind} {name!r}: {guess}known: {', '.join(ordered)}"
