"""Damage to checkpoints: flipped bits, cut files, crashes, full disks, a rank that fails."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dure.comm.groups import Solo
from dure.errors import CheckpointDamaged, CheckpointMismatch, CheckpointNotWritten, DiskFull, DureError, PeerLost
from dure.training.checkpoints import writer as checkpoint_writer
from dure.training.checkpoints.manifest import seal, unseal
from dure.training.checkpoints.rank_shard import RankShard
from dure.training.checkpoints.reader import Checkpoint, verify
from dure.training.checkpoints.state import Snapshot
from tests.training.checkpoints import malice
from tests.training.checkpoints.checkpoint_cases import (
    ThreadGroup,
    at,
    flip_bit,
    new_store,
    save,
    save_at,
    snapshot_of,
    trained,
)

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rank0.safetensors", "state.json"]


def test_two_hundred_single_bit_flips_when_tried_are_two_hundred_refusals(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    choose, refused = random.Random(21), 0
    for turn in range(200):
        file = path / FILES[turn % len(FILES)]
        bit = choose.randrange(file.stat().st_size * 8)
        flip_bit(file, bit)
        for use in (verify, Checkpoint.read):
            with pytest.raises(CheckpointDamaged, match=f"samples-000000000008 is damaged: {file.name} "):
                use(path)
        refused += 1
        flip_bit(file, bit)
    verify(path)
    assert refused == 200


def test_manifest_when_any_single_bit_of_it_flips_is_refused(tmp_path):
    data = (save(new_store(tmp_path)[0], Snapshot(), at(8), Solo()).path / "manifest.json").read_bytes()
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointDamaged, match=r"manifest\.json was altered"):
            unseal(bytes(flipped))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "longer", "missing", "link", "directory", "pipe"])
def test_checkpoint_when_a_file_is_not_what_was_written_is_refused_by_name(tmp_path, name, damage):
    path = save_at(new_store(tmp_path)[0], 8).path
    file = path / name
    data = file.read_bytes()
    file.unlink()
    match damage:
        case "cut":
            file.write_bytes(data[:-1])
        case "empty":
            file.touch()
        case "longer":
            file.write_bytes(data + b"\0")
        case "link":
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
        case "directory":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
    for use in (verify, Checkpoint.read):
        with pytest.raises(CheckpointDamaged, match=f"samples-000000000008 is damaged: {name} "):
            use(path)


def test_manifest_when_it_names_a_file_outside_or_contradicts_itself_is_refused(tmp_path):
    path = save_at(new_store(tmp_path)[0], 8).path
    manifest = verify(path)
    escaped = {"../../secret.json": manifest.files["state.json"], **manifest.files}
    orphaned = {name: entry for name, entry in manifest.files.items() if name != "model.safetensors"}
    for files, reason in ((escaped, "is not a manifest"), (orphaned, "not among the files")):
        (path / "manifest.json").write_bytes(seal(manifest.model_copy(update={"files": files})))
        with pytest.raises(CheckpointDamaged, match=rf"manifest\.json (is|contradicts).*{reason}|{reason}"):
            Checkpoint.read(path)


@pytest.mark.slow
def test_checkpoint_when_somebody_made_it_to_do_harm_is_refused_and_memory_does_not_grow(tmp_path):
    paths = [save_at(new_store(tmp_path / lie)[0], 8).path for lie in malice.LIES]
    for path, lie in zip(paths, malice.LIES.values(), strict=True):
        lie(path)
    reader = [sys.executable, malice.__file__, *paths]
    said = subprocess.run(reader, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=110)
    assert said.returncode == 0, said.stderr
    for lie, line in zip(malice.LIES, said.stdout.splitlines(), strict=True):
        what, grown = json.loads(line)
        assert what.startswith("checkpoint samples-000000000008 is damaged: "), (lie, what)
        assert grown < 32 * 2**20, (lie, what)


def test_manifest_when_a_newer_dure_wrote_it_says_so_and_is_never_removed(tmp_path):
    store, _ = new_store(tmp_path, keep=1)
    path = save_at(store, 8).path
    (path / "manifest.json").write_bytes(seal(verify(path).model_copy(update={"version": 3})))
    with pytest.raises(
        CheckpointMismatch, match="samples-000000000008 does not fit: it has format 3 and this dure reads"
    ):
        verify(path)


def test_newest_valid_when_the_newest_is_damaged_takes_the_last_good_one_and_says_so(tmp_path):
    store, warnings = new_store(tmp_path, keep=3)
    paths = [save_at(store, samples).path for samples in (8, 16, 24)]
    flip_bit(paths[2] / "model.safetensors", 4000)
    (paths[1] / "state.json").unlink()
    assert store.newest_valid() == paths[0]
    assert [text.split(":")[0] for text in warnings] == [
        "checkpoint samples-000000000024 is damaged",
        "checkpoint samples-000000000016 is damaged",
        "taking samples-000000000008, the newest good one",
    ]


def test_newest_valid_when_there_is_nothing_good_is_none(tmp_path):
    store, warnings = new_store(tmp_path / "none")
    assert store.newest_valid() is None
    assert store.best() is None
    path = save_at(store, 8).path
    (path / "manifest.json").unlink()
    assert store.newest_valid() is None
    assert len(warnings) == 1


def test_save_when_resumed_behind_a_damaged_one_neither_counts_nor_removes_it(tmp_path):
    store, _ = new_store(tmp_path, keep=2)
    for samples in (8, 16, 24):
        path = save_at(store, samples).path
    flip_bit(path / "model.safetensors", 4000)
    assert store.newest_valid() == tmp_path / "samples-000000000016"
    save_at(store, 20)
    assert [p.name[-2:] for p in sorted(tmp_path.glob("samples-*"))] == ["16", "20", "24"]
    save_at(store, 24)
    assert sorted(p.name for p in tmp_path.glob("samples-*")) == ["samples-000000000020", "samples-000000000024.2"]
    assert store.newest_valid() == tmp_path / "samples-000000000024.2"


def test_save_when_many_are_there_keeps_the_newest_and_the_best(tmp_path):
    store, warnings = new_store(tmp_path, keep=2)
    for samples in range(8, 56, 8):
        save_at(store, samples, is_best=samples in (8, 16))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best", "latest", "samples-000000000016", "samples-000000000040", "samples-000000000048",
    ]  # fmt: skip
    assert (tmp_path / "latest").read_text() == "samples-000000000048\n"
    assert (tmp_path / "best").read_text() == "samples-000000000016\n"
    assert store.best() == tmp_path / "samples-000000000016"
    flip_bit(tmp_path / "samples-000000000016" / "model.safetensors", 4000)
    assert store.best() == tmp_path / "samples-000000000048"
    assert [text.split(":")[0] for text in warnings] == [
        "checkpoint samples-000000000016 is damaged",
        "there is no good checkpoint that is marked as the best; taking the newest, samples-000000000048",
    ]


def test_best_when_the_newest_is_the_damaged_best_then_each_line_is_there_once(tmp_path):
    store, warnings = new_store(tmp_path, keep=2)
    save_at(store, 8)
    best = save_at(store, 16, is_best=True).path
    flip_bit(best / "model.safetensors", 4000)
    assert store.best() == tmp_path / "samples-000000000008"
    assert len(warnings) == len(set(warnings)) == 2


def test_leftovers_when_their_process_is_dead_are_removed_and_a_live_save_is_not(tmp_path):
    store, _ = new_store(tmp_path)
    path = save_at(store, 8).path
    dead = tmp_path / f".writing-samples-000000000016-{os.getpid()}"
    shutil.copytree(path, dead)
    shutil.copytree(path, tmp_path / ".trash-samples-000000000004")
    (tmp_path / ".best.writing").write_text("samples-")
    live = tmp_path / ".writing-samples-000000000024-live"
    live.mkdir()
    lock = checkpoint_writer.lock_writing_directory(live)
    assert store.newest_valid() == path
    store.remove_leftovers()
    os.close(lock)
    assert sorted(p.name for p in tmp_path.iterdir()) == [live.name, "latest", path.name]


SAVE_FOR_EVER = """
import sys
from pathlib import Path
from dure.comm.groups import Solo
from dure.training.checkpoints.store import CheckpointStore
from tests.training.checkpoints.checkpoint_cases import at, save, snapshot_of, trained
store = CheckpointStore(Path(sys.argv[1]), 2, print)
model, optimizer = trained()
for samples in range(8, 10**6, 8):
    save(store, snapshot_of(model, optimizer), at(samples), Solo(), is_best=samples % 24 == 0)
    print(samples, flush=True)
