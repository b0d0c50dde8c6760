"""Import of a module of this package by another library's name, for scripts that were written for the library."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader that gives `library.x` the module `own.x`."""

    def __init__(
        self,
        library: str,
        own: str,
        *,
        renamed: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        spawned: Path | None = None,
    ) -> None:
        """Name both packages.

        Args:
            library: Name that scripts import.
            own: Name of the package that they get.
            renamed: Full names of the library's modules that have another place here, with that place.
            refused: Parts of the library that are not here, by their first name after the library's, with what to use.
            spawned: Folder with a module of the library's name that installs this alias: processes that this one
                spawns, such as loader workers, inherit `sys.path`, but no finder.
        """
        self.library = library
        self._own = own
        self._renamed = renamed or {}
        self._refused = refused or {}
        self._spawned = spawned

    def install(self) -> None:
        """Let this process import by the library's name, even if the library is installed."""
        if not any(isinstance(finder, Alias) and finder.library == self.library for finder in sys.meta_path):
            sys.meta_path.insert(0, self)
        if self._spawned is not None and str(self._spawned) not in sys.path:
            sys.path.insert(min(1, len(sys.path)), str(self._spawned))  # after the script's folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module of the library's name, or None for any other.

        Raises:
            ModuleNotFoundError: The library has this part, and this package has not.
        """
        if fullname != self.library and not fullname.startswith(f"{self.library}."):
            return None
        part = fullname.removeprefix(self.library).removeprefix(".").partition(".")[0]
        if part in self._refused:
            raise ModuleNotFoundError(
                f"{fullname} is not part of dure's {self.library.capitalize()}: {self._refused[part]}", name=fullname
            )
        try:
            found = importlib.util.find_spec(self._own_name(fullname))
        except ModuleNotFoundError:
            found = None
        if found is None:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=found.origin, is_package=bool(found.submodule_search_locations)
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return this package's module itself, so that its classes are the same by either name."""
        module = importlib.import_module(self._own_name(spec.name))
        spec.loader_state = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own attributes, which the import system has replaced."""
        state: Any = module.__spec__.loader_state if module.__spec__ else None
        if state is not None:
            module.__spec__, module.__loader__ = state
        for name, own in self._renamed.items():
            # present before it is imported: an import would put the module in place of an equally named class
            parent, _, child = name.rpartition(".")
            if parent.replace(self.library, self._own, 1) == module.__name__ and hasattr(module, child):
                sys.modules.setdefault(name, importlib.import_module(own))

    def _own_name(self, name: str) -> str:
        return self._renamed.get(name, self._own + name.removeprefix(self.library))
