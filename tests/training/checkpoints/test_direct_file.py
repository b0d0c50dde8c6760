"""Files that are written past the system's cache, and their digests."""

import errno
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dure.errors import CheckpointDamaged
from dure.training.checkpoints import direct_file
from dure.training.checkpoints.direct_file import DirectFile
from dure.training.checkpoints.durable_files import check_file, read_verified, write_new_file
from dure.training.checkpoints.reader import verify
from tests.training.checkpoints.checkpoint_cases import new_store, save_at
from tests.training.checkpoints.malice import rewritten

BLOCK = 4096


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Sizes of the writes with small blocks, and whether each went past the cache."""

    def write(descriptor: int, data: memoryview) -> int:
        is_direct = bool(os.O_DIRECT & fcntl_flags(descriptor))
        made.append((len(data), is_direct))
        return of_system(descriptor, data)

    made: list[tuple[int, bool]] = []
    of_system = os.write
    monkeypatch.setattr(direct_file, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(os, "write", write)
    return made


def fcntl_flags(descriptor: int) -> int:
    return direct_file.fcntl.fcntl(descriptor, direct_file.fcntl.F_GETFL)


@pytest.mark.parametrize("sizes", [[], [1], [BLOCK], [BLOCK - 1, 2], [3 * BLOCK + 5, 7, 0, BLOCK]], ids=repr)
def test_file_when_written_in_any_parts_then_whole_blocks_go_past_the_cache(
    sizes: list[int], tmp_path: Path, calls: list[tuple[int, bool]]
) -> None:
    parts = [os.urandom(size) for size in sizes]
    num_bytes, digest = write_new_file(tmp_path / "file", parts)
    data = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == data
    assert (num_bytes, digest) == (len(data), f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}")
    whole, rest = divmod(len(data), BLOCK)
    assert calls == [(BLOCK, True)] * whole + [(rest, False)] * bool(rest)


def test_file_when_the_system_refuses_direct_writes_then_it_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(descriptor: int, data: Any) -> int:
        if os.O_DIRECT & fcntl_flags(descriptor):
            raise OSError(errno.EINVAL, "not of this size")
        return of_system(descriptor, data[: len(data) // 2 + 1])  # a part each time

    of_system = os.write
    monkeypatch.setattr(direct_file, "_BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(os, "write", write)
    data = os.urandom(5 * BLOCK // 2)
    with DirectFile(tmp_path / "file") as file:
        file.write(data)
        file.flush()
    assert (tmp_path / "file").read_bytes() == data


def test_file_when_it_exists_then_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(FileExistsError, match="file"):
        DirectFile(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"


def test_digest_when_of_an_earlier_version_then_it_is_checked_by_its_own_kind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"state")
    digest = f"sha256:{sha256(b'state').hexdigest()}"
    assert read_verified(path, 5, digest) == b"state"
    check_file(path, 5, digest)
    path.write_bytes(b"stale")
    with pytest.raises(CheckpointDamaged, match="file was altered: its sha256 is "):
        check_file(path, 5, digest)


def test_manifest_of_format_1_is_read_and_its_files_are_checked(tmp_path: Path) -> None:
    def as_of_old(manifest: dict[str, Any]) -> None:
        manifest["version"] = 1
        for name, entry in manifest["files"].items():
            del entry["digest"]
            entry["sha256"] = sha256((path / name).read_bytes()).hexdigest()

    store, _ = new_store(tmp_path, keep=1)
    path = save_at(store, 8).path
    rewritten(path, as_of_old)
    assert all(entry.digest.startswith("sha256:") for entry in verify(path).files.values())
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors was altered: its sha256 is"):
        verify(path)
