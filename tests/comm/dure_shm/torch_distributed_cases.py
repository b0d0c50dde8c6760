"""One rank of torch's own `DistributedTest` on the backend `dure_shm`: every case in one process, one after another.

torch starts two processes for each of 240 cases, which takes minutes. Prints a JSON object: by case, what came of it.
"""

import contextlib
import io
import json
import os
import sys
import types
import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dure.comm

BACKEND = "dure_shm"
SECONDS = 6.0
"""Seconds that a call waits for a rank that does not come; in some cases one never does."""


def prepare() -> None:
    """Let torch's cases take the backend for gloo, and do without a library that only other cases use."""
    os.environ.update(BACKEND="gloo", MASTER_ADDR="127.0.0.1", TEMP_DIR="shared")
    for name in ("barrier", "test_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], name), exist_ok=True)
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:
            sys.modules["expecttest"] = types.SimpleNamespace(TestCase=unittest.TestCase)  # type: ignore[assignment]


class Rank:
    """This rank, and a store over which both meet between two cases."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        from torch.testing._internal.distributed import distributed_test as cases

        self.rank, self.store, self.num_meetings = rank, store, 0
        rank_of_this = self

        class Cases(cases.TestDistBackend, cases.DistributedTest._DistTestBase):  # type: ignore[misc]
            def _barrier(self, *_: Any, **__: Any) -> None:
                rank_of_this.meet()

        self.cases = Cases
        cases.Barrier.sync = lambda *_, **__: self.meet()

    def meet(self) -> None:
        self.num_meetings += 1
        key = f"meeting {self.num_meetings}"
        if self.store.add(key, 1) == int(os.environ["WORLD_SIZE"]):
            self.store.set(f"{key} over", "")
        self.store.wait([f"{key} over"], timedelta(seconds=SECONDS))

    def run(self, name: str, number: int) -> str:
        """Run one case in a group of its own."""
        self.num_meetings = 1000 * number  # whatever the last one has left out
        world_size = int(os.environ["WORLD_SIZE"])
        case = self.cases(name)
        case.rank, case.file_name = self.rank, os.path.join(os.environ["TEMP_DIR"], name)
        dist.init_process_group(
            BACKEND, store=dist.PrefixStore(name, self.store), rank=self.rank, world_size=world_size,
            timeout=timedelta(seconds=SECONDS),
        )  # fmt: skip
        torch.manual_seed(0)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                getattr(case, name)()
            return "passes"
        except (SystemExit, unittest.SkipTest):
            return "skips"
        except BaseException as error:
            return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        finally:
            meet_all(self.store, f"{number} over", self.rank)
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            for left in os.scandir(os.path.join(os.environ["TEMP_DIR"], "test_dir")):
                with contextlib.suppress(FileNotFoundError):  # the other rank was faster
                    os.unlink(left)


def meet_all(store: dist.Store, what: str, rank: int) -> None:
    store.set(f"{what} by {rank}", "")
    store.wait([f"{what} by {other}" for other in range(int(os.environ["WORLD_SIZE"]))], timedelta(minutes=1))


def main() -> None:
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    prepare()
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    this = Rank(rank, store)
    names = sys.argv[3:] or unittest.TestLoader().getTestCaseNames(this.cases)
    came: dict[str, str] = {}
    for number, name in enumerate(names):
        meet_all(store, f"{number} begun", rank)
        came[name] = this.run(name, number)
    print(json.dumps(came), flush=True)
    meet_all(store, "done", rank)
    os._exit(0)


assert dure.comm
if __name__ == "__main__":
    main()
