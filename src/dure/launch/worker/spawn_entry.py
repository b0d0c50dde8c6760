"""The entry of a worker that was not forked: `python -m dure.launch.worker.spawn_entry '{...}'`."""

import importlib
import json
import sys

from dure.checked import record_from_json
from dure.launch.worker.child import Output, run_in_child
from dure.process.context import Place
from dure.process.jobs import job_from_json


def main() -> None:
    """Read what the supervisor told this process, and run."""
    told = json.loads(sys.argv[1])
    job, place = job_from_json(told["job"]), record_from_json(Place, told["place"])
    # the task must not find the supervisor's words among its own arguments
    del sys.argv[1:]

    def entry(place: Place) -> int:
        return int(importlib.import_module(told["entry"]).main(job, place))

    run_in_child(entry, place, record_from_json(Output, told["output"]), told["parent_pid"])


if __name__ == "__main__":
    main()
