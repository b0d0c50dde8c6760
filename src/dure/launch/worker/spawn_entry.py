"""Entry point of a worker that was not forked: `python -m dure.launch.worker.spawn_entry '{...}'`."""

import importlib
import json
import sys

from dure.checked import record_from_json
from dure.launch.worker.child import Output, run_in_child
from dure.process.context import Place
from dure.process.jobs import job_from_json


def main() -> None:
    """Read the supervisor's argument, and run."""
    arguments = json.loads(sys.argv[1])
    job, place = job_from_json(arguments["job"]), record_from_json(Place, arguments["place"])
    # the task must not find it among its own arguments
    del sys.argv[1:]

    def entry(place: Place) -> int:
        return int(importlib.import_module(arguments["entry"]).main(job, place))

    run_in_child(entry, place, record_from_json(Output, arguments["output"]), arguments["parent_pid"])


if __name__ == "__main__":
    main()