"""


@pytest.mark.slow
def test_process_when_killed_at_random_moments_leaves_a_good_checkpoint_each_time(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    choose = random.Random(21)
    for turn in range(2):
        root = tmp_path / str(turn)
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(choose.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            told = [8, *(int(line) for line in process.stdout.read().splitlines())]
        store, warnings = new_store(root)
        store.remove_leftovers()
        newest = store.newest_valid()
        assert newest is not None
        # the kill can fall between the rename and the line that tells of it
        assert verify(newest).position.samples_seen in (told[-1], told[-1] + 8)
        assert warnings == []
        assert not list(root.glob(".[wt]*-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_save_when_the_disk_is_too_small_refuses_before_writing(small_disk):
    store, _ = new_store(small_disk)
    path = save_at(store, 8).path
    (small_disk / "other").write_bytes(bytes(5 * 2**19))
    with pytest.raises(DiskFull, match=r"a checkpoint needs 1\.0 MiB but .* KiB is free in .*: free some"):
        save_at(store, 16)
    assert sorted(p.name for p in small_disk.iterdir()) == ["latest", "other", path.name]
    assert store.newest_valid() == path


@pytest.mark.parametrize("free_bytes", [0, 4096, 12288, 20480])
def test_save_when_the_disk_fills_while_writing_leaves_nothing_half_written(small_disk, monkeypatch, free_bytes):
    store, warnings = new_store(small_disk)
    path = save_at(store, 8).path
    filler = small_disk / "other"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_bytes))
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: _Plenty)
    with pytest.raises(DiskFull, match=r"no space left"):
        save_at(store, 16)
    assert sorted(p.name for p in small_disk.iterdir()) == ["latest", "other", path.name]
    assert store.newest_valid() == path
    assert warnings == []
    filler.unlink()
    assert store.newest_valid() == path
    assert save_at(store, 16).path == store.newest_valid()


class _Plenty:
    free = 2**40


def test_disk_full_on_one_rank_when_found_while_writing_is_raised_on_all(tmp_path, monkeypatch):
    answers = _save_with_failing_rank(tmp_path, monkeypatch, DiskFull("writing rank1 found no space left"))
    assert [type(answer) for answer in answers] == [DiskFull] * 3
    (said,) = {str(answer) for answer in answers}
    assert re.fullmatch(r"a checkpoint needs 1\.0 MiB, and writing rank1 found no space left; there is no .*", said)
    assert list(tmp_path.iterdir()) == []


def test_error_on_one_rank_when_it_writes_is_its_own_there_and_named_on_the_others(tmp_path, monkeypatch):
    answers = _save_with_failing_rank(tmp_path, monkeypatch, PermissionError("no"))
    assert [type(answer) for answer in answers] == [PeerLost, CheckpointNotWritten, PeerLost]
    said = f"the checkpoint at 8 samples could not be written to {tmp_path}: no; there is no checkpoint before it: "
    assert str(answers[1]).startswith(said)
    assert str(answers[0]).startswith(f"rank 1 could not write its part of the checkpoint at 8 samples: {said}")
    assert list(tmp_path.iterdir()) == []


def _save_with_failing_rank(root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[DureError]:
    write = RankShard.write

    def failing(self: RankShard, directory: Path, between: Callable[[], None]) -> object:
        if self.rank == 1:
            raise error
        return write(self, directory, between)

    monkeypatch.setattr(RankShard, "write", failing)
    store, _ = new_store(root)
    model, optimizer = trained()
    return ThreadGroup(3).run(lambda group: save(store, snapshot_of(model, optimizer, group.rank), at(8), group))
