"""Check of files and folders: what is read, what is silenced, what is refused."""

import ast
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dure.errors import Misuse
from dure.scripts.lint.check import check
from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import Report
from dure.scripts.lint.project import Project
from dure.scripts.lint.rules.table import RULES
from dure.scripts.lint.source import MOST_BYTES
from tests.scripts.lint.projects import END, START, findings_of, rules_in, script

ALL_WRITE = 'torch.save(model.state_dict(), "model.pt")\n'


def refusal(path: Path) -> str:
    with pytest.raises(Misuse, match=r".") as caught:
        check(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("comment", "is_silent"),
    [
        ("# noqa", True),
        ("#NOQA", True),
        ("# noqa: DURE401", True),
        ("# noqa: E501, dure401", True),
        ("# torch  # noqa: DURE401 DURE403", True),
        ("# noqa: DURE403", False),
        ("# noqa: E501", False),
        ("", False),
    ],
)
def test_finding_when_its_line_has_a_noqa_then_only_the_named_rules_are_silent(comment: str, is_silent: bool) -> None:
    assert ("DURE401" in rules_in(script(ALL_WRITE.replace("\n", f"  {comment}\n")))) is not is_silent


def test_noqa_when_it_is_in_a_string_then_it_silences_nothing() -> None:
    assert "DURE401" in rules_in(script(ALL_WRITE.replace("model.pt", "# noqa")))


def test_noqa_when_the_statement_has_several_lines_then_it_may_be_in_any() -> None:
    text = 'torch.save(\n    model.state_dict(),\n    "model.pt",  # noqa: DURE401\n)\n'
    assert rules_in(script(text)) == []


def test_script_when_it_imports_from_its_folder_then_the_functions_are_known_and_not_reported(tmp_path: Path) -> None:
    package = tmp_path / "lib"
    package.mkdir()
    (package / "__init__.py").write_text("from .comm import chief\n")
    (package / "comm.py").write_text("import os\ndef chief():\n    return int(os.environ['RANK']) == 0\n")
    (package / "store.py").write_text(f"import torch\ndef keep(model):\n    {ALL_WRITE}")
    start = "from lib import chief\nfrom lib.store import keep\n"
    (tmp_path / "train.py").write_text(start + script("if chief():\n    dist.barrier()\nkeep(model)\n"))
    assert [finding.rule for finding in check(tmp_path / "train.py").findings] == ["DURE201"]
    found = check(tmp_path).findings
    assert [(Path(finding.file).name, finding.rule) for finding in found] == [
        ("store.py", "DURE401"),
        ("train.py", "DURE201"),
    ]


def test_folder_when_it_has_unrelated_scripts_then_each_is_judged_alone(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text('import torch\ntorch.save(model, "model.pt")\ntorch.load("model.pt")\n')
    (tmp_path / "ranks.py").write_text(script("pass\n"))
    assert check(tmp_path).findings == ()
    assert check(tmp_path).num_files == 2


def test_folder_when_a_file_cannot_be_read_then_the_others_are(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "good.py").write_text(script(ALL_WRITE))
    found = check(tmp_path)
    assert [finding.rule for finding in found.findings] == ["DURE401"]
    assert "bad.py, line 1" in found.unreadable[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = 1\nprint 'x'\n", "line 2: not Python 3"),
        (b"\x00\x01", "zero bytes"),
        (b"x = '\xff'\n", "not in its encoding"),
        (b"# coding: klingon\n", "not in its encoding"),
        (b"(" * 5000 + b")" * 5000, "line 1: not Python 3"),
        (b"-" * 3000 + b"1", "nested"),
        (b"x = " + b"+".join([b"1"] * 3000), "nested"),
        (b"a" + b".b" * 3000, "nested"),
        (b"x = f(x)\n" * 20_000, "more than 100,000 names"),
        (b"#" * (MOST_BYTES + 1), "larger than 4.0 MiB"),
    ],
    ids=["syntax", "binary", "bytes", "coding", "brackets", "signs", "sum", "attributes", "generated", "huge"],
)
def test_file_when_it_is_no_python_then_it_is_refused_in_a_sentence(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(data)
    assert message in refusal(path)


def test_path_when_it_is_no_file_then_it_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    os.mkfifo(tmp_path / "pipe.py")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "there is no" in refusal(tmp_path / "missing.py")
    assert "cannot be read" in refusal(tmp_path / "loop.py")
    assert "there is no" in refusal(tmp_path / "gone.py")
    assert "not a regular file" in refusal(tmp_path / "pipe.py")
    assert "has no Python files" in refusal(empty)
    assert "cannot be read" in refusal(Path("x" * 5000))


def test_folder_when_a_link_leads_back_to_it_then_it_is_not_entered_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(ALL_WRITE))
    (tmp_path / "again").symlink_to(tmp_path)
    assert check(tmp_path).num_files == 1


