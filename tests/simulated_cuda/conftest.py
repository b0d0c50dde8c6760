"""Fixture of the simulated devices."""

from tests.simulated_cuda.devices import simulated_devices

__all__ = ["simulated_devices"]
