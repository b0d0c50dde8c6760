"""Gates over the source text: what no file of dure may contain."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.dotted_names import dotted_name

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "pickle.load": "unpickles",
    "pickle.loads": "unpickles",
    "pickle.Unpickler": "unpickles",
    "marshal.loads": "unpickles",
    "shelve.open": "unpickles",
    "torch.load": "unpickles",
    "yaml.load": "builds any object",
    "broadcast_object_list": "unpickles what a peer sends",
    "all_gather_object": "unpickles what a peer sends",
    "gather_object": "unpickles what a peer sends",
    "scatter_object_list": "unpickles what a peer sends",
    "recv_object_list": "unpickles what a peer sends",
}
"""Forbidden calls by whole dotted name, or by the last part of the name of a collective, each with the reason."""

FORBIDDEN_KEYWORDS = {"shell": True, "weights_only": False, "allow_pickle": True}
ROOMLESS = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "misc.py"}


def unsafe_calls(source: str) -> Iterator[str]:
    """Yield line and reason of each call that could run what a file or a peer says."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted_name(node.func)
        last = name.rpartition(".")[2]
        if name in FORBIDDEN_CALLS or (last.endswith(("_object", "_object_list")) and last in FORBIDDEN_CALLS):
            yield f"{node.lineno}: {name} {FORBIDDEN_CALLS.get(name) or FORBIDDEN_CALLS[last]}"
        for keyword in node.keywords:
            if (
                keyword.arg in FORBIDDEN_KEYWORDS
                and isinstance(keyword.value, ast.Constant)
                and keyword.value.value is FORBIDDEN_KEYWORDS[keyword.arg]
            ):
                yield f"{node.lineno}: {name}({keyword.arg}={keyword.value.value})"


def strategy_branches(source: str) -> Iterator[str]:
    """Yield each comparison of a strategy's name with a written-out name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Match) and _is_strategy(node.subject):
            yield f"{node.lineno}: match {ast.unparse(node.subject)}"
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        if any(map(_is_strategy, sides)) and any(map(_is_written_name, sides)):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_strategy(node: ast.expr) -> bool:
    return dotted_name(node).rpartition(".")[2] in ("strategy", "strategy_name")


def _is_written_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return any(map(_is_written_name, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


KINDS_OF_DEVICES = {"cuda", "mps", "xpu", "hpu", "mtia"}
KNOW_KINDS = {
    "host/device_kinds.py": KINDS_OF_DEVICES,  # which is what it is for
    "torchcompat/devices.py": {"mps", "torch.cuda"},  # private functions, for which torch has nothing generic
    "spec/foreign_names.py": {"cuda"},  # a flag of other tools
    "scripts/lint/modules.py": {"cuda", "xpu", "hpu"},  # words in scripts of others
    "compat/horovod/common/basics.py": {"torch.cuda", "torch.version.cuda"},  # Horovod's questions are about CUDA
}
"""Files that may name kinds of devices, each with the names."""


def kinds_written_out(source: str) -> Iterator[str]:
    """Yield each kind of device that is written out: as a string, or as a module or version of torch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.partition(":")[0] in KINDS_OF_DEVICES:
                yield node.value.partition(":")[0]
        elif isinstance(node, ast.Attribute) and node.attr in KINDS_OF_DEVICES:
            yield dotted_name(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".") for alias in node.names]
            yield from (name for name in names if KINDS_OF_DEVICES & {*name.split(".")})


def test_kinds_of_devices_when_named_then_in_one_module() -> None:
    found = {
        str(path.relative_to(ROOT / "src/dure")): {*kinds_written_out(path.read_text(encoding="utf-8"))}
        for path in SOURCES
    }
    known = {name: names | {f"torch.{kind}" for kind in names} for name, names in KNOW_KINDS.items()}
    known["host/device_kinds.py"].add("torch.version.cuda")
    wrong = {name: names - known.get(name, set()) for name, names in found.items()}
    assert {name: names for name, names in wrong.items() if names} == {}, "ask for an ability of host/device_kinds.py"


@pytest.mark.parametrize(
    "line",
    [
        'device.type == "cuda"',
        'torch.device("cuda:1")',
        "torch.cuda.empty_cache()",
        "from torch import cuda",
        "torch.mps",
    ],
)
def test_kinds_written_out_when_one_is_then_it_is_found(line: str) -> None:
    assert len(list(kinds_written_out(line))) == 1


