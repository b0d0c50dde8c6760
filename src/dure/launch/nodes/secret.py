"""Shared secret of the launchers of a multi-node run: a file that only its owner can read."""

import os
import secrets
import stat
import time
from pathlib import Path

from dure.errors import Misuse
from dure.terminal import shell_word

_FEWEST_BYTES = 16
_MOST_BYTES = 4096
_PATIENCE_SECONDS = 10.0
"""Seconds that a node waits for a secret that node 0 is about to write, if both share one home folder."""


def default_file() -> Path:
    """Return the path of the secret if none is given."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dure" / "secret"


def read_secret(file: Path | None, *, host: str, may_make: bool, patience_seconds: float = _PATIENCE_SECONDS) -> bytes:
    """Return the secret; the first node creates it if there is none.

    Args:
        file: Path of the secret; None for the default.
        host: Host of node 0, for the message about where to copy it from.
        may_make: Whether this is node 0.
        patience_seconds: Seconds to wait for a missing file.

    Raises:
        Misuse: It is missing, too short, or readable by others.
    """
    path = (file or default_file()).expanduser()
    if may_make:
        _make(path)
    deadline = time.monotonic() + patience_seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise Misuse(
                f"there is no secret at {path}: node 0 makes it, copy it from there "
                f"(`scp {shell_word(f'{host}:{path}')} {shell_word(path)}`, then `chmod 600 {shell_word(path)}`), or "
                "name another file with --secret-file"
            )
        time.sleep(0.1)
    return _read(path)


def _make(path: Path) -> None:
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # first under a temporary name, so that no other launcher reads half of it
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, f"{secrets.token_hex(32)}\n".encode())
            os.link(temporary, path)
        except FileExistsError:
            pass  # another launcher of this host has just created it
        finally:
            os.close(descriptor)
            temporary.unlink()
    except OSError as error:
        raise Misuse(f"the secret {path} cannot be made ({error.strerror}): name a file with --secret-file") from None


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Misuse(f"the secret {path} cannot be read ({error.strerror}): it must be yours, `chmod 600`") from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Misuse(f"the secret {path} is no file: name one with --secret-file")
        if found.st_uid not in (os.geteuid(), 0):
            raise Misuse(f"the secret {path} belongs to another user ({found.st_uid}): make a copy of your own")
        if found.st_mode & 0o077:
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            raise Misuse(f"the secret {path} can be read by others (mode {mode}): `chmod 600 {shell_word(path)}`")
        data = os.read(descriptor, _MOST_BYTES).strip()
    finally:
        os.close(descriptor)
    if len(data) < _FEWEST_BYTES:
        raise Misuse(
            f"the secret {path} has {len(data)} bytes but must have at least {_FEWEST_BYTES}: remove it, and node 0 "
            "makes a new one"
        )
    return data
