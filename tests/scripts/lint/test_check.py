"""Check of files and folders: what is read, what is silenced, what is refused."""

import os
import socket
from pathlib import Path

import pytest

from dure.errors import Misuse
from dure.scripts.lint.check import check
from dure.scripts.lint.source import MOST_BYTES
from tests.scripts.lint.projects import findings_of, rules_in, script

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
