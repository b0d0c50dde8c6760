"""Rewriting of scripts: only what is safe, and nothing else of the file."""

import os
import stat
from pathlib import Path

import pytest

from dure.errors import Misuse
from dure.scripts.lint.check import check
from dure.scripts.lint.fixing import fix
from dure.scripts.lint.rules.table import RULES
from tests.scripts.lint.projects import script

LOADER = "loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))  # 한글 comment\n"


def written(folder: Path, text: str, **how: str) -> Path:
    path = folder / "train.py"
    with open(path, "w", newline="", encoding=how.get("encoding", "utf-8")) as file:
        file.write(text)
    return path


def test_fix_when_a_file_has_its_own_line_ends_and_encoding_then_both_stay(tmp_path: Path) -> None:
    text = "# coding: euc-kr\r\n" + script(LOADER).replace("\n", "\r\n").removesuffix("\r\n")
    path = written(tmp_path, text, encoding="euc-kr")
    fix(check(path).findings)
    assert path.read_bytes() == text.replace("shuffle=True", "shuffle=False").encode("euc-kr")


def test_fix_when_a_file_begins_with_a_byte_order_mark_then_it_stays(tmp_path: Path) -> None:
    path = written(tmp_path, script(LOADER), encoding="utf-8-sig")
    fix(check(path).findings)
    assert path.read_bytes() == script(LOADER).replace("shuffle=True", "shuffle=False").encode("utf-8-sig")


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.is_fixed], ids=lambda rule: rule.id)
def test_fix_when_made_then_the_finding_is_gone_and_a_second_one_changes_nothing(tmp_path: Path, rule) -> None:
    path = written(tmp_path, rule.bad)
    fixed = fix(check(path).findings)
    assert rule.id in {finding.rule for finding in fixed.fixed}
    once = path.read_bytes()
    left = check(path).findings
    assert rule.id not in {finding.rule for finding in left}
    fix(left)
    assert path.read_bytes() == once


def test_fix_when_a_cure_is_not_safe_then_the_file_stays_and_the_reason_is_given(tmp_path: Path) -> None:
    path = written(tmp_path, script('torch.save(model.state_dict(), "model.pt")\n'))
    before = path.stat()
    fixed = fix(check(path).findings)
    assert fixed.fixed == ()
    assert [reason for _, reason in fixed.refused] == ["it has no diff"]
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_fix_when_the_file_is_a_link_then_its_target_is_rewritten_with_the_same_mode(tmp_path: Path) -> None:
    path = written(tmp_path, script(LOADER))
    path.chmod(0o751)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    fix(check(link).findings)
    assert link.is_symlink()
    assert "shuffle=False" in path.read_text(encoding="utf-8")
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert sorted(item.name for item in tmp_path.iterdir()) == ["link.py", "train.py"]


def test_fix_when_the_file_has_changed_meanwhile_then_it_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, script(LOADER))
    found = check(path).findings
    path.write_text("x = 1\n")
    with pytest.raises(Misuse, match="has changed since it was read"):
        fix(found)
    assert path.read_text() == "x = 1\n"


def test_fix_when_the_new_file_cannot_be_written_then_the_old_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, script(LOADER))
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(Misuse, match="cannot be written: No space left on device; it is unchanged"):
        fix(check(path).findings)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["train.py"]


def test_fix_when_two_cures_are_in_one_file_then_both_are_made(tmp_path: Path) -> None:
    step = (
        "model = DDP(model.to(device))\nfor x in loader:\n    model.module(x).sum().backward()\n    optimizer.step()\n"
    )
    path = written(tmp_path, script(LOADER + step))
    fixed = fix(check(path).findings)
    assert {finding.rule for finding in fixed.fixed} == {"DURE102", "DURE204"}
    assert "    model(x).sum()" in path.read_text(encoding="utf-8")
