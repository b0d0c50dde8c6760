"""Reads a run's folder, and says what happened to it."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dure.errors import DureError
from dure.launch.hang import verdict_from_json
from dure.launch.verdict import read_failure
from dure.rundir import SUMMARY, RunDir
from dure.runs import RunOverview, overview

SEVERITIES = ("note", "warning", "error")
_QUIET_SECONDS = 60.0
_MOST_CAUSES = 3


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a person should know."""

    severity: str
    """`error`: the run did not get to its end; `warning`: it did, or may, but something was wrong; `note`."""
    what: str
    """In one sentence or a few lines; the first says it."""
    evidence: tuple[str, ...] = ()
    """Files of the run that show it."""
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found, the gravest first."""

    run: str
    status: str
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> str | None:
        """The gravest severity, if anything was found."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(run: RunDir) -> Diagnosis:
    """Look at everything that a run has written down.

    Raises:
        RunInvalid: Its records cannot be read.
    """
    seen = overview(run)
    events = list(run.events())
    found = [*_end(run, seen), *_hangs(run, seen), *_restarts(run, events), *_events(events), *_silence(run, seen)]
    found.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Diagnosis(run=str(run.path), status=seen.status, findings=tuple(found))


def _end(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Say how it ended, if not well."""
    again = None if run.is_script else f"dure train --resume {run.path}"
    if seen.status == "unreadable":
        yield Finding(severity="error", what="its records are damaged or of another version of dure")
    if seen.status == "died":
        yield Finding(
            severity="error",
            what="it ended without a word: its supervisor was killed, or the machine went down" + _last_step(seen),
            remedy=again and f"`{again}` goes on from the last good checkpoint",
        )
    if seen.status in ("failed", "interrupted"):
        summary = run.read_json(SUMMARY)
        evidence = [
            f"logs/failure-rank{rank}.json" for rank in range(seen.world_size or 0) if read_failure(run.path, rank)
        ]
        yield Finding(
            severity="error" if seen.status == "failed" else "warning",
            what=str(summary.get("message") or seen.status),
            evidence=tuple(evidence),
            remedy=again and (f"mend the cause, then `{again}`" if seen.status == "failed" else f"`{again}`"),
        )


def _hangs(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Tell each hang as it was told, from what was found out then."""
    for path in run.hangs():
        name = str(path.relative_to(run.path))
        try:
            record = run.read_json(name)
            verdict = verdict_from_json(record)
        except (DureError, KeyError, TypeError, ValueError):
            yield Finding(severity="warning", what="the record of a hang is damaged", evidence=(name,))
            continue
        when = time.strftime("%H:%M:%S", time.localtime(record["time"]))
        yield Finding(
            severity="error" if seen.status in ("died", "failed") else "warning",
            what=f"at {when}: {verdict.text}",
            evidence=(name,),
        )


def _restarts(run: RunDir, events: list[dict[str, Any]]) -> Iterator[Finding]:
    restarts = [event for event in events if event.get("event") == "restart"]
    if not restarts:
        return
    ranks = Counter(event["rank"] for event in restarts)
    rank, count = ranks.most_common(1)[0]
    is_one = len(restarts) > 1 and count == len(restarts)
    causes = [f"  step {event['step']}: {event['message']}" for event in restarts[-_MOST_CAUSES:]]
    more = [f"  … and {len(restarts) - _MOST_CAUSES} before"] if len(restarts) > _MOST_CAUSES else []
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    yield Finding(
        severity="warning",
        what="\n".join([f"all ranks were started again {times}", *causes, *more]),
        evidence=("events.jsonl",),
        remedy=f"each time it was rank {rank}: look at its device and its share of the data" if is_one else None,
    )


def _events(events: list[dict[str, Any]]) -> Iterator[Finding]:
    skipped = [event for event in events if event.get("event") == "step_skipped"]
    if skipped:
        yield Finding(
            severity="warning",
            what=f"{len(skipped)} step(s) were left out because the loss was not finite, the first step "
            f"{skipped[0]['step']}: {skipped[0]['message']}",
            evidence=("events.jsonl",),
            remedy="look at these samples; a lower learning rate or --clip-norm may help",
        )
    lost = [event for event in events if event.get("event") == "rank_lost"]
    for event in lost:
        samples = sum(len(share["samples"]) for share in event["shares"])
        yield Finding(
            severity="warning",
            what=f"rank {event['rank']} was lost, and {samples} samples of its shares were used by nobody",
            evidence=("events.jsonl",),
        )


def _silence(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Say of a run that goes on when it was last heard of."""
    if seen.status != "running" or run.is_script:
        return
    path = run.records_path(0)
    seconds = time.time() - path.stat().st_mtime if path.is_file() else None
    if seconds is not None and seconds > _QUIET_SECONDS and not run.hangs():
        yield Finding(
            severity="warning",
            what=f"it is running, but its last step was written {seconds:.0f} s ago{_last_step(seen)}",
            evidence=(path.name,),
            remedy="its watchdog says why after --hang-after seconds",
        )


def _last_step(seen: RunOverview) -> str:
    return f"; {seen.samples:,} samples had been seen" if seen.samples else ""
