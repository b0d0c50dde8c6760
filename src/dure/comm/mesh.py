"""Mesh of ranks with several axes, and the process group of each line along an axis."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dure.comm.groups import Group, ProcessGroup, Solo
from dure.errors import SpecInvalid
from dure.host.backends import backend_cure, sends_between_devices


class Mesh:
    """Hybrid layout: ranks count through the axes in row-major order, the last axis fastest.

    Neighbours on the last axis have consecutive ranks, so that they are mostly on one host. The axis that communicates
    most belongs there (Narayanan et al. 2021, section 3.2).
    """

    def __init__(
        self, axes: Mapping[str, int], group: Group, device: torch.device, *, divides_tensors: bool = False
    ) -> None:
        """Create the groups of all axes; every rank of `group` calls this, in the same order as for other groups.

        Args:
            axes: Size of each axis, outermost first; their product is the number of ranks.
            group: All ranks.
            device: Device of this rank.
            divides_tensors: Whether the ranks will gather and scatter parts of tensors on their devices.

        Raises:
            SpecInvalid: The backend does not support that.
        """
        if divides_tensors and isinstance(group, ProcessGroup):
            _check_backend(device, group)
        self.axes = dict(axes)
        self._everyone = group
        self._device = device
        self.device_mesh: DeviceMesh | None = None
        if isinstance(group, ProcessGroup):
            # Own groups: by itself DeviceMesh would create them with torch's default timeout, and with CUDA it creates
            # another group of all ranks if theirs is gloo.
            grid = torch.arange(group.world_size).view(tuple(axes.values()))
            lines = [self._line_groups(axis, group) for axis in axes]
            self.device_mesh = DeviceMesh.from_group(
                lines if len(lines) > 1 else lines[0],
                device.type,
                grid if len(lines) > 1 else None,
                mesh_dim_names=tuple(axes),
            )
        self._groups: dict[str, Group] = {}

    def _line_groups(self, axis: str, group: ProcessGroup) -> dist.ProcessGroup:
        """Create the groups of all lines along an axis, in the same order on every rank, and return this rank's."""
        if self.size(axis) == group.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        own: dist.ProcessGroup | None = None
        for line in sorted({tuple(self._line_of(axis, rank)) for rank in range(group.world_size)}):
            made = group.subgroup(list(line))
            if group.rank in line:
                own = made
        assert own is not None, "every rank is on one line along every axis"
        return own

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.axes[axis]

    def coordinate(self, axis: str) -> int:
        """Return this rank's coordinate along an axis, from 0."""
        return coordinate_of(self.axes, axis, self._everyone.rank)

    def ranks(self, axis: str) -> list[int]:
        """Return the global ranks of this rank's line along an axis, by coordinate."""
        return self._line_of(axis, self._everyone.rank)

    def _line_of(self, axis: str, rank: int) -> list[int]:
        stride, size = _stride(self.axes, axis), self.axes[axis]
        first = rank - rank // stride % size * stride
        return [first + position * stride for position in range(size)]

    def process_group(self, axis: str) -> dist.ProcessGroup:
        """Return the torch group of this rank's line along an axis."""
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    def group(self, axis: str) -> Group:
        """Return the group of this rank's line along an axis; `Solo` for a line of one rank."""
        if axis not in self._groups:
            alone = self.size(axis) == 1
            self._groups[axis] = Solo() if alone else ProcessGroup(self._device, self.process_group(axis))
        return self._groups[axis]


def coordinate_of(axes: Mapping[str, int], axis: str, rank: int) -> int:
    """Return a rank's coordinate along an axis of a mesh, from 0.

    Args:
        axes: Size of each axis, outermost first.
        axis: One of them.
        rank: Global rank.
    """
    return rank // _stride(axes, axis) % axes[axis]


def _stride(axes: Mapping[str, int], axis: str) -> int:
    names = list(axes)
    return math.prod(axes[name] for name in names[names.index(axis) + 1 :])


def _check_backend(device: torch.device, group: ProcessGroup) -> None:
    if group.world_size > 1 and device.type != "cpu" and not sends_between_devices(group.backend, device.type):
        raise SpecInvalid(
            [
                f"the ranks gather and scatter parts of tensors on {device.type} devices, but they talk over "
                f"{group.backend}, which does not: give every rank a device of its own ({backend_cure(device.type)}), "
                "or use --device cpu, or --strategy ddp"
            ]
        )
