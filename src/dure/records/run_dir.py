"""Run folder: its name, atomic writes and tolerant reads of its records.

runs/<name>/
  script.json     for a script run unchanged: its path and number of ranks; it has no spec, records or checkpoints
  spec.json       resolved spec, origin of each value, versions at the start
  rank<r>.jsonl   a StepRecord per step
  undone.jsonl    steps after the checkpoint that a resumed run repeated
  events.jsonl    events, one per line
  summary.json    result of the run
  checkpoints/    logs/
  .lock           held while the run is active
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dure.documents import DocumentInvalid, not_waiting, read_json
from dure.errors import DiskFull, EnvironmentLacks, RunInvalid
from dure.own_files import PRIVATE, SHARED, make_folder, open_own, sync_folder
from dure.records.events import Attempt, Event, Hang, event_from_json, event_to_json
from dure.records.jsonl import end_of_lines_until, last_record, read_lines
from dure.records.step_record import RunEnd, StepRecord, step_from_json
from dure.spec import RUN_NAME_PATTERN, ResolvedSpec, RunSpec, read_record
from dure.terminal import shell_word

SPEC, SCRIPT, EVENTS, SUMMARY, LOCK = "spec.json", "script.json", "events.jsonl", "summary.json", ".lock"

_STEP_RECORDS = re.compile(r"rank(0|[1-9][0-9]{0,9})\.jsonl", re.ASCII)

_FOLDERS = ("logs", "checkpoints", "tensorboard", "wandb", "profiles", ".leader")
"""Folders in the run folder that are written to."""

_MISUNDERSTOOD = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)

_LOCK_PATIENCE_SECONDS = 0.5
"""Seconds to wait for the lock: `is_active` takes it for an instant to see whether it is free."""


@dataclass(frozen=True)
class RunDir:
    """Folder of a run."""

    path: Path

    @classmethod
    def create(
        cls,
        runs_dir: Path,
        name: str,
        *,
        or_numbered: bool = False,
        for_script: bool = False,
        is_shared: bool = False,
    ) -> "RunDir":
        """Create the folder of a new run, with `logs/` and `checkpoints/`.

        A folder of that name that a start left behind, because it was killed before it wrote the spec, is replaced.

        Args:
            runs_dir: Folder of the runs, created if missing.
            name: Name of the run and its folder.
            or_numbered: Whether to use `name-2`, `name-3`, ... if the name is taken; for default names, which are equal
                for two runs that start in the same second.
            for_script: Whether it is for a script, which keeps its own checkpoints.
            is_shared: Whether others may read it as far as the umask allows; otherwise only its owner can.

        Raises:
            RunInvalid: The name would leave the runs folder, is not valid or is taken, or the folder cannot be created.
            DiskFull: There is no space for it.
        """
        check_name(name)
        with os_errors_as_sentences(runs_dir, "made"):
            runs_dir.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000 if or_numbered else 2):
            path = runs_dir / (name if number == 1 else f"{name[:59]}-{number}")
            with contextlib.suppress(FileExistsError), os_errors_as_sentences(path, "made"):
                _remove_if_left_by_killed_start(path)
                path.mkdir(mode=SHARED if is_shared else PRIVATE)
                make_folder(path / "logs")
                if not for_script:
                    make_folder(path / "checkpoints")
                return cls(path)
        raise RunInvalid(
            f"{runs_dir / name} exists already: choose another --name, or continue that run with"
            f" `{cls(runs_dir / name).resume_command}`"
        )

    @classmethod
    def open(cls, path: Path, *, or_script: bool = False) -> "RunDir":
        """Open an existing run.

        Args:
            path: Folder of the run.
            or_script: Whether the run of a script is accepted, which cannot be resumed or evaluated.

        Raises:
            RunInvalid: The folder does not exist, or is not that of a run.
        """
        path = Path(path)
        with os_errors_as_sentences(path, "read"):
            return cls._open(path, or_script=or_script)

    @classmethod
    def _open(cls, path: Path, *, or_script: bool) -> "RunDir":
        if not path.is_dir():
            what = "is a file, not a run folder" if path.exists() else "does not exist"
            raise RunInvalid(f"{path} {what}: `dure runs` shows the runs in ./runs")
        is_script = cls(path).is_script
        if or_script and is_script:
            return cls(path)
        if is_script:
            raise RunInvalid(f"{path} is the run of a script (`dure run`), which only the script itself can go on with")
        if not (path / SPEC).is_file():
            if (path / LOCK).is_file() and (path / EVENTS).is_file():
                raise RunInvalid(
                    f"{path} is no run yet: its start ended before {SPEC} was written; start it again as the first time"
                )
            raise RunInvalid(
                f"{path} is a folder that is no run (it has no {SPEC}): `dure runs` shows the runs in ./runs"
            )
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_script(self) -> bool:
        """Return whether it is the run of a script that knows nothing of dure, without spec, records or checkpoints."""
        return (self.path / SCRIPT).is_file()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def resume_command(self) -> str:
        """Command that resumes the run, quoted for a shell."""
        return f"dure train --resume {shell_word(self.path)}"

    def log_path(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.path / "logs" / f"rank{rank}.log"

    def records_path(self, rank: int) -> Path:
        """Return the path of a rank's step records."""
        return self.path / f"rank{rank}.jsonl"

    # --- records

    def write_json(self, name: str, data: Any) -> None:
        """Write a record atomically: a reader sees the old or the new one, never a part, even after a crash.

        Raises:
            DiskFull: There is no space; the old record stays.
            RunInvalid: The folder cannot be written.
        """
        target = self.path / name
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        text = json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n"
        with os_errors_as_sentences(target, "written"):
            try:
                with open(temporary, "w", encoding="utf-8", errors="backslashreplace", opener=open_own) as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(target)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            sync_folder(target.parent)

    def read_json(self, name: str) -> Any:
        """Read a record that `write_json` wrote.

        Raises:
            RunInvalid: It is missing, cannot be read, or is not JSON.
        """
        try:
            with os_errors_as_sentences(self.path / name, "read"):
                return read_json(self.path / name)
        except DocumentInvalid as error:
            raise _damaged(self.path / name, error) from None

    def write_spec(self, resolved: ResolvedSpec) -> None:
        """Write the spec, the origin of each value, and the versions; from now on the folder is a run."""
        record: dict[str, Any] = {"spec": resolved.spec.model_dump(mode="json"), "origin": resolved.origin}
        if resolved.task_object is not None:
            record["task_object"] = resolved.task_object
        self.write_json(SPEC, {**record, "versions": _versions(), "time": time.time()})

    def write_script(self, record: Mapping[str, Any]) -> None:
        """Write the record of a script; from now on the folder is a run."""
        self.write_json(SCRIPT, {**record, "versions": _versions(), "time": time.time()})

    def read_spec(self) -> RunSpec:
        """Read the run's spec.

        Raises:
            RunInvalid: `spec.json` is missing, damaged, or of another version of dure.
        """
        record = self.read_json(SPEC)
        try:
            return read_record(record["spec"])
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            raise RunInvalid(f"{self.path / SPEC} does not hold a spec of this dure: {_first_line(error)}") from None

    def task_object(self) -> dict[str, Any] | None:
        """Return why the recorded class and options do not restore the run's task, or None if they do."""
        with self.understood():
            found: dict[str, Any] | None = self.read_json(SPEC).get("task_object")
            if found is not None:
                str(found["because"]), dict(found["attributes"])
            return found

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Turn errors caused by records with unexpected fields into one with a clear message.

        Raises:
            RunInvalid: There were such records.
        """
        try:
            yield
        except _MISUNDERSTOOD as error:
            raise RunInvalid(
                f"the records of {self.path} are damaged or of another version of dure ({_first_line(error)}): restore "
                "them from a copy of the run"
            ) from error

    def recorded_ranks(self) -> list[int]:
        """Return the ranks that have step records, by the names of files: a damaged record may claim any number."""
        names = (_STEP_RECORDS.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name is not None)

    def records(self, rank: int) -> Iterator[StepRecord]:
        """Yield a rank's step records in the order in which they were written.

        Raises:
            RunInvalid: A record has other fields than a step's.
        """
        path = self.records_path(rank)
        return (_step_of(path, line) for line in read_lines(path))

    def last_step(self, rank: int) -> StepRecord | None:
        """Return the last step in a rank's records; None if there is none.

        Raises:
            RunInvalid: The record has other fields than a step's.
        """
        path = self.records_path(rank)
        line = last_record(path)
        return _step_of(path, line) if line else None

    def last_steps(self) -> list[StepRecord]:
        """Return the last step of each rank that has recorded one.

        Raises:
            RunInvalid: A record has other fields than a step's.
        """
        paths = sorted(self.path.glob("rank*.jsonl"))
        return [_step_of(path, line) for path in paths if (line := last_record(path))]

    def last_samples(self, rank: int) -> int:
        """Return the samples seen after the last step in a rank's records; 0 before the first."""
        last = self.last_step(rank)
        return 0 if last is None else last.samples_seen

    def read_end(self) -> RunEnd | None:
        """Return the end of the run in brief, from its summary; None if there is no summary yet.

        Raises:
            RunInvalid: The summary cannot be read, or is not valid.
        """
        if not (self.path / SUMMARY).is_file():
            return None
        found = self.read_json(SUMMARY)
        try:
            return RunEnd.from_json(found)
        except DocumentInvalid as error:
            raise _damaged(self.path / SUMMARY, error) from None

    def write_end(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of the last attempt, and which one that is."""
        self.write_json(SUMMARY, {**summary, "attempts": self.num_attempts()})

    def undo_records_after(self, samples_seen: int) -> None:
        """Move the records of steps that a resumed run will repeat to `undone.jsonl`.

        The remaining records in `rank<r>.jsonl` are then exactly what the weights have seen, whatever was killed and
        when.
        """
        for path in sorted(self.path.glob("rank*.jsonl")):
            self._undo_after(samples_seen, path)

    def _undo_after(self, samples_seen: int, path: Path) -> None:
        with self.understood():
            begin = end_of_lines_until(path, lambda line: _step_of(path, line).samples_seen <= samples_seen)
            undone = list(read_lines(path, begin))
            rank = int(path.stem.removeprefix("rank"))
        with os_errors_as_sentences(path, "written"):
            if undone:
                with open(self.path / "undone.jsonl", "a", encoding="utf-8", opener=open_own) as file:
                    file.writelines(json.dumps({"rank": rank, **record}) + "\n" for record in undone)
            with open(path, "r+b", opener=open_own) as file:
                file.truncate(begin)
                file.seek(0, os.SEEK_END)
                file.write(_newline_after_torn_line(file.fileno()).encode())

    # --- events

    def append_event(self, event: Event) -> None:
        """Append a line to `events.jsonl` by a single append, so that lines of several processes never mix.

        Raises:
            DiskFull: There is not enough space.
            RunInvalid: The folder cannot be written.
        """
        line = json.dumps(event_to_json(event), default=str) + "\n"
        with os_errors_as_sentences(self.path / EVENTS, "written"):
            descriptor = open_own(self.path / EVENTS, os.O_RDWR | os.O_APPEND | os.O_CREAT)
            try:
                left = (_newline_after_torn_line(descriptor) + line).encode()
                while left:  # a disk that becomes full accepts a part first, and reports it only on the next write
                    left = left[os.write(descriptor, left) :]
            finally:
                os.close(descriptor)

    def events(self) -> Iterator[Event]:
        """Yield the events, without lines that a crash truncated or that are not events."""
        for line in read_lines(self.path / EVENTS):
            with contextlib.suppress(DocumentInvalid):
                yield event_from_json(line)

    def num_attempts(self) -> int:
        """Return the number of attempts, including the current one; restarts of ranks do not count."""
        return sum(isinstance(event, Attempt) for event in self.events())

    def has_checkpoints(self) -> bool:
        """Return whether anything there has a checkpoint's name."""
        return any(self.checkpoints.glob("samples-*"))

    def how_to_go_on(self) -> str:
        """Return a sentence on the command that resumes the run, and its position."""
        again = f"`{self.resume_command}`"
        if self.has_checkpoints():
            return f"{again} goes on from the last good checkpoint"
        return f"{again} starts from the beginning: there is no checkpoint yet"

    def refuse_linked_folders(self) -> None:
        """Refuse a run in which a folder is a link, by which files could be written or removed anywhere.

        The run's folder itself, and the folder of the runs, may be links of their owner.

        Raises:
            RunInvalid: There is such a link.
        """
        for folder in (self.path / name for name in _FOLDERS):
            if folder.is_symlink():
                raise RunInvalid(
                    f"{folder} is a link, and a run is written into no folder that could lie anywhere: move what the"
                    " link leads to into its place; for another disk, link the run's whole folder or use --runs-dir"
                )

    def forget_failures(self) -> None:
        """Remove the failure reports of ranks of an earlier start, which must not affect the verdict on the next.

        Raises:
            RunInvalid: A folder in the run folder is a link.
        """
        self.refuse_linked_folders()
        for stale in self.path.glob("logs/failure-rank*.json"):
            stale.unlink(missing_ok=True)

    # --- hangs

    def note_hang(self, record: Mapping[str, Any]) -> None:
        """Write the record of a hang, and an event with its first line."""
        name = f"logs/hang-{len(self.hangs()) + 1}.json"
        self.write_json(name, {"time": time.time(), **record})
        self.append_event(Hang(message=str(record["text"]).partition("\n")[0], file=name))

    def hangs(self) -> list[Path]:
        """Return the records of hangs, the oldest first."""
        found = (path for path in self.path.glob("logs/hang-*.json") if path.stem.rpartition("-")[2].isdecimal())
        return sorted(found, key=lambda path: int(path.stem.rpartition("-")[2]))

    # --- is it running?

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run, so that no other process trains into it. The kernel releases the lock however the process ends.

        Processes forked inside hold it too, so that a run whose supervisor was killed counts as active until its
        workers are gone. Writes the event `attempt`, by which `list_runs` distinguishes a run that died from one that
        ended.

        Raises:
            RunInvalid: Another process holds the lock (the message gives its pid), or a folder in the run folder is a
                link.
        """
        self.refuse_linked_folders()
        owner = os.getpid()
        with os_errors_as_sentences(self.path / LOCK, "opened"):
            descriptor = open_own(self.path / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            _take(descriptor, self.path)
            self._note_owner(descriptor, owner)
            yield
        finally:
            # a forked worker that unwinds through here must not release the lock that it shares with its parent
            if os.getpid() == owner:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _note_owner(self, descriptor: int, owner: int) -> None:
        """Record the owner of the run; if there is no space for that, remove a folder that is not a run yet."""
        try:
            with os_errors_as_sentences(self.path / LOCK, "written"):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{owner}\n".encode(), 0)
            self.append_event(Attempt(pid=owner, host=platform.node()))
        except DiskFull:
            if not self.is_script and not (self.path / SPEC).is_file():
                self.discard()
            raise

    def is_active(self) -> bool:
        """Return whether a process is training into this run now."""
        try:
            with open(self.path / LOCK, "rb", opener=not_waiting) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError as error:
            return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
        return False

    def discard(self) -> None:
        """Remove the folder of a run that never took a step, so that a refused start leaves nothing behind."""
        has_steps = any(path.stat().st_size for path in self.path.glob("rank*.jsonl"))
        if not has_steps and not self.has_checkpoints():
            shutil.rmtree(self.path, ignore_errors=True)


def check_name(name: str) -> None:
    """Refuse an invalid run name.

    Raises:
        RunInvalid: It contains anything other than letters, digits and `._-`, or could leave the runs folder.
    """
    if not re.fullmatch(RUN_NAME_PATTERN, name) or name.endswith("\n"):
        raise RunInvalid(
            f"{name!r} cannot name a run: use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
        )


def default_name(task: str, strategy: str, now: datetime) -> str:
    """Return the default name of a run, from date, task and strategy: `2026-11-20_10-26-46_digits_ddp`."""
    label = re.sub(r"[^a-z0-9]+", "-", task.rpartition(":")[2].lower()).strip("-") or "task"
    return f"{now:%Y-%m-%d_%H-%M-%S}_{label[:24]}_{strategy}"[:64]


# --- helpers


def _damaged(path: Path, error: DocumentInvalid) -> RunInvalid:
    return RunInvalid(f"{path} is damaged (it {error}): restore it from a copy of the run")


def _step_of(path: Path, line: Mapping[str, Any]) -> StepRecord:
    try:
        return step_from_json(line)
    except DocumentInvalid as error:
        raise _damaged(path, error) from None


def _remove_if_left_by_killed_start(path: Path) -> None:
    """Remove a folder that is no run yet and will not become one: it holds no more than what a start writes first."""
    try:
        with open(path / LOCK, "rb", opener=not_waiting) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held to the end: a start may be about to take it
            if _is_left_by_killed_start(RunDir(path)):
                shutil.rmtree(path)
    except OSError:
        return  # there is none, it is in use, or it belongs to another user: `mkdir` tells


def _is_left_by_killed_start(run: RunDir) -> bool:
    written = {entry.name for entry in run.path.iterdir() if not entry.name.startswith(f".{SPEC}.")}
    folders = [run.path / name for name in ("logs", "checkpoints") if name in written]
    if written - {LOCK, EVENTS, "logs", "checkpoints"} or any(any(folder.iterdir()) for folder in folders):
        return False
    # the locks of other hosts cannot be seen on every shared file system
    return all(isinstance(event, Attempt) and event.host == platform.node() for event in run.events())


def _newline_after_torn_line(descriptor: int) -> str:
    """Return the separator between the last line and a new one: empty unless a crash truncated the last line."""
    size = os.fstat(descriptor).st_size
    return "\n" if size and os.pread(descriptor, 1, size - 1) != b"\n" else ""


def _take(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
                raise RunInvalid(f"{path} is being trained by process {pid}: wait for it, or stop it first") from None
            time.sleep(0.02)
        except OSError as error:
            raise EnvironmentLacks(
                f"{path} lies on a file system without locks ({error.strerror}): use a --runs-dir on a local disk"
            ) from None


@contextlib.contextmanager
def os_errors_as_sentences(path: Path, done: str) -> Iterator[None]:
    """Turn errors of the operating system about a file into sentences."""
    try:
        yield
    except FileExistsError:
        if path.is_dir():
            raise
        raise RunInvalid(f"{path} cannot be {done}: a file of that name is in the way") from None
    except OSError as error:
        if DiskFull.is_reported_by(error):
            raise DiskFull(f"{path} cannot be {done}: the disk is full; {DiskFull.CURE}") from None
        if error.errno == errno.ELOOP:
            raise RunInvalid(
                f"{path} cannot be {done}: it is a link, which could lead anywhere; put a copy in its place"
            ) from None
        cure = "; raise the limit on open files (ulimit -n)" if error.errno == errno.EMFILE else ""
        raise RunInvalid(f"{path} cannot be {done}: {error.strerror}{cure}") from None


def _versions() -> dict[str, str]:
    """Return the current versions, read from the installation's metadata, because importing torch takes seconds."""
    import importlib.metadata  # slow to import, and most commands only read runs

    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("dure", "torch", "numpy", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()[:3])
    return f"{type(error).__name__}: {error}"
