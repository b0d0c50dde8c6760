"""Common part of the strategies that keep replicas of a model on the devices of one process."""

from torch import nn

from dure.strategies.module_replicas import replicate
from dure.strategies.replicas import DeviceThreads
from dure.strategies.single import LocalSums


class DeviceReplicas(LocalSums):
    """A thread for each device, and the model on the first of them."""

    changes_in_step_only = True

    def distribute(self) -> None:
        """Start the threads."""
        super().distribute()
        in_order = self.options.deterministic and self.device.type == "cpu"
        self._threads = DeviceThreads(self.devices, in_order=in_order)

    def bytes_between_devices(self) -> int:
        """Return the bytes of parameters and buffers out from device 0 and of gradients back, once."""
        state = [*self.model.parameters(), *self.model.buffers()]
        out = sum(t.numel() * t.element_size() for t in state)
        back = sum(p.numel() * p.element_size() for p in self.trainable)
        return (len(self.devices) - 1) * (out + back)

    def evaluation_models(self) -> list[nn.Module]:
        """Return the model, and a replica of it on each other device."""
        others = replicate(self.model, self.devices[1:], linked=False)
        return [self.model, *(replica.model for replica in others)]

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
