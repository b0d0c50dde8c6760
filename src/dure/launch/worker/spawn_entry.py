"""The entry of a worker that was not forked: `python -m dure.launch.worker.spawn_entry '{...}'`."""

import importlib
import json
import sys
from typing import Any

from dure.cluster.rank import RankInfo
from dure.launch.worker.child import Output, run_in_child
from dure.process.context import Place, StoreAddress


def place_from_json(data: dict[str, Any]) -> Place:
    """Rebuild a place from `dataclasses.asdict`'s answer."""
    store = None if data["store"] is None else StoreAddress(**data["store"])
    fds = tuple(data["snapshot_fds"])
    return Place(**{**data, "rank": RankInfo(**data["rank"]), "store": store, "snapshot_fds": fds})


def main() -> None:
    """Read what the supervisor told this process, and run."""
    told = json.loads(sys.argv[1])
    place = place_from_json(told["place"])
    # the task must not find the supervisor's words among its own arguments
    del sys.argv[1:]

    def entry(place: Place) -> int:
        return int(importlib.import_module(told["entry"]).main(told["job"], place))

    output = told["output"]
    descriptors = output["descriptors"] and tuple(output["descriptors"])
    run_in_child(entry, place, Output(**{**output, "descriptors": descriptors}), told["parent_pid"])


if __name__ == "__main__":
    main()
