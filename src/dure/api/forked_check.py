"""Check of a task in a forked process, so that this one can still be forked into ranks that use CUDA."""

import multiprocessing
from collections.abc import Callable

from dure.errors import DureError


def found_in_fork(find_faults: Callable[[], list[str]]) -> list[str]:
    """Return the faults found in a forked process; none if it fails, because each rank checks again.

    A step of torch's optimisers asks whether there is CUDA, and a process that has asked cannot be forked into ranks
    that use it.

    Raises:
        DureError: The function raised it.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        try:
            sender.send(find_faults())
        except DureError as error:
            sender.send(error)
        except Exception:
            sender.send([])

    process = context.Process(target=answer)
    process.start()
    sender.close()
    try:
        answered: list[str] | DureError = receiver.recv()
    except EOFError:
        return []
    finally:
        process.join()
        receiver.close()
    if isinstance(answered, DureError):
        raise answered
    return answered
