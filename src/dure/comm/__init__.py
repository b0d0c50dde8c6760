"""Communication between ranks. Importing it makes the backend `dure_shm` known to torch.distributed."""

from dure.comm.dure_shm.registration import register_backend

register_backend()
