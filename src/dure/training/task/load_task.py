"""Import of a task's class from `file.py:Class` or `package.module:Class`."""

import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType

from dure.errors import EnvironmentLacks, TaskInvalid
from dure.failures.frames import traceback_in_user_code
from dure.host.device_kinds import runtimes_left_alone
from dure.terminal import shell_word
from dure.torchcompat.imports import library_for_another_torch
from dure.training.task.hooks import check_task_class
from dure.training.task.task import Task

_importing: ContextVar[str | None] = ContextVar("file or module of a task that is being imported", default=None)


def task_being_imported() -> str | None:
    """Return the file or module of the task that this thread is importing, or None."""
    return _importing.get()


def load_task_class(reference: str) -> type[Task]:
    """Import the task class that `file.py:Class` or `package.module:Class` names.

    A file is executed once per process, with its folder importable, as Python does for a script.

    Raises:
        TaskInvalid: File or class does not exist, the import fails (with the user's own traceback), or a method is
            missing.
    """
    where, _, class_name = reference.rpartition(":")
    if reference.endswith(".py") and os.path.isfile(reference):
        where, class_name = reference, ""
    elif not where or not class_name.isidentifier() or (where.startswith(".") and not where.endswith(".py")):
        raise TaskInvalid(f"'{reference}' names no task: write file.py:Class or package.module:Class")
    try:
        with runtimes_left_alone(), _marked_as_importing(where):
            module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except TaskInvalid:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            raise TaskInvalid(
                f"there is no module {error.name} to import {class_name} from: write file.py:{class_name}, or start "
                "where the package can be imported"
            ) from None
        if (misfit := library_for_another_torch(error)) is not None:
            raise EnvironmentLacks(misfit) from error
        shown = textwrap.indent(traceback_in_user_code(error), "  ")
        raise TaskInvalid(f"{where} does not import{_cure(error, where)}:\n{shown}") from error
    found = getattr(module, class_name, None) if class_name else None
    if found is None:
        tasks = [
            name for name, value in vars(module).items() if _is_task(value) and value.__module__ == module.__name__
        ]
        known = f"it has {', '.join(tasks)}" if tasks else "it has no class derived from dure.Task"
        if not class_name:
            example = tasks[0] if len(tasks) == 1 else "Class"
            raise TaskInvalid(f"{where} is a file, and a task is a class in it: {known}; write {where}:{example}")
        raise TaskInvalid(f"{where} has no class {class_name}: {known}")
    if not _is_task(found):
        raise TaskInvalid(f"{class_name} in {where} is not a task: derive it from dure.Task")
    check_task_class(found)
    return found  # type: ignore[no-any-return]


def _cure(error: BaseException, where: str) -> str:
    """Return advice for some common errors, or an empty string."""
    if isinstance(error, SystemExit):
        return (
            " (it ends while it is imported, as a script does: put that under `if __name__ == '__main__':`, or start "
            f"the script itself with `dure run {shell_word(where)}`)"
        )
    if isinstance(error, ValueError) and "mutable default" in str(error):
        return " (write `name: kind = dataclasses.field(default_factory=...)` for such an option)"
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        module = where.removesuffix(".py").strip("./").replace("/", ".")
        return f" (a file inside a package: write {module}:Class, from the folder that holds the package)"
    return ""


def _is_task(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, Task) and value is not Task


@contextmanager
def _marked_as_importing(where: str) -> Iterator[None]:
    token = _importing.set(where)
    try:
        yield
    finally:
        _importing.reset(token)


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        # `python -m` adds the current folder, an installed command does not
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _is_same_file(one: object, other: Path) -> bool:
    # by file identity: there are thousands of modules, and resolving their paths takes eight times as long
    try:
        return isinstance(one, str) and os.path.samefile(one, other)
    except OSError:
        return False


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise TaskInvalid(f"{path} does not exist: give the path of the file that defines the task")
    for module in list(sys.modules.values()):
        # the file may already be imported, under its package name by tests, or as the running script
        if _is_same_file(getattr(module, "__file__", None), path):
            return module
    name = f"dure_task_{path.stem}"
    if name in sys.modules:
        name = f"{name}_{abs(hash(path))}"
    location = importlib.util.spec_from_file_location(name, path)
    if location is None or location.loader is None:
        raise TaskInvalid(f"{path} is no Python file: give the file that defines the task")
    module = importlib.util.module_from_spec(location)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        location.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
