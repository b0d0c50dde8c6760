"""Page of the documentation that lists the rules, made from their table."""

from dure.scripts.lint.finding import Rule
from dure.scripts.lint.rules.table import RULES

INTRODUCTION = """\
# Faults of distributed scripts: `dure lint`

Made by `dure lint --rules` from the table that the tests walk; do not edit it by hand.

    dure lint train.py                 # a script, or a folder of scripts
    dure lint train.py --fix           # make the changes that are safe
    dure lint . --sarif > lint.sarif   # for code hosts; --json for programs

`dure lint` reads the source and runs nothing of it. A script may use `torch.distributed`, Accelerate, Lightning Fabric,
Horovod or DataParallel. Modules that it imports from its own folder are read too, so that their functions are known.
Each finding names the place, the rule, what happens because of the fault, and the cure: a diff, or a sentence if no
line can be proposed.

- **Severity.** An *error* hangs, crashes or trains something else than is meant. A *warning* gives wrong figures or
  files, or opens a port. A *note* costs time, or makes the result depend on the number of ranks.
- **Exit code.** 0 if nothing is found, 4 if something is, 2 if a file cannot be read: the message names the line of a
  syntax error. In a folder, files that cannot be read are left out and named. `--fail-on error` exits with 0 if there
  are only warnings and notes, `--fail-on never` whatever is found.
- **`--fix`** makes the changes that do not depend on what the script is meant to do. Comments and formatting stay. The
  changed file is parsed before it replaces the old one. Each finding that is left is listed with the reason.
- **`# noqa: DURE601`** in a line of the statement silences a rule, several with commas, and a bare `# noqa` all.
- **`--json`** prints one object: `version`, `files`, `findings` and `unreadable`. Each finding has `file`, `line`,
  `column`, `rule`, `severity`, `what`, `fix`, `is_diff` and `is_safe`; after `--fix` also `is_fixed` and
  `not_fixed_because`.

Only what the source shows is reported. A data set that divides itself, a model whose class is in another package, and
what is done in a branch for one process are left alone. In a folder, a script has ranks if it names, directly or
through what it names, a function that opens a process group or wraps a model; other modules of the folder do not count.
"""


def markdown_page() -> str:
    """Return the page: how the command is used, an overview, and each rule with its examples."""
    overview = [
        f"| [{rule.id}](#{_anchor(rule)}) | {rule.severity} | {rule.title} | {'yes' if rule.is_fixed else ''} |"
        for rule in RULES
    ]
    head = ["## Rules", "", "| rule | severity | fault | `--fix` |", "|---|---|---|---|", *overview, ""]
    return "\n".join([INTRODUCTION, *head, *(line for rule in RULES for line in _section(rule))]).rstrip("\n") + "\n"


def _anchor(rule: Rule) -> str:
    return rule.id.lower()


def _section(rule: Rule) -> list[str]:
    lines = [f"### {rule.id}", "", f"**{rule.title}.** {rule.why}", ""]
    if rule.is_fixed:
        lines += [f"`--fix` {rule.is_fixed}.", ""]
    return [
        *lines,
        "Bad:",
        "",
        "```python",
        rule.bad.rstrip("\n"),
        "```",
        "",
        "Good:",
        "",
        "```python",
        rule.good.rstrip("\n"),
        "```",
        "",
    ]
