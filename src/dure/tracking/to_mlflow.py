"""Hand-over to MLflow through its own client; the address is what `MLFLOW_TRACKING_URI` says, as everywhere."""

import os
import re
from collections.abc import Sequence

_DEFAULTS = {
    # by itself the client sends statistics of its use to its makers
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # and waits for minutes for a server that is down, during which nothing is known of it
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
for _name, _value in _DEFAULTS.items():
    os.environ.setdefault(_name, _value)

from mlflow.entities import Metric, Param, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.tracking import MlflowClient  # noqa: E402

from dure.tracking.tracker import Point, Subject  # noqa: E402

_EXPERIMENT = "dure"
_STATUSES = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "killed": "KILLED"}
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 500
"""Most metrics and parameters of a request, and characters of a parameter, that every version of the server takes."""


class _MLflow:
    """Client of one run."""

    def begin(self, subject: Subject, identity: str | None) -> str | None:
        self._client = MlflowClient()
        run = None if identity is None else self._earlier(identity)
        if run is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_ID") or self._experiment()
            run = self._client.create_run(experiment, run_name=subject.name, tags={"run_folder": str(subject.folder)})
        else:
            self._client.update_run(run.info.run_id, status="RUNNING")
        self._run_id = str(run.info.run_id)
        self._write_parameters(subject, run.data.params)
        return self._run_id

    def _earlier(self, identity: str):  # type: ignore[no-untyped-def]
        try:
            return self._client.get_run(identity)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
        return None  # the server, or the address, is another one

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _write_parameters(self, subject: Subject, known: dict[str, str]) -> None:
        """Write the parameters. A server refuses to change one, so what a resume changed becomes a tag."""
        shown = {_named(name): text[:_MOST_CHARACTERS] or "''" for name, text in subject.parameters.items()}
        new = [Param(name, text) for name, text in shown.items() if name not in known]
        changed = [RunTag(f"resumed.{name}", text) for name, text in shown.items() if known.get(name, text) != text]
        for begin in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[begin : begin + _MOST_PARAMETERS])
        if changed:
            self._client.log_batch(self._run_id, tags=changed[:_MOST_PARAMETERS])

    def write(self, points: Sequence[Point]) -> None:
        metrics = [
            Metric(_named(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _MOST_METRICS])

    def end(self, status: str) -> None:
        self._client.set_terminated(self._run_id, _STATUSES[status])


def _named(name: str) -> str:
    """Return a name of the characters that every version of the server takes."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)[:250]


def make() -> _MLflow:
    """Return a client."""
    return _MLflow()
