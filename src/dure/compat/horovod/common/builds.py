"""Questions that scripts ask of `horovod.common.util`."""

from dure.compat.horovod.common import basics


def gloo_built(verbose: bool = False) -> bool:
    """Return whether torch has gloo."""
    return basics.gloo_built()


def mpi_built(verbose: bool = False) -> bool:
    """Return False: MPI is not used."""
    return basics.mpi_built()


def nccl_built(verbose: bool = False) -> int:
    """Return the number of NCCL's version in torch, or 0."""
    return basics.nccl_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether Horovod has a framework: PyTorch alone."""
    return ext_base_name == "torch"


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
