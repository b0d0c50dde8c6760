"""Check of a task in a forked process, so that this one can still be forked into ranks that use CUDA."""

import multiprocessing
import os
from collections.abc import Callable

from dure.errors import TaskInvalid


def found_in_fork(find_faults: Callable[[], list[str]]) -> list[str]:
    """Return the faults found in a forked process without CUDA devices; none if it dies.

    A step of torch's optimisers asks whether there is CUDA, and a process that has asked cannot be forked into ranks
    that use it.

    Raises:
        TaskInvalid: The function raised it.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def answer() -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        try:
            sender.send(find_faults())
        except TaskInvalid as error:
            sender.send(str(error))

    process = context.Process(target=answer)
    process.start()
    sender.close()
    try:
        answered: list[str] | str = receiver.recv()
    except EOFError:
        return []
    finally:
        process.join()
        receiver.close()
    if isinstance(answered, str):
        raise TaskInvalid(answered)
    return answered
