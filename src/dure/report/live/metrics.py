"""Metrics of a watched run in the text format of Prometheus.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from dure.report.live.live_run import Moment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(moment: Moment) -> str:
    """Return the metrics of a run, a family after another; those without a value yet are left out."""
    return "".join(_lines(moment))


def _lines(moment: Moment) -> Iterator[str]:
    seen = moment.records.seen
    info = {
        "run": moment.records.run.name,
        "strategy": seen.strategy or "",
        "status": seen.status,
        "world_size": "" if moment.world_size is None else moment.world_size,
    }
    yield from _family("run_info", "gauge", "Run, with its facts as labels; always 1.", [(info, 1)])
    yield from _one("restarts_total", "counter", "Restarts of all ranks after a failure.", moment.num_restarts)
    if moment.step is not None:
        yield from _one("step", "gauge", "Number of the last step on record.", moment.step)
        yield from _one("samples_total", "counter", "Training samples used by all ranks.", moment.samples_seen)
        yield from _one("loss", "gauge", "Mean training loss of the last step.", moment.loss)
        rate = moment.samples_per_second
        yield from _one("samples_per_second", "gauge", "Training samples of all ranks per second, of late.", rate)
    if moment.last_record_time is not None:
        last = moment.last_record_time
        yield from _one("last_record_timestamp_seconds", "gauge", "Time of the last record of a step.", last)
    means = moment.part_seconds
    if means:
        wall = [({"rank": rank}, parts["wall"]) for rank, parts in means.items()]
        yield from _family("step_seconds", "gauge", "Mean seconds of a step of late, by rank.", wall)
        each = [
            ({"rank": rank, "part": part}, seconds)
            for rank, parts in means.items()
            for part, seconds in parts.items()
            if part != "wall"
        ]
        yield from _family("step_part_seconds", "gauge", "Mean seconds of the parts of a step of late, by rank.", each)
        sent = [({"rank": rank}, num_bytes) for rank, num_bytes in moment.sent_bytes.items()]
        yield from _family("sent_bytes_total", "counter", "Bytes sent for steps, by rank.", sent)


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    return _family(name, kind, text, [({}, value)])


def _family(name: str, kind: str, text: str, samples: Sequence[tuple[Mapping[str, object], float]]) -> Iterator[str]:
    yield f"# HELP dure_{name} {text}\n# TYPE dure_{name} {kind}\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(str(known))}"' for label, known in labels.items())
        yield f"dure_{name}{f'{{{pairs}}}' if pairs else ''} {_number(value)}\n"


def _escaped(text: str) -> str:
    """Return a value of a label: lone surrogates, which UTF-8 lacks, are replaced."""
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)
