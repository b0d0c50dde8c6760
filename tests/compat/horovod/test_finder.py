"""Scripts that import Horovod, and one process without any launcher."""

import subprocess
import sys
from pathlib import Path

import pytest

ALONE = """
from dure.compat.horovod.finder import install
install()
import horovod, horovod.torch as hvd, horovod.torch.elastic, torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.mpi_ops import allreduce
assert hvd.HorovodInternalError is HorovodInternalError and hvd.allreduce is allreduce
try:
    import horovod.tensorflow
except ModuleNotFoundError as error:
    assert "PyTorch" in str(error), error
try:
    import horovod.nothing
except ModuleNotFoundError as error:
    assert "horovod.nothing" in str(error), error
hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
one = torch.arange(4.0)
for found in (hvd.allreduce(one), hvd.allgather(one), hvd.broadcast(one, 0), hvd.alltoall(one), hvd.reducescatter(one)):
    assert torch.equal(found, one), found
assert hvd.join() == 0
assert (hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.ddl_built(), hvd.ccl_built()) == (0, 0, 1, 0, 0)
assert type(hvd.nccl_built()) is int
try:
    hvd.mpi_threads_supported()
except ValueError as error:
    assert "MPI" in str(error)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
import os
if os.fork() == 0:
    try:
        hvd.rank()
    except ValueError:
        os._exit(0)
    os._exit(1)
assert os.wait()[1] == 0
hvd.shutdown()

def gathered(base):
    hvd.init()
    return hvd.allgather_object(base + hvd.rank())

assert horovod.run(gathered, args=(10,), np=2) == [[10, 11], [10, 11]]
print("done")
"""


def _run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    setup = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=60)


def test_script_when_alone_then_every_name_works_and_it_ends() -> None:
    answer = _run(ALONE)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("setup", "whose"), [("", "theirs"), ("import dure.compat.horovod.finder as f; f.install()", "")]
)
def test_horovod_when_really_installed_then_is_only_replaced_on_request(tmp_path: Path, setup: str, whose: str) -> None:
    (tmp_path / "horovod.py").write_text("__version__ = 'theirs'")
    answer = _run(f"{setup}\nimport horovod\nprint(horovod.__version__)", tmp_path)
    assert answer.stdout.strip() == (whose or "0.28.1")


SPAWNING = """
import multiprocessing, sys
import horovod.torch as hvd

def size():
    return hvd.size.__module__

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.apply(size))
"""


@pytest.mark.slow
def test_horovod_when_a_rank_spawns_processes_then_they_find_it_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SPAWNING)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "horovod.py").write_text("raise SystemExit('theirs')")
    code = f"import runpy, sys; sys.argv = [{str(script)!r}]; sys.path.append({str(tmp_path / 'other')!r})\n"
    code += "from dure.compat.horovod.finder import install; install()\n"
    answer = _run(code + f"runpy.run_path({str(script)!r}, run_name='__main__')")
    assert answer.stdout.split() == ["dure.compat.horovod.common.basics"] * 2, answer.stderr


@pytest.mark.parametrize(("library", "module"), [("horovod", "torch"), ("apex", "parallel")])
def test_stub_when_imported_in_a_spawned_process_then_is_replaced_by_the_package(library: str, module: str) -> None:
    folder = Path(__file__).parents[3] / f"src/dure/compat/{library}/spawned"
    code = f"import {library}.{module}, {library}; print({library}.__name__, {library}.{module}.__name__)"
    answer = _run(code, folder)
    assert answer.stdout.split() == [f"dure.compat.{library}", f"dure.compat.{library}.{module}"], answer.stderr
