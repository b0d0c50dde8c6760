"""Records whose every text is hostile: markup, a script, and a sequence that sets a terminal's title."""

from dure.records.events import Evaluated, UnknownEvent, Warned
from dure.records.finding import Finding
from dure.records.run_dir import RunDir
from dure.records.step_record import Metric

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b]0;title\x07"


def add_hostile_records(run: RunDir) -> Finding:
    """Add hostile events to a run, and return a hostile finding."""
    run.append_event(Warned(message=HOSTILE))
    run.append_event(UnknownEvent(name=HOSTILE, fields={HOSTILE: HOSTILE}))
    metrics = {HOSTILE: Metric(value=1.0, count=1), "$$x$$": Metric(value=float("nan"), count=1)}
    at = {"step": 1, "samples_seen": 64, "epochs": 0.5, "train_loss": None, "seconds": 0.1, "seconds_since_last": 0.1}
    run.append_event(Evaluated(metrics=metrics, is_best=True, best_metric=HOSTILE, **at))
    return Finding(id="x", severity="error", what=HOSTILE, evidence=(HOSTILE,), cause=HOSTILE, remedy=HOSTILE)