def test_script_when_it_is_read_then_nothing_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trap = "import pathlib\npathlib.Path('ran').touch()\n"
    (tmp_path / "helper.py").write_text(trap)
    (tmp_path / "train.py").write_text("# coding: utf-8\nimport helper\n" + trap + script(ALL_WRITE))
    assert check(tmp_path / "train.py").findings
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "from . import x\n",
        "from .... import y\n",
        "import a.b.c as a\nfrom a import *\n",
        "def f(x=f): return f(f)\nf = f\nclass A(A): pass\n",
        "x = x\nx.y = x.y.z\ndef g(x): return g(x.y)\ng(g)\n",
        "match x:\n    case {'a': [b, *c]}: pass\n",
        "async def f():\n    async for x in y:\n        await z(x)\n",
        "pattern = '\\d+'\n",
        "lambda: (yield)\nx = [i for i in (j := 3, k)]\n",
        "try:\n    pass\nexcept* E:\n    pass\n",
    ],
)
def test_rules_when_a_script_is_strange_then_none_fails(text: str) -> None:
    assert findings_of(train=text + script("pass\n") if "from ." not in text else text) == []


def test_check_when_it_reads_a_socket_then_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.py")
        assert "cannot be read" in refusal(Path("s.py"))


def test_loader_when_a_name_leads_to_itself_then_the_script_is_read() -> None:
    text = "loader = make()\nloader = tqdm(loader)\nitems = enumerate(iter(items))\n"
    assert (
        rules_in(script(f"{text}for batch in loader:\n    model(batch)\nfor batch in items:\n    model(batch)\n")) == []
    )


def test_folder_when_a_rule_cannot_follow_one_script_then_the_others_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(script(ALL_WRITE) + ("endless()\n" if name == "one" else ""))

    def follow(facts: Facts) -> Iterator[Report]:
        if "endless" in facts.names:
            raise RecursionError
        return iter(())

    monkeypatch.setattr("dure.scripts.lint.check.RULES", [replace(RULES[0], check=follow), *RULES[1:]])
    result = check(tmp_path)
    assert [Path(finding.file).name for finding in result.findings] == ["two.py"]
    assert [text for text in result.unreadable if "one.py is nested too deeply" in text] == list(result.unreadable)


MAIN = "if __name__ == '__main__':\n    train()\n"
STEPS = """def train():
    model = {model}
    for index, batch in enumerate(loader, 1):
        (criterion(model(batch)) / 4).backward()
        if index % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_package_when_a_script_uses_no_ranks_then_faults_of_ranks_are_not_its_own(tmp_path: Path) -> None:
    """Scripts for one device and for many share a module that opens a process group and wraps models."""
    shared = (
        START.replace("\n\n", "\n\n\ndef begin():\n    ")
        .replace("\nrank", "\n    rank")
        .replace("\ndevice", "\n    device")
    )
    shared += "\n\ndef wrap(model):\n    begin()\n    return DDP(model)\n\n\ndef count(model):\n    return 3\n"
    (tmp_path / "shared.py").write_text(shared + END)
    (tmp_path / "a_single.py").write_text(
        f"import torch\nfrom shared import count\n{STEPS.format(model='count(net)')}{MAIN}"
    )
    (tmp_path / "b_many.py").write_text(
        f"import torch.distributed\nfrom shared import wrap\n{STEPS.format(model='wrap(net)')}{MAIN}"
    )
    found = [(Path(finding.file).name, finding.rule) for finding in check(tmp_path).findings]
    assert ("b_many.py", "DURE602") in found
    assert not [rule for name, rule in found if name == "a_single.py"]
    assert check(tmp_path / "a_single.py").findings == ()


def test_package_when_many_scripts_share_modules_then_each_call_is_followed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a folder does not grow with the number of pairs of scripts and modules."""
    body = "".join(f"def f{number}(x):\n    return g{number}(x, a.b.c[x])\n\n\n" for number in range(40))
    for number in range(12):
        (tmp_path / f"lib{number}.py").write_text(f"import torch.distributed as dist\n\n\n{body}")
        imports = "".join(f"from lib{other} import f1\n" for other in range(12))
        (tmp_path / f"script{number}.py").write_text(f"{imports}{script('f1(3)' + chr(10))}{MAIN}")
    linked: list[object] = []
    link = Project._link
    monkeypatch.setattr(Project, "_link", lambda *given: (linked.append(given), link(*given)))
    check(tmp_path)
    calls = [node for file in tmp_path.iterdir() for node in ast.walk(ast.parse(file.read_text()))]
    assert len(linked) == sum(isinstance(node, ast.Call) for node in calls)


def test_checkpoint_when_its_name_has_the_rank_then_its_place_is_this_ranks() -> None:
    own = 'name = f"part{rank}.pt"\npath = os.path.join(folder, name)\nstate = torch.load(path)\n'
    use = "model.load_state_dict(state)\n"
    assert rules_in(script(own + use)) == []
    assert rules_in(script(own.replace("{rank}", "") + use)) == ["DURE403"]


def test_collective_when_an_argument_decides_on_it_then_its_caller_is_not_blamed() -> None:
    text = "def load(everywhere):\n    if everywhere:\n        dist.barrier()\n\n\n"
    text += "if everywhere or rank == 0:\n    load(everywhere)\n"
    assert rules_in(script(text)) == []
    assert rules_in(script(text.replace("    if everywhere:\n    ", ""))) == ["DURE201"]


def test_handler_when_the_loop_makes_no_step_then_it_measures_something() -> None:
    text = "model = DDP(net)\nfor module in modules:\n    try:\n        model(x).sum().backward()\n"
    text += "    except Exception:\n        pass\n"
    assert rules_in(script(text)) == []
    assert rules_in(script(f"{text}    optimizer.step()\n")) == ["DURE203"]
