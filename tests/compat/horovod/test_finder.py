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
