"""Check of a trace in the format of Chrome and Perfetto."""

import gzip
import json
from pathlib import Path


def checked_trace(path: Path) -> list[dict]:
    """Return the events of a trace after a check of what its readers rely on."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    last: dict[tuple[int, int], float] = {}
    flows: dict[int, list[str]] = {}
    for event in events:
        assert event["ph"] in set("XBEsftiCM"), event
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["pid"] in named, event
        if event["ph"] == "M":
            continue
        assert isinstance(event["tid"], int), event
        assert event["ts"] >= 0, event
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            if event["tid"]:
                assert event["ts"] >= last.get(place, 0.0), event
                last[place] = event["ts"]
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event["ph"])
    assert all(sorted(phases) == ["f", "s"] for phases in flows.values()), flows
    return events


def steps_of(events: list[dict], rank: int) -> list[dict]:
    """Return the slices of a rank's steps from the records."""
    return [
        event
        for event in events
        if event["pid"] == rank and event.get("tid") == 0 and event["name"].startswith("step ")
    ]


def operators_of(events: list[dict], rank: int) -> list[dict]:
    """Return the slices of a rank's operators."""
    return [event for event in events if event["pid"] == rank and event["ph"] == "X" and event["tid"]]
