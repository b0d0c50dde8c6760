"""Records that nodes send each other during a preflight, checked as they come."""

from dure.checked import Record, record_from_json
from dure.documents import DocumentInvalid
from dure.errors import Misuse


def record_of_node(kind: type[Record], told: object, rank: int) -> Record:
    """Return what a node has told all as a record.

    Raises:
        Misuse: It is none.
    """
    try:
        return record_from_json(kind, told)
    except DocumentInvalid as error:
        raise Misuse(
            f"node {rank} speaks another protocol (its {kind.__name__} {error}): install the same version of dure on "
            "all nodes"
        ) from None
