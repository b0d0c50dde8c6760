"""Ranks laid out in several axes, and the group of each line along an axis."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dure.comm.groups import Group, ProcessGroup, Solo


class Mesh:
    """A hybrid layout: rank `r` stands where counting through the axes, the last one fastest, arrives at `r`.

    Neighbours on the last axis are neighbours in rank, so on one host as far as it goes: the axis that talks most
    belongs there (Narayanan et al. 2021, section 3.2).
    """

    def __init__(self, axes: Mapping[str, int], group: Group, device: torch.device) -> None:
        """Make the groups of all axes; every rank of `group` calls it, in the same order with other groups.

        Args:
            axes: Size of each axis, outermost first; their product is the number of ranks.
            group: All ranks.
            device: This rank's.
        """
        self.axes = dict(axes)
        self._everyone = group
        self._device = device
        self.device_mesh: DeviceMesh | None = None
        if isinstance(group, ProcessGroup):
            self.device_mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self._groups: dict[str, Group] = {}

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.axes[axis]

    def coordinate(self, axis: str) -> int:
        """Return where along an axis this rank stands, from 0."""
        stride = 1
        for name, size in reversed(self.axes.items()):
            if name == axis:
                return self._everyone.rank // stride % size
            stride *= size
        raise KeyError(axis)

    def ranks(self, axis: str) -> list[int]:
        """Return the global ranks of this rank's line along an axis, by coordinate."""
        stride = 1
        for name, size in reversed(self.axes.items()):
            if name == axis:
                first = self._everyone.rank - self.coordinate(axis) * stride
                return [first + position * stride for position in range(size)]
            stride *= size
        raise KeyError(axis)

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return torch's group of this rank's line along an axis."""
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    def group(self, axis: str) -> Group:
        """Return the group of this rank's line along an axis; one rank alone talks to nobody."""
        if axis not in self._groups:
            alone = self.size(axis) == 1
            self._groups[axis] = Solo() if alone else ProcessGroup(self._device, self.process_group(axis))
        return self._groups[axis]
