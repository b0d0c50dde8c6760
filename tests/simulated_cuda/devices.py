"""Tests whose bodies run in a process with simulated devices, forked from one that has torch and dure imported."""

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Command, Prewarmed
from tests.simulated_cuda import build

ROOT = Path(__file__).parents[2]
ALLOWANCE_SECONDS = 100.0
BUILD_SECONDS = 600
"""Timeout of a test that may have to compile the simulation first."""


class SimulatedDevices:
    """Processes that see simulated devices."""

    def __init__(self, site: Path, device_type: str = "cuda") -> None:
        paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = ["SIMULATED_GPUS=2", f"SIMULATED_DEVICE_TYPE={device_type}"]
        self._prewarmed = Prewarmed("env", *settings, f"PYTHONPATH={os.pathsep.join(paths)}")

    def start(self, folder: Path, *argv: object, devices: int = 2, **environment: str) -> Command:
        """Start a `dure` command."""
        return self._prewarmed.start(folder, *argv, SIMULATED_GPUS=str(devices), **environment)

    def dure(self, folder: Path, *argv: object, devices: int = 2, **environment: str) -> Command:
        """Run a `dure` command to its end."""
        command = self.start(folder, *argv, devices=devices, **environment)
        command.wait(ALLOWANCE_SECONDS)
        return command

    def script(self, folder: Path, path: Path, *argv: object, devices: int = 1) -> Command:
        """Run a program to its end."""
        command = self._prewarmed.start(folder, *argv, script=path, SIMULATED_GPUS=str(devices))
        command.wait(ALLOWANCE_SECONDS)
        return command

    def call(
        self,
        function: Callable[..., object],
        folder: Path,
        devices: int = 2,
        environment: Mapping[str, str] | None = None,
        **arguments: object,
    ) -> None:
        """Call a function of a test module with a folder in a process of its own, and fail with what it said."""
        argv = (function.__module__, function.__name__, folder, json.dumps(arguments))
        given = {"SIMULATED_GPUS": str(devices), **(environment or {})}
        command = self._prewarmed.start(folder, *argv, script=Path(__file__), **given)
        command.wait(ALLOWANCE_SECONDS)
        if command.code:
            pytest.fail(f"exit code {command.code}\n{command.out}{command.err}", pytrace=False)

    def close(self) -> None:
        """End the process that is forked from."""
        self._prewarmed.close()


@pytest.fixture(scope="session")
def simulated_devices(request: pytest.FixtureRequest) -> Iterator[SimulatedDevices]:
    """Build the simulation, once for all workers, and start the process to fork from."""
    devices = SimulatedDevices(_site(request))
    yield devices
    devices.close()


@pytest.fixture(scope="session")
def devices_from_outside(request: pytest.FixtureRequest) -> Iterator[SimulatedDevices]:
    """Start a process to fork from whose devices are of a kind that torch does not know by itself: `fieldgpu`."""
    devices = SimulatedDevices(_site(request), "privateuse1")
    yield devices
    devices.close()


def _site(request: pytest.FixtureRequest) -> Path:
    if reason := build.reason_not_built():
        pytest.skip(reason)
    return build.site_folder(request.config.cache.mkdir("simulated_cuda"))


def on_devices(count: int = 2, **environment: str) -> Callable[[Callable[[Path], object]], Callable[..., None]]:
    """Return a decorator of a test: it is called with a folder, in a process with so many devices."""

    def decorate(function: Callable[[Path], object]) -> Callable[..., None]:
        @pytest.mark.timeout(BUILD_SECONDS)
        def test(simulated_devices: SimulatedDevices, tmp_path: Path) -> None:
            simulated_devices.call(function, tmp_path, count, environment)

        # not functools.wraps: pytest would look for fixtures in the arguments of what is wrapped
        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.body = function  # type: ignore[attr-defined]
        return test

    return decorate


def _main() -> None:
    module, name, folder, arguments = sys.argv[1:]
    found: Any = getattr(importlib.import_module(module), name)
    getattr(found, "body", found)(Path(folder), **json.loads(arguments))


if __name__ == "__main__":
    _main()