def test_sources_when_read_then_nothing_runs_what_a_file_says() -> None:
    found = {
        str(path.relative_to(ROOT)): calls
        for path in SOURCES
        if (calls := list(unsafe_calls(path.read_text(encoding="utf-8"))))
    }
    # runs the script that the user has named, which is what it is for
    (of_script,) = found.pop("src/dure/launch/scripts/main_module.py")
    assert of_script.endswith("exec runs text as code")
    # Horovod's interface is for any object, which another rank of the same script has sent
    (of_objects,) = found.pop("src/dure/compat/horovod/torch/functions.py")
    assert of_objects.endswith("pickle.loads unpickles")
    (of_results,) = found.pop("src/dure/compat/horovod/starter.py")  # results of processes that it has forked
    assert of_results.endswith("pickle.loads unpickles")
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "eval(text)",
        "exec(text)",
        "pickle.load(file)",
        "torch.load(path)",
        "load(path, weights_only=False)",
        "run(line, shell=True)",
        "yaml.load(file)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(out, mine)",
    ],
)
def test_unsafe_calls_when_one_is_written_then_it_is_found(line: str) -> None:
    assert len(list(unsafe_calls(line))) == 1


def test_unsafe_calls_when_a_model_goes_to_evaluation_then_none_is_found() -> None:
    assert list(unsafe_calls("model.eval(); safetensors.torch.load(data); re.compile('eval(x)')")) == []


def test_strategies_when_named_outside_their_table_then_nothing_branches_on_a_name() -> None:
    table = ROOT / "src/dure/strategies/table.py"
    branches = {
        str(path.relative_to(ROOT)): found
        for path in SOURCES
        if path != table and (found := list(strategy_branches(path.read_text(encoding="utf-8"))))
    }
    assert branches == {}


@pytest.mark.parametrize(
    "line", ["spec.strategy == 'ddp'", "strategy in ('dp', 'ddp')", "match strategy:\n    case _: pass"]
)
def test_strategy_branches_when_one_is_written_then_it_is_found(line: str) -> None:
    assert len(list(strategy_branches(line))) == 1


def test_files_when_named_then_each_says_what_is_in_it() -> None:
    named = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in named if path.name in ROOMLESS] == []


PARSERS = ("json.load", "json.loads", "json.JSONDecoder", "tomllib.load", "tomllib.loads")
OWN_TEXTS = {
    "documents.py": "the reader itself",
    "launch/logs/log_pump.py": "its own arguments; it imports nothing of dure",
    "launch/worker/spawn_entry.py": "its own arguments",
    "launch/nodes/rendezvous.py": "what it has just written",
    "api/settings.py": "what it has just written",
    "training/task/options.py": "what it has just written",
    "comm/groups.py": "what it has just written",
}


def parsing_calls(source: str) -> Iterator[str]:
    """Yield each call that parses a text without the reader's limits."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    yield from (f"{call.lineno}: {name}" for call in calls if (name := dotted_name(call.func)) in PARSERS)


@pytest.mark.slow
def test_texts_of_others_when_parsed_then_the_one_reader_does_it() -> None:
    package = ROOT / "src/dure"
    parsing = {
        str(path.relative_to(package)): found
        for path in package.rglob("*.py")
        if (found := list(parsing_calls(path.read_text(encoding="utf-8"))))
    }
    assert {name: found for name, found in parsing.items() if name not in OWN_TEXTS} == {}
    assert set(OWN_TEXTS) == set(parsing)


MODULE_NAME = re.compile(r"dure(\.[a-z][a-z0-9_]*)+")
NO_MODULES = {"dure.train", "dure.evaluate", "dure.submit"}
"""Functions of the package, and the value of a label in Kubernetes."""


def named_modules() -> Iterator[tuple[str, str]]:
    """Yield each file and the name of a module of dure that stands in a text of it."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition(":")[0]
                if MODULE_NAME.fullmatch(name) and name not in NO_MODULES:
                    yield str(path.relative_to(ROOT)), name


def test_modules_when_a_text_names_them_then_they_exist() -> None:
    named = list(named_modules())
    assert len(named) > 40
    base = ROOT / "src"
    files = {
        str(path.relative_to(base).with_suffix("")).replace("/", ".").removesuffix(".__init__") for path in SOURCES
    }
    assert [(file, name) for file, name in named if name not in files] == []
