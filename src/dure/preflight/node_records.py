"""Records that nodes send each other during a preflight, verified on arrival."""

from dure.checked import Record, record_from_json
from dure.documents import DocumentInvalid
from dure.errors import Misuse


def record_of_node(kind: type[Record], value: object, rank: int) -> Record:
    """Return the value that a node has sent to all as a record.

    Raises:
        Misuse: It is not one.
    """
    try:
        return record_from_json(kind, value)
    except DocumentInvalid as error:
        raise Misuse(
            f"node {rank} speaks another protocol (its {kind.__name__} {error}): install the same version of dure on "
            "all nodes"
        ) from None
