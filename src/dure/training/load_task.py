"""From `file.py:Class` to a task, and back."""

import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from dure.errors import TaskInvalid
from dure.frames import traceback_in_user_code
from dure.spec import unknown_name
from dure.training.task import Task

_registered: dict[str, type[Task]] = {}


def load_task_class(reference: str) -> type[Task]:
    """Import the task class that `file.py:Class` or `package.module:Class` names.

    A file is run once per process, with its folder importable, as Python does for a script.

    Raises:
        TaskInvalid: No such file or class, an import that fails (with the user's own traceback), a missing method.
    """
    if reference in _registered:
        return _registered[reference]
    where, _, class_name = reference.rpartition(":")
    if not where or not class_name.isidentifier():
        raise TaskInvalid(f"'{reference}' names no task: write file.py:Class or package.module:Class")
    try:
        with _cuda_left_untouched():
            module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except TaskInvalid:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            raise TaskInvalid(
                f"there is no module {error.name} to import {class_name} from: write file.py:{class_name}, or start "
                "where the package can be imported"
            ) from None
        raise TaskInvalid(f"{where} does not import{_cure(error, where)}:\n{traceback_in_user_code(error)}") from error
    found = getattr(module, class_name, None)
    if found is None:
        tasks = [
            name for name, value in vars(module).items() if _is_task(value) and value.__module__ == module.__name__
        ]
        known = f"it has {', '.join(tasks)}" if tasks else "it has no class derived from dure.Task"
        raise TaskInvalid(f"{where} has no class {class_name}: {known}")
    if not _is_task(found):
        raise TaskInvalid(f"{class_name} in {where} is not a task: derive it from dure.Task")
    check_task_class(found)
    return found  # type: ignore[no-any-return]


def check_task_class(cls: type[Task]) -> None:
    """Refuse a class that lacks a needed method, or has one that cannot be called as dure calls it.

    Raises:
        TaskInvalid: Names every such method with its signature.
    """
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise TaskInvalid(
            f"{cls.__name__} lacks {', '.join(map(_signature, missing))}: add what is missing to the class"
        )
    wrong = [name for name in _METHODS if not _takes_what_is_given(cls, name)]
    if wrong:
        seen = ", ".join(f"{name}{inspect.signature(getattr(cls, name))}" for name in wrong)
        wanted = ", ".join(map(_signature, wrong))
        raise TaskInvalid(f"{cls.__name__} has {seen}, but dure calls {wanted}: give it these parameters")
    if not isinstance(cls.defaults, Mapping):
        raise TaskInvalid(
            f"{cls.__name__}.defaults is {cls.defaults!r:.60}: make it a dict of settings, such as {{'epochs': 10}}"
        )


_METHODS = tuple(name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_"))


def _signature(method: str) -> str:
    return f"{method}({', '.join(inspect.signature(getattr(Task, method)).parameters)})"


def _takes_what_is_given(cls: type[Task], method: str) -> bool:
    given = len(inspect.signature(getattr(Task, method)).parameters)
    own = inspect.getattr_static(cls, method)
    if isinstance(own, staticmethod):
        given -= 1
    try:
        inspect.signature(getattr(cls, method)).bind(*range(given - isinstance(own, classmethod)))
    except TypeError:
        return False
    except ValueError:  # no signature to be had
        return True
    return True


def task_reference(cls: type[Task]) -> str:
    """Return the `file.py:Class` by which another process finds this class.

    Raises:
        TaskInvalid: The class was defined where no file can be read again, such as a notebook or a function.
    """
    file = (
        inspect.getsourcefile(cls)
        if cls.__module__ != "__main__"
        else getattr(sys.modules["__main__"], "__file__", None)
    )
    if "." in cls.__qualname__ or file is None or not Path(file).exists():
        raise TaskInvalid(
            f"{cls.__qualname__} is not at the top level of a file, so another process cannot import it: move it "
            "there, or pass start='inline' (one process) or start='fork'"
        )
    return f"{Path(file).resolve()}:{cls.__name__}"


def register_task_class(cls: type[Task], reference: str | None = None) -> str:
    """Make this process and its forks find a class without importing it, and return its reference.

    Without a reference it gets one that no other process can use: it is for classes that no file gives back.
    """
    reference = reference or f"{cls.__module__}:{cls.__qualname__}"
    _registered[reference] = cls
    return reference


def task_option_fields(cls: type[Task]) -> list[dataclasses.Field[Any]]:
    """Return the task's own options: its annotated fields."""
    return [field for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]


def build_task(cls: type[Task], options: Mapping[str, Any]) -> Task:
    """Make the task, with its options converted to their declared types.

    Raises:
        TaskInvalid: An unknown option, a missing one, or a value of the wrong type; all of them at once.
    """
    hints = get_type_hints(cls)
    fields = {field.name: field for field in task_option_fields(cls)}
    faults = [unknown_name("task option", name, fields) for name in options if name not in fields]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in options:
            try:
                values[name] = TypeAdapter(hints[name]).validate_python(options[name])
            except ValidationError as error:
                told = error.errors()[0]["msg"].partition(",")[0].removeprefix("Input ")
                faults.append(f"task option {name} is {options[name]!r} but {told}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            faults.append(f"task option {name} has no value: give --task.{name.replace('_', '-')}")
    if faults:
        raise TaskInvalid("; ".join(faults))
    try:
        return cls(**values)
    except Exception as error:
        raise TaskInvalid(f"{cls.__name__} cannot be made:\n{traceback_in_user_code(error)}") from error


def plain_options(task: Task) -> dict[str, Any]:
    """Return a task's options as JSON values, those left out from which the option could not be made again."""
    hints = get_type_hints(type(task))
    plain = {}
    for field in task_option_fields(type(task)):
        value = json.loads(json.dumps(getattr(task, field.name), default=str), parse_constant=str)
        try:
            TypeAdapter(hints[field.name]).validate_python(value)
        except (ValidationError, PydanticSchemaGenerationError):
            continue
        plain[field.name] = value
    return plain


def _cure(error: BaseException, where: str) -> str:
    """Say what to do about what many meet."""
    if isinstance(error, SystemExit):
        return (
            " (it ends while it is imported, as a script does: put that under `if __name__ == '__main__':`, or start "
            f"the script itself with `dure run {where}`)"
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
def _cuda_left_untouched() -> Iterator[None]:
    """Let a task file ask `torch.cuda.is_available()` while it is imported without starting CUDA in this process.

    The process that imports the task forks the ranks, and CUDA, once started, does not survive a fork.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:
        # `python -m` puts the current folder there, an installed command does not
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _is_same_file(one: object, other: Path) -> bool:
    # by what they are: thousands of modules are asked, and to resolve their paths takes eight times as long
    try:
        return isinstance(one, str) and os.path.samefile(one, other)
    except OSError:
        return False


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise TaskInvalid(f"{path} does not exist: give the path of the file that defines the task")
    for module in list(sys.modules.values()):
        # the file may be imported already: under its package name by tests, or as the running script
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
