"""Options of a task on the command line: `--task.hidden 64`."""

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_origin

from cyclopts import Group, Parameter

from dure.errors import Misuse

if TYPE_CHECKING:
    from dure.training.task.options import TaskOption
    from dure.training.task.task import Task

_REFERENCE = re.compile(r"[^-].*:[A-Za-z_]\w*")
_PREFIX, _NEGATIVE_PREFIX = "--task.", "--no-task."
_SHOWN_AS_THEY_ARE = (int, float, str)


def is_reference(token: str) -> bool:
    """Return whether a token looks like `file.py:Class`."""
    return _REFERENCE.fullmatch(token) is not None


def take_task_options(tokens: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--task.<name> value`, `--task.<name>=value`, `--task.<name>` and `--no-task.<name>` out of the tokens.

    Returns:
        The other tokens, and the options as text, because only the task knows their types.

    Raises:
        Misuse: An option is given twice or has no name.
    """
    rest: list[str] = []
    options: dict[str, str] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting.pop(0)
        if not token.startswith((_PREFIX, _NEGATIVE_PREFIX)):
            rest.append(token)
            continue
        flag, has_value, value = token.partition("=")
        if flag.startswith(_NEGATIVE_PREFIX):
            value = "false"
        elif not has_value:
            value = waiting.pop(0) if waiting and _is_value(waiting[0]) else "true"
        name = flag.partition(".")[2].replace("-", "_")
        if not name.isidentifier():
            raise Misuse(f"{token} names no task option: write --task.NAME VALUE")
        if name in options:
            raise Misuse(f"--task.{name} is given twice: give it once")
        options[name] = value
    _give_back_reference(rest, options)
    return rest, options


def _is_value(token: str) -> bool:
    return not token.startswith("-") or token[1:2].isdigit() or token[1:2] == "."


def _give_back_reference(rest: list[str], options: dict[str, str]) -> None:
    """Restore the task in `--task.pretrained train.py:Task`, read as an option's value, if no other task is named."""
    taken = [name for name, value in options.items() if is_reference(value)]
    has_other = any(is_reference(token) for token in rest) or any(token.startswith("--resume") for token in rest)
    if len(taken) == 1 and not has_other:
        rest.insert(1, options[taken[0]])
        options[taken[0]] = "true"


def task_parameters(cls: "type[Task]") -> list[inspect.Parameter]:
    """Return one parameter per option of a task, for its `--help`."""
    from dure.training.task.options import task_options

    group = Group.create_ordered(f"Options of {cls.__name__}")
    words = _field_docs(cls)
    return [_parameter(option, words.get(name, ""), group) for name, option in task_options(cls).items()]


def _parameter(option: "TaskOption", words: str, group: Group) -> inspect.Parameter:
    hint, default = option.kind, option.shown_default()
    text = str(default).lower() if isinstance(default, bool) else str(default)
    text = "none; has to be given" if option.is_required else text
    if hint is bool:
        hint = Literal["true", "false"]
    elif hint not in _SHOWN_AS_THEY_ARE and get_origin(hint) is not Literal:
        words = f"{words} [type: {str(hint).replace('typing.', '')}]".strip()
        hint = str
    parameter = Parameter(
        name=f"{_PREFIX}{option.name.replace('_', '-')}", help=words, group=group, show_default=lambda _: text
    )
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(f"task_{option.name}", kind, default=None, annotation=Annotated[hint | None, parameter])


def _field_docs(cls: type) -> dict[str, str]:
    """Return the string under each field in the class's source, if the source is available."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                text = below.value if isinstance(below, ast.Expr) else None
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    docs[field.target.id] = " ".join(text.value.split())
    return docs
