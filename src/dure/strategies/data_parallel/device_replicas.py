"""Base of the strategies that keep replicas of a model on the devices of one process."""

from torch import nn

from dure.strategies.contract.step_facts import StepFacts
from dure.strategies.contract.strategy import Strategy
from dure.strategies.contract.weight_rules import WeightRules
from dure.strategies.device_threads import DeviceThreads
from dure.strategies.state.module_replicas import replicate
from dure.strategies.state.objects.namespaces import ATOMS
from dure.strategies.state.objects.object_state import is_inside, plain_attributes
from dure.terminal import few


class DeviceReplicas(Strategy):
    """Strategy with one thread per device, and the model on the first device."""

    rules = WeightRules(changes_in_step_only=True, freezing="followed")

    def check_traits(self, model: nn.Module) -> list[str]:
        """Refuse also state that replicas cannot share: state of several modules, or kept elsewhere by forward."""
        faults = super().check_traits(model)
        if (outside := self.traits.forward_state) and len(self.devices) > 1:
            faults.append(
                f"the model's forward, or a hook on it, changes {few(outside)}, where the replicas on several devices "
                "would leave only the last one's: return it from forward, or use ddp"
            )
        state = (*self.traits.learned_state, *self.traits.counted_state)
        shared = [path for path in _shared_by_modules(model) if any(is_inside(path, other) for other in state)]
        if shared:
            faults.append(
                f"{shared[0].removeprefix('model.')} is changed in forward and shared by several modules, which "
                "replicas on several devices cannot share: keep it in a buffer, or use ddp"
            )
        return faults

    def distribute(self) -> None:
        """Start the threads."""
        super().distribute()
        in_order = self.spec.deterministic and self.device.type == "cpu"
        self._threads = DeviceThreads(self.devices, in_order=in_order)

    def sync_gradients(self) -> StepFacts:
        """Sum the terms; there is no other rank."""
        return self.sums.step_facts()

    def bytes_between_devices(self) -> int:
        """Return the bytes of parameters and buffers sent by device 0 and of gradients sent back, once."""
        state = [*self.model.parameters(), *self.model.buffers()]
        out = sum(t.numel() * t.element_size() for t in state)
        back = sum(p.numel() * p.element_size() for p in self.trainable)
        return (len(self.devices) - 1) * (out + back)

    def evaluation_models(self) -> list[nn.Module]:
        """Return the model, and a replica of it on each other device."""
        others = replicate(self.model, self.devices[1:], linked=False)
        return [self.model, *(replica.model for replica in others)]

    def close(self) -> None:
        """Stop the threads."""
        self._threads.close()


def _shared_by_modules(model: nn.Module) -> list[str]:
    """Return the first paths of plain containers and objects that are attributes of several modules."""
    found: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, value in plain_attributes(module).items():
            if not isinstance(value, (*ATOMS, nn.Module)):
                found.setdefault(id(value), []).append(".".join(filter(None, ("model", prefix, name))))
    return [paths[0] for paths in found.values() if len(paths) > 1]
