"""`dure run` on one rank beside `python`: a script is to find the same around it, and to leave the same behind."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import Prewarmed

PROBE = Path(__file__).with_name("probe_script.py")


def python(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=60)


def write(folder: Path, text: str, name: str = "script.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.fixture
def shapes(tmp_path):
    """The probe in all the shapes that `python` takes."""
    for name in (
        "probe.py",
        "with blanks/the probe.py",
        "package/__main__.py",
        "package/module.py",
        "plain/__main__.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(PROBE, tmp_path / name)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("with blanks/the probe.py")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.write(PROBE, "__main__.py")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("words", [["link.py", "--nproc", "7"], ["plain"], ["-m", "package.module"]])
def test_script_when_it_looks_around_then_finds_what_python_gives_it(words, shapes):
    # no interpreter of the tests: sys.path[0] and the encodings are part of it
    run = python(shapes, "-m", "dure", "run", "--nproc", "1", *words)
    expected = python(shapes, *words)
    ours, theirs = (json.loads(text.splitlines()[0]) for text in (run.stdout, expected.stdout))
    assert ours == theirs
    assert run.stdout.splitlines()[1:] == expected.stdout.splitlines()[1:] == ["left first", "left last"]


@pytest.mark.parametrize(
    "words", [["package/../probe.py", "word"], ["with blanks/the probe.py"], ["app.zip"], ["-m", "package"]]
)
def test_script_when_it_looks_around_in_a_fork_then_finds_what_python_gives_it(words, shapes, prewarmed):
    run = prewarmed.run(shapes, "run", "--nproc=1", *words)
    assert run.code == 0, run.err
    ours, theirs = json.loads(run.out.splitlines()[0]), json.loads(python(shapes, *words).stdout.splitlines()[0])
    of_the_test = {"path", "flags", "errors", "streams", "limits"}  # the server's own
    assert {k: v for k, v in ours.items() if k not in of_the_test} == {
        k: v for k, v in theirs.items() if k not in of_the_test
    }
    assert run.out.splitlines()[1:] == ["left first", "left last"]


@pytest.mark.slow
def test_script_when_one_of_two_ranks_looks_at_its_streams_then_they_are_as_python_has_them(tmp_path):
    text = "import sys\nprint([(s.encoding, s.errors, s.mode) for s in (sys.stdout, sys.stderr, sys.stdin)])"
    script = write(tmp_path, text)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    words = [sys.executable, "-m", "dure", "run", "--nproc=2", "--no-prefix", "script.py"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environment)
    expected = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert (run.stdout, run.returncode) == (2 * expected.stdout, 0)


CODES = ["None", "True", "False", "256", "-1", "2**31", "2**70", "1.5", "'word'", "['word']", "''"]


def test_script_when_it_leaves_by_sys_exit_then_the_code_is_pythons(tmp_path):
    from dure.launch.scripts.main_module import exit_code_of

    for code in CODES:
        expected = python(tmp_path, "-c", f"import sys; sys.exit({code})")
        assert exit_code_of(SystemExit(eval(code))) == expected.returncode, code


def test_script_when_a_thread_leaves_by_sys_exit_then_the_script_goes_on(prewarmed, tmp_path):
    write(tmp_path, "import sys, threading\nt = threading.Thread(target=sys.exit, args=(3,))\nt.start(); t.join()\n")
    assert prewarmed.run(tmp_path, "run", "--nproc=1", "script.py").code == 0


LEFT_OPEN = """
import gc, gzip, tempfile, threading, time, zipfile
from concurrent.futures import ThreadPoolExecutor

plain = open("plain.txt", "w"); plain.write("held back")
inside = [open("inside.bin", "wb")]; inside[0].write(b"held back"); inside.append(inside)
packed = gzip.open("packed.gz", "wt"); packed.write("held back")
archive = zipfile.ZipFile("archive.zip", "w"); archive.writestr("name", "")
passing = tempfile.NamedTemporaryFile(dir=".", suffix=".passing")
gc.freeze()
pool = ThreadPoolExecutor(2); pool.submit(print, "computed")
threading.Thread(target=lambda: (time.sleep(0.2), plain.write(", and late"))).start()
"""


def test_script_when_it_leaves_files_and_pools_open_then_it_ends_and_nothing_is_lost(prewarmed, tmp_path):
    write(tmp_path, LEFT_OPEN)
    run = prewarmed.run(tmp_path, "run", "--nproc=1", "script.py")
    assert (run.code, run.out) == (0, "computed\n"), run.err
    assert (tmp_path / "plain.txt").read_text() == "held back, and late"
    assert (tmp_path / "inside.bin").read_text() == "held back"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"held back"
    assert zipfile.ZipFile(tmp_path / "archive.zip").namelist() == ["name"]
    assert not list(tmp_path.glob("*.passing"))


CHILDREN = """
import multiprocessing, sys
from torch.utils.data import DataLoader

class Item:
    def __init__(self, number): self.number = number

def collate(numbers): return [Item(number) for number in numbers]

if __name__ == "__main__":
    for way in sys.argv[1:]:
        loader = DataLoader(range(4), 2, num_workers=1, collate_fn=collate, multiprocessing_context=way)
        print(way, [item.number for batch in loader for item in batch])
