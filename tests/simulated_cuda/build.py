"""Build of the simulation: a folder with a package that every `import torch` finds, once per torch and sources."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "sources").glob("*.cpp"))
HEADERS = sorted((HERE / "sources").glob("*.h"))
RUNTIME = sorted((HERE / "runtime").glob("*.py"))
PACKAGE = "simulated_cuda_runtime"
ENTRY_POINT = f"[torch.backends]\n{PACKAGE} = {PACKAGE}:autoload\n"
"""torch calls the entry points of this group at the end of its own import."""


def reason_not_built() -> str | None:
    """Return why the simulation cannot be built here; None if it can."""
    if torch.version.cuda or torch.version.hip:
        return "this torch has CUDA of its own; the simulation needs a CPU build"
    if shutil.which("g++") is None:
        return "the simulation is compiled with g++, which is not installed"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulation is compiled against Python's headers, which are not installed"
    return None


def site_folder(cache: Path) -> Path:
    """Return a folder for `PYTHONPATH`, built on the first call: about a minute on two cores."""
    core = _core(cache)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in [core, *RUNTIME])).hexdigest()[:16]
    folder = cache / f"site-{digest}"
    with FileLock(cache / "site.lock"):
        if not folder.exists():
            made = cache / f"{folder.name}.part"
            shutil.rmtree(made, ignore_errors=True)
            (made / PACKAGE).mkdir(parents=True)
            for path in RUNTIME:
                shutil.copy(path, made / PACKAGE)
            shutil.copy(core, made / PACKAGE / "core.so")
            described = made / f"{PACKAGE}-0.dist-info"
            described.mkdir()
            (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 0\n")
            (described / "entry_points.txt").write_text(ENTRY_POINT)
            made.rename(folder)
    return folder


def _core(cache: Path) -> Path:
    """Compile the sources if none of this torch, Python and these sources is in the cache."""
    words = f"{torch.__version__} {sys.version} {_flags()}".encode()
    digest = hashlib.sha256(words + b"".join(path.read_bytes() for path in [*HEADERS, *SOURCES])).hexdigest()[:16]
    core = cache / f"core-{digest}.so"
    with FileLock(cache / "core.lock"):
        if not core.exists():
            parts = cache / f"objects-{digest}"
            parts.mkdir(exist_ok=True)
            for path in [*HEADERS, *SOURCES]:
                shutil.copy(path, parts)
            for path in HEADERS:  # torch's headers, which take most of the time, are read once
                _run(*_flags(), "-x", "c++-header", parts / path.name)
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda source: _compiled(parts / source.name), SOURCES))
            torch_libraries = Path(torch.__file__).with_name("lib")
            libraries = [f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"]
            linked = core.with_suffix(".part")
            _run("-shared", *objects, *libraries, "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-o", linked)
            linked.rename(core)
            shutil.rmtree(parts)
    return core


def _compiled(source: Path) -> Path:
    found = source.with_suffix(".o")
    _run(*_flags(), "-c", source, "-o", found)
    return found


def _flags() -> list[str]:
    # not by torch.utils.cpp_extension: its import asks for devices, after which no fork of this process has any
    headers = Path(torch.__file__).with_name("include")
    folders = [headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"]]
    includes = [f"-I{path}" for path in folders]
    names = ["USE_DISTRIBUTED", "USE_C10D_GLOO", "TORCH_EXTENSION_NAME=core"]
    names.append(f"_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    return ["-O1", "-w", "-std=c++20", "-fPIC", *(f"-D{name}" for name in names), *includes]


def _run(*words: object) -> None:
    done = subprocess.run(["g++", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"g++ failed:\n{done.stderr[-4000:]}")
