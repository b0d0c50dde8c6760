"""Communication between ranks. Importing this package registers the backend `dure_shm` with torch.distributed."""

from dure.comm.dure_shm.registration import register_backend

register_backend()