"""


@pytest.mark.parametrize("ways", [["fork"], pytest.param(["spawn", "forkserver"], marks=pytest.mark.slow)])
def test_script_when_its_loaders_send_its_own_classes_then_they_are_found(ways, prewarmed, tmp_path):
    write(tmp_path, CHILDREN)
    run = prewarmed.run(tmp_path, "run", "--nproc=1", "script.py", *ways)
    assert run.out.splitlines() == [f"{way} [0, 1, 2, 3]" for way in ways], run.err


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (b"# coding: latin-1\nprint(ascii('\xe9'))\n", "'\\xe9'\n"),
        (b"\xef\xbb\xbfprint('marked')\n", "marked\n"),
        (b"import inspect, __main__\nprint(inspect.getsource(__main__)[:6])\n", "import\n"),
    ],
)
def test_script_when_its_source_is_odd_then_it_is_read_as_python_reads_it(source, shown, prewarmed, tmp_path):
    (tmp_path / "script.py").write_bytes(source)
    assert prewarmed.run(tmp_path, "run", "--nproc=1", "script.py").out == shown


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    {}['key']\nexcept KeyError:\n    raise ValueError('second')\n",
        "x = (\n",
        "def own(kind, error, trace):\n    print('own', kind, error, trace.tb_next)\n"
        "import sys\nsys.excepthook = own\nraise ValueError('kept')\n",
        "def broken(*_):\n    raise KeyError('hook')\nimport sys\nsys.excepthook = broken\nraise ValueError('x')\n",
    ],
    ids=["chain", "no python", "own hook", "broken hook"],
)
def test_script_when_it_fails_then_what_is_shown_is_pythons(text, prewarmed, tmp_path):
    write(tmp_path, text)
    run = prewarmed.run(tmp_path, "run", "--nproc=1", "script.py")
    expected = python(tmp_path, "script.py")
    shown = run.err.partition("dure: ")[0]
    assert shown.replace(f"{tmp_path}/script.py", "script.py") == expected.stderr.replace(
        f"{tmp_path}/script.py", "script.py"
    )
    assert (run.out, run.code) == (expected.stdout, expected.returncode)


INTERRUPTED = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("saved")
"""


@pytest.mark.parametrize("nproc", [1, 2])
def test_script_when_it_is_interrupted_then_it_may_save(nproc, prewarmed, tmp_path):
    write(tmp_path, INTERRUPTED)
    run = prewarmed.run(tmp_path, "run", f"--nproc={nproc}", "script.py")
    assert (run.code, run.out.count("saved")) == (0, nproc), run.err


def test_ranks_when_nothing_is_seeded_then_each_draws_its_own(prewarmed, tmp_path):
    write(tmp_path, "import os, random, numpy, torch\n"
          "os.write(1, f'{random.random()} {numpy.random.rand()} {torch.rand(()).item()}\\n'.encode())\n")  # fmt: skip
    run = prewarmed.run(tmp_path, "run", "--nproc=2", "--no-prefix", "script.py")
    first, second = (line.split() for line in run.out.splitlines())
    assert len({*first, *second}) == 6


OWN_GROUP = """
import os, sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, way, port):
    if way == "variables":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if way == "store":
        store = dist.TCPStore("127.0.0.1", int(port), 2, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:
        urls = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{os.getcwd()}/meet"}
        dist.init_process_group("gloo", init_method=urls.get(way, "env://"), rank=rank, world_size=2)
    number = torch.ones(())
    dist.all_reduce(number)
    os.write(1, f"{way} {number.item()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    way, port, starts = sys.argv[1:]
    if starts == "itself":
        mp.spawn(work, (way, port), 2)
    else:
        work(int(os.environ["RANK"]), way, port)
"""


def free_port() -> str:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def meet(prewarmed: Prewarmed, folder: Path, way: str, starts: str) -> None:
    write(folder, OWN_GROUP)
    nproc = 1 if starts == "itself" else 2
    run = prewarmed.run(folder, "run", f"--nproc={nproc}", "--no-prefix", "script.py", way, free_port(), starts)
    assert run.out.splitlines() == [f"{way} 2.0"] * 2, run.err


@pytest.mark.parametrize("way", ["variables", "tcp", "file", "store"])
def test_ranks_when_they_meet_at_an_address_of_their_own_then_they_do(way, prewarmed, tmp_path):
    meet(prewarmed, tmp_path, way, "not")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["variables", "as given"])
def test_script_when_it_starts_ranks_itself_then_they_meet(way, prewarmed, tmp_path):
    meet(prewarmed, tmp_path, way, "itself")


@pytest.mark.slow
def test_script_when_it_only_starts_another_one_then_that_is_the_rank(prewarmed, tmp_path):
    write(tmp_path, OWN_GROUP, "inner.py")
    write(tmp_path, "import subprocess, sys\n"
          "sys.exit(subprocess.call([sys.executable, 'inner.py', 'as given', '0', 'not']))\n")  # fmt: skip
    run = prewarmed.run(tmp_path, "run", "--nproc=2", "--no-prefix", "script.py")
    assert run.out.splitlines() == ["as given 2.0"] * 2, run.err


@pytest.mark.slow
def test_environment_when_compared_with_torchrun_then_only_what_is_said_here_differs(prewarmed, tmp_path):
    write(tmp_path, "import json, os\nprint(json.dumps(dict(os.environ)), flush=True)\n")
    ours = json.loads(prewarmed.run(tmp_path, "run", "--nproc=1", "script.py").out)
    theirs = json.loads(python(tmp_path, "-m", "torch.distributed.run", "script.py").stdout)
    set_by_torchrun = {key: value for key, value in theirs.items() if os.environ.get(key) != value}
    others = {
        key
        for key, value in set_by_torchrun.items()
        if ours.get(key) != value and key not in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")
    }
    # the first is a name of the host, the second of a file that torchrun's agent reads, the third for that agent;
    # the last is 1, for which see `meet_at_served_store`
    assert others - {"TMPDIR"} == {
        "MASTER_ADDR", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE",
    }  # fmt: skip
