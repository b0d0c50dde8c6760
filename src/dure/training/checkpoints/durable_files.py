"""Files that exist completely or not at all: fsync, rename, and refusal of anything but regular files."""

import errno
import os
import stat
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import xxhash

from dure.errors import CheckpointDamaged, DiskFull
from dure.own_files import sync_folder
from dure.training.checkpoints.direct_file import Buffer, DirectFile
from dure.units import format_bytes

FULL_TEXT = "found no space left"
"""Words in every message about a disk that was full while a file was written."""

HALF_REPLACED = ".*.writing"
"""Pattern of the names of files that `replace_file` has begun to write."""

_DIGESTS: dict[str, Callable[[], Any]] = {"xxh3_128": xxhash.xxh3_128, "sha256": sha256}
"""Digests of files by name: the first is written, the others are of earlier versions."""


class FileDigest:
    """Digest of a file's bytes in order.

    It detects what disks and networks change. Nothing here is safe from a person who may write to the folder, who
    could change the digest too.
    """

    def __init__(self, like: str = "xxh3_128:") -> None:
        """Begin a digest of the kind of another, as `text` gave it."""
        self._kind = like.partition(":")[0]
        self._digest: Any = _DIGESTS[self._kind]()

    def update(self, data: Buffer) -> None:
        """Add bytes."""
        self._digest.update(data)

    def text(self) -> str:
        """Return the digest after its kind: `xxh3_128:` and 32 hexadecimal digits."""
        return f"{self._kind}:{self._digest.hexdigest()}"


def write_new_file(path: Path, buffers: Iterable[Buffer]) -> tuple[int, str]:
    """Write a new file, flush it to disk, and return its size and digest.

    The digest is of the bytes passed to the system, so that later changes by a disk or a network are detected.

    Raises:
        DiskFull: The file system or a quota has no space for it.
        OSError: The file exists, or the system refuses it for another reason.
    """
    digest, num_bytes = FileDigest(), 0
    try:
        with DirectFile(path) as file:
            for buffer in buffers:
                digest.update(buffer)
                num_bytes += file.write(buffer)
            file.flush()
    except OSError as error:
        raise_if_full(error, path)
        raise
    return num_bytes, digest.text()


def replace_file(path: Path, text: str) -> None:
    """Replace a small text file so that a reader sees either the old or the new text, never a part.

    A process that is killed meanwhile may leave a file with a name like `HALF_REPLACED`.
    """
    new = path.with_name(f".{path.name}.writing")
    new.unlink(missing_ok=True)
    try:
        write_new_file(new, [text.encode()])
        new.rename(path)
    finally:
        new.unlink(missing_ok=True)
    sync_folder(path.parent)


def raise_if_full(error: OSError, path: Path) -> None:
    """Raise `DiskFull` instead of an error that reports a lack of space.

    Raises:
        DiskFull: The error number says that there is no space or quota left.
    """
    if DiskFull.is_reported_by(error):
        space = os.statvfs(path.parent)
        free = format_bytes(space.f_bavail * space.f_frsize)
        if space.f_files and not space.f_favail:
            free = f"{free}, but no inode, so no further file,"
        raise DiskFull(f"writing {path.name} {FULL_TEXT} in {path.parent} ({free} free): {DiskFull.CURE}") from error


def open_regular(path: Path, num_bytes: int | None = None, at_most: int | None = None) -> int:
    """Open a regular file of the expected size for reading, and return its descriptor.

    Links are refused, because a checkpoint lives in its own directory, and pipes, because reading them may block for
    ever.

    Raises:
        CheckpointDamaged: The file is missing, is not a regular file, or has another size.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        what = "is missing" if error.errno == errno.ENOENT else f"cannot be read ({error.strerror})"
        raise CheckpointDamaged(f"{path.name} {what}") from None
    fault = _fault_of(descriptor, num_bytes, at_most)
    if fault:
        os.close(descriptor)
        raise CheckpointDamaged(f"{path.name} {fault}")
    return descriptor


def _fault_of(descriptor: int, num_bytes: int | None, at_most: int | None) -> str | None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if num_bytes is not None and status.st_size != num_bytes:
        return f"has {status.st_size} bytes where {num_bytes} were written"
    if at_most is not None and status.st_size > at_most:
        return f"has {format_bytes(status.st_size)}, more than the {format_bytes(at_most)} that it may have"
    return None


def read_verified(path: Path, num_bytes: int, digest: str) -> bytearray:
    """Read a file once and return its bytes if size and digest match those written.

    The checked bytes are the bytes that are used; nothing is read a second time.

    Raises:
        CheckpointDamaged: The file is missing, or has another size or hash.
    """
    with open(open_regular(path, num_bytes), "rb", buffering=0) as file:
        data = bytearray(num_bytes)  # the file is known to have as many bytes; the number alone could be wrong
        view, filled = memoryview(data), 0
        while filled < num_bytes:
            got = read_some(file.fileno(), view[filled : filled + 2**24], path)
            if not got:
                raise CheckpointDamaged(f"{path.name} ended after {filled} of {num_bytes} bytes")
            filled += got
    seen = FileDigest(digest)
    seen.update(data)
    check_digest(path, seen, digest)
    return data


def check_file(path: Path, num_bytes: int, digest: str) -> None:
    """Check a file's size and digest without keeping its bytes.

    Raises:
        CheckpointDamaged: The file is missing, or has another size or hash.
    """
    buffer, seen = bytearray(2**20), FileDigest(digest)
    with open(open_regular(path, num_bytes), "rb", buffering=0) as file:
        while got := read_some(file.fileno(), memoryview(buffer), path):
            seen.update(memoryview(buffer)[:got])
    check_digest(path, seen, digest)


def read_some(descriptor: int, into: memoryview, path: Path) -> int:
    """Read the bytes that the system returns in one call, and return their number.

    Raises:
        CheckpointDamaged: The system cannot read the file.
    """
    try:
        return os.readv(descriptor, [into])
    except OSError as error:
        raise CheckpointDamaged(f"{path.name} cannot be read ({error.strerror})") from error


def check_digest(path: Path, seen: FileDigest, written: str) -> None:
    """Compare the digest of a file with the one recorded when it was written.

    Raises:
        CheckpointDamaged: They differ.
    """
    if seen.text() != written:
        kind, _, digits = written.partition(":")
        now = seen.text().partition(":")[2]
        raise CheckpointDamaged(f"{path.name} was altered: its {kind} is {now[:16]}… and was {digits[:16]}…")
