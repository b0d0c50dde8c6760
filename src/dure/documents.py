"""Reader, with limits, for JSON and TOML from elsewhere: files of a run, settings, messages of peers.

No input makes it raise anything except `DocumentInvalid`, fills the memory, or makes it wait for a writer that never
comes. The caller checks the contents of fields.
"""

import json
import os
import re
import stat
import tomllib
from collections import deque
from pathlib import Path
from typing import Any

from dure.units import format_bytes

MOST_BYTES = 64 * 2**20
"""Maximum bytes of a JSON document."""
MOST_TOML_BYTES = 2**20
_MOST_INTEGER_BITS = 1024
"""Maximum bits of an integer in TOML; no setting is as large."""
MOST_DEPTH = 100
"""Maximum nesting of lists and objects. Python code that processes the result recurses as deeply again, several frames
each.
"""
_LONG_KEY = re.compile(r"(?:^|[={,])(?:[ \t]*[^\s={#,.]+[ \t]*\.){200}", re.MULTILINE)
"""Key of twice as many parts as there may be levels."""


class DocumentInvalid(ValueError):
    """Fault of a document, as the rest of a sentence that begins with its name."""


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DocumentInvalid: It is not a regular file, too large, too deep or not JSON.
        OSError: The system cannot read it.
    """
    return parse_json(read_bytes(path, at_most=MOST_BYTES))


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        DocumentInvalid: It is not a regular file, too large, too deep or not TOML.
        OSError: The system cannot read it.
    """
    try:
        text = read_bytes(path, at_most=MOST_TOML_BYTES).decode()
        if _LONG_KEY.search(text):  # Python's parser takes seconds for one of thousands of parts
            raise DocumentInvalid(_too_deep(MOST_DEPTH))
        found = tomllib.loads(text)
    except DocumentInvalid:
        raise
    except tomllib.TOMLDecodeError as error:
        raise DocumentInvalid(f"is not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise DocumentInvalid(f"is not UTF-8 text (byte {error.start}): TOML files are") from None
    except RecursionError:
        raise DocumentInvalid(_too_deep(MOST_DEPTH)) from None
    except ValueError as error:  # an integer of more digits than Python reads
        raise DocumentInvalid(f"cannot be read: {error}") from None
    _check_depth(found, MOST_DEPTH)
    _check_integers(found)
    return found


def not_waiting(name: str, flags: int) -> int:
    """Open a file without waiting for a writer if it is a pipe: an `opener` for `open`."""
    return os.open(name, flags | os.O_NONBLOCK)


def read_bytes(path: Path, *, at_most: int) -> bytes:
    """Read a regular file of limited size.

    Raises:
        DocumentInvalid: It is not a regular file, or it is larger.
        OSError: The system cannot read it.
    """
    # a pipe in its place would make the reader wait forever
    with open(path, "rb", opener=not_waiting) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise DocumentInvalid("is not a regular file")
        data = file.read(at_most + 1) if found.st_size <= at_most else None
    if data is None or len(data) > at_most:
        raise DocumentInvalid(f"has more than {format_bytes(at_most)}, which is the most that is read")
    return data


def parse_json(text: bytes | str, *, may_repeat_keys: bool = False, most_depth: int | None = MOST_DEPTH) -> Any:
    """Parse JSON.

    Args:
        text: JSON in UTF-8.
        may_repeat_keys: Whether an object may have a key twice, of which the last counts: faster without the check.
        most_depth: Maximum depth; None for the limit of Python's parser.

    Raises:
        DocumentInvalid: It is too deep or not JSON.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        found = json.loads(text, object_pairs_hook=None if may_repeat_keys else _without_repeats)
    except DocumentInvalid:
        raise
    except UnicodeDecodeError as error:
        raise DocumentInvalid(f"is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise DocumentInvalid(_too_deep(most_depth)) from None
    except ValueError as error:
        raise DocumentInvalid(f"is no JSON: {error}") from None
    if most_depth is not None and text.count("[") + text.count("{") > most_depth:
        _check_depth(found, most_depth)
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise DocumentInvalid(f"has the key {repeated[:60]!r} twice in one object")
    return found


def _check_depth(value: Any, most: int) -> None:
    waiting = deque([(value, 1)])
    while waiting:
        found, depth = waiting.popleft()
        items = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        if depth > most and isinstance(found, dict | list):
            raise DocumentInvalid(_too_deep(most))
        waiting.extend((item, depth + 1) for item in items if isinstance(item, dict | list))


def _check_integers(value: Any) -> None:
    """Refuse integers that Python cannot write in decimal, which TOML may have in hexadecimal."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(item, int) and item.bit_length() > _MOST_INTEGER_BITS:
            raise DocumentInvalid(f"has an integer of more than {_MOST_INTEGER_BITS} bits")
        _check_integers(item)


def _too_deep(most: int | None) -> str:
    return "is nested too deep" if most is None else f"is nested more than {most} deep"
