"""Hand-over to TensorBoard: files of scalars in the run folder."""

from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dure.own_files import make_folder, restrict_files
from dure.tracking.tracker import Point, Subject


class _TensorBoard:
    """Writer of scalars."""

    def begin(self, subject: Subject, identity: str | None) -> str | None:
        folder = subject.folder / "tensorboard"
        make_folder(folder, exist_ok=True)
        # the package's own writer and not torch's, which imports torch
        self._writer = EventFileWriter(str(folder))
        restrict_files(folder)  # the package creates its files with the umask alone
        return None

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            scalars = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            self._writer.add_event(Event(wall_time=point.time, step=point.step, summary=Summary(value=scalars)))
        self._writer.flush()

    def end(self, status: str) -> None:
        self._writer.close()


def make() -> _TensorBoard:
    """Return a writer."""
    return _TensorBoard()
