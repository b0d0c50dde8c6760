"""The floors of the house: a module imports its own floor or lower."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

importlinter = pytest.importorskip("importlinter.cli", reason="import-linter is not installed")


def test_floors_when_linted_then_every_contract_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    status = importlinter.lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=str(tmp_path))
    assert status == 0, capsys.readouterr().out
