"""Fixtures of the simulated devices."""

from tests.simulated_cuda.devices import devices_from_outside, simulated_devices

__all__ = ["devices_from_outside", "simulated_devices"]
