"""SARIF: the parts of the standard that code hosts read."""

from pathlib import Path

from dure.scripts.lint.check import checked
from dure.scripts.lint.modules import Module
from dure.scripts.lint.project import Project
from dure.scripts.lint.rules.table import RULES
from dure.scripts.lint.sarif import to_sarif
from dure.scripts.lint.source import parsed
from tests.scripts.lint.projects import START


def log_of(text: str, name: str) -> dict:
    return to_sarif(checked(Project([Module(source=parsed(text, Path(name), name), dotted=("train",))])), "1.0")


def test_sarif_when_there_are_findings_then_each_names_its_rule_and_place() -> None:
    text = START + "# é\nx = 'é'; loader = DataLoader(d, shuffle=True, sampler=DistributedSampler(d))\n"
    (run,) = log_of(text, "my folder/a#b.py")["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == [rule.id for rule in RULES]
    both = {result["ruleId"]: result for result in run["results"]}
    assert set(both) == {"DURE102", "DURE704"}
    result = both["DURE102"]
    assert rules[result["ruleIndex"]]["id"] == "DURE102"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20folder/a%23b.py"
    line = text.splitlines()[place["region"]["startLine"] - 1]
    assert line[place["region"]["startColumn"] - 1 :].startswith("DataLoader(")
    (replacement,) = result["fixes"][0]["artifactChanges"][0]["replacements"]
    region = replacement["deletedRegion"]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == "True"
    assert replacement["insertedContent"] == {"text": "False"}


def test_sarif_when_there_is_nothing_then_the_log_has_an_empty_run() -> None:
    log = log_of("x = 1\n", "a.py")
    assert log["version"] == "2.1.0"
    assert log["runs"][0]["results"] == []
