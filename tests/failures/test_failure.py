"""Report of a failed rank: whose error it is, and at which line."""

import errno
import json
import runpy
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate

from dure.errors import DiskFull, LossNotFinite, PeerLost
from dure.failures import tellable
from dure.failures.record import CodeLine, FailureRecord, failure_from_json, failure_to_json
from dure.failures.report import describe_failure, for_script, is_peer_lost, told
from dure.launch.worker import worker_process
from dure.torchcompat.gradients import run_backward
from dure.training.session.evaluation import evaluate
from dure.training.session.loader import FetchRequest, Loader, SampleFetch
from dure.training.session.sample_order import SampleOrder
from tests.faulty_task import fail
from tests.strategies.contract.test_base import prepared
from tests.training.session.test_session import Small


def caught(action) -> FailureRecord:
    try:
        action()
    except BaseException as error:
        return describe_failure(error, 1, 5)
    raise AssertionError("nothing was raised")


def _raise(error: BaseException) -> None:
    raise error


def test_failure_when_the_task_raises_then_its_line_is_named():
    failure = caught(lambda: fail("raise"))
    assert failure.origin == "task"
    assert failure.user_line.text == 'raise ValueError("a planned failure")'
    assert (failure.rank, failure.step, failure.exit_code) == (1, 5, 1)


def test_failure_when_its_message_is_huge_then_the_supervisor_can_read_it():
    failure = caught(lambda: _raise(RuntimeError("first" + 5_000_000 * "x" + "last")))
    said = failure_to_json(failure)
    assert len(json.dumps(said)) < worker_process.REPORT_LIMIT_BYTES
    assert failure_from_json(said) == failure
    assert failure.message.startswith("firstx")
    assert failure.message.endswith("xlast")
    assert "… 4,934,473 characters are left out …" in failure.message


def test_failure_when_its_texts_grow_by_escapes_then_the_supervisor_can_read_it():
    written = SyntaxError("\x1b\U0001f600" * 10**6, ("f.py", 1, 1, "\x1b" * 10**6))
    assert len(json.dumps(failure_to_json(caught(lambda: _raise(written))))) < worker_process.REPORT_LIMIT_BYTES


class Unhelpful(RuntimeError):
    """Error whose own code does not return, or fails, when it is asked."""

    def __init__(self, asked) -> None:
        self.asked = asked

    def __str__(self) -> str:
        return self.asked()


@pytest.mark.parametrize("asked", [lambda: time.sleep(60), lambda: sys.exit("gone")], ids=["sleeps", "leaves"])
def test_failure_when_code_of_its_class_does_not_return_then_its_type_and_line_are_told(asked, monkeypatch):
    monkeypatch.setattr(tellable, "MOST_SECONDS", 0.2)
    failure = caught(lambda: _raise(told(Unhelpful(asked))))
    assert (failure.type, failure.user_line.text) == ("Unhelpful", "raise error")
    assert failure.message.startswith(("its message cannot be told, because", "<exception str() failed>"))


def test_told_when_an_exception_can_be_told_then_it_is_the_same():
    error = ValueError("a message")
    assert told(error) is error


def test_failure_when_only_a_library_failed_then_its_notes_are_told():
    requests = iter([FetchRequest(0, np.array([0, 1]))])
    loader = Loader(SampleFetch([torch.zeros(2), torch.zeros(3)], default_collate, 0), torch.device("cpu"), 0)
    with pytest.raises(RuntimeError, match="equal size") as info:
        list(loader.batches(requests))
    info.value.__traceback__ = info.value.__traceback__.tb_next
    failure = describe_failure(info.value, 0, None)
    assert failure.user_line is None
    first, note = failure.message.splitlines()
    assert first.startswith("stack expects each tensor to be equal size")
    assert note == "while collating samples 0, 1 of the data"


def test_failure_when_an_error_of_a_loader_process_has_a_cause_then_its_message_is_told_alone():
    try:
        raise ValueError("no such sample") from KeyError(0)
    except ValueError as error:
        error.add_note("while fetching sample 0 of the data")
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    failure = caught(wrapped.reraise)
    assert failure.message.splitlines() == [
        "no such sample (in loader process 0)",
        "while fetching sample 0 of the data",
    ]


@pytest.mark.parametrize("text", ["x = (\n", "def f():\nreturn\n", "print 'x'\n"])
def test_failure_when_a_file_is_no_python_then_its_own_line_is_named(text, tmp_path):
    file = tmp_path / "syn.py"
    file.write_text(text)
    failure = caught(lambda: runpy.run_path(str(file)))
    number = 2 if text.startswith("def") else 1
    line = text.splitlines()[number - 1]
    assert failure.user_line == CodeLine(file=str(file), line=number, function="<module>", text=line)
    assert failure.origin == "task"


def test_failure_when_a_text_in_memory_is_no_python_then_the_line_that_reads_it_is_named():
    assert caught(lambda: compile("x = (", "<string>", "exec")).user_line.file == __file__


def test_failure_when_the_task_leaves_then_the_cure_is_named():
    failure = caught(lambda: fail("sys_exit"))
    assert "sys.exit(7)" in failure.message
    assert failure.user_traceback is None


def test_failure_when_memory_ends_then_the_cure_is_a_smaller_microbatch():
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full. Of the allocated memory 1 GiB is PyTorch's"
    )
    failure = caught(lambda: _raise(torch.OutOfMemoryError(message)))
    assert failure.message == "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 is full."
    assert failure.advice.startswith("use a smaller --microbatch-size (the result stays the same)")
    assert failure.microbatch_size is None
    assert for_script(failure).advice == "use smaller batches, less precision, or more devices"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("XPU out of memory."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=repr,
)
def test_failure_when_memory_ends_in_a_step_then_it_has_the_size_and_a_smaller_one_is_named(error):
    failure = describe_failure(error, 0, 3, 7)
    assert failure.microbatch_size == 7
    assert "use --microbatch-size 4 (the result stays the same)" in failure.advice
    assert failure.origin == "task"


def test_failure_when_memory_ends_with_one_sample_then_no_smaller_microbatch_is_advised():
    failure = describe_failure(MemoryError(), 0, 3, 1)
    assert failure.message == "out of memory"
    assert failure.advice.startswith("one sample at a time is too much for this device: use --precision bf16")


def test_failure_when_it_is_another_then_it_has_no_size():
    assert describe_failure(ValueError("wrong"), 0, 3, 7).microbatch_size is None


class Starved(Small):
    def loss(self, model, batch):
        raise MemoryError("no more")


def evaluated(task):
    loader = Loader(SampleFetch(task.train_data(), None, 0), torch.device("cpu"), 0)
    evaluate(task, prepared(task.loss), loader, num_samples=2, batch_size=2)


class Penalised(Small):
    def loss(self, model, batch):
        return torch.autograd.grad(model(batch[0].double()).sum(), list(model.parameters()))[0].square().sum()


def test_failure_when_an_evaluation_wants_gradients_then_it_says_how_to_have_them():
    with pytest.raises(RuntimeError, match="does not require grad") as info:
        evaluated(Penalised())
    assert (
        "let what needs them in the loss compute under torch.enable_grad()" in describe_failure(info.value, 0, 3).advice
    )


class CallsBackward(Small):
    def loss(self, model, batch):
        loss = model(batch[0].double()).sum()
        loss.backward()
        return loss


def test_failure_when_the_loss_calls_backward_then_it_says_who_does():
    with pytest.raises(RuntimeError, match="does not require grad") as info:
        evaluated(CallsBackward())
    assert describe_failure(info.value, 0, 3).advice.startswith("dure calls backward: let the loss")


def test_failure_when_a_graph_was_used_before_dures_backward_then_it_says_what_may_have_used_it():
    loss = torch.ones((), requires_grad=True).exp()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as info:
        run_backward(loss)
    assert describe_failure(info.value, 0, 3).advice.startswith("if the loss calls backward itself: dure calls")
    with pytest.raises(RuntimeError, match="second time") as info:
        loss.backward()  # as in a script
    assert describe_failure(info.value, 0, 3).advice is None


def test_failure_when_memory_ends_in_an_evaluation_then_its_own_batch_is_what_helps():
    with pytest.raises(MemoryError, match="no more") as info:
        evaluated(Starved())
    assert describe_failure(info.value, 0, 3).advice.startswith("use a smaller --eval-batch-size, --precision bf16")


def test_failure_when_dure_itself_is_wrong_then_it_is_not_the_tasks():
    try:
        SampleOrder(10, "a word", seed=0, shuffle=True, drop_last=False).batches(0, 10).__next__()
    except TypeError as error:
        error.__traceback__ = error.__traceback__.tb_next  # this test stands where dure's own worker does
        failure = describe_failure(error, 0, None)
    assert failure.origin == "dure"


def test_failure_when_torch_raises_without_the_task_then_it_is_a_librarys():
    try:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(2, 2))
    except RuntimeError as error:
        wrapped = torch.nn.Linear(2, 2)
        del error
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as info:
        wrapped(torch.ones(2, 3))
    info.value.__traceback__ = info.value.__traceback__.tb_next
    assert describe_failure(info.value, 0, None).origin == "library"


def test_failure_when_no_file_can_be_opened_then_the_cure_is_told():
    def writes() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    assert "ulimit -n" in caught(writes).advice
    with pytest.raises(OSError, match="Too many") as info:
        writes()
    info.value.__traceback__ = None  # dure met it, which is no error in dure
    failure = describe_failure(info.value, 0, 3)
    assert (failure.exit_code, failure.is_ours, "ulimit -n" in failure.message) == (3, True, True)
    assert "ulimit -n" in caught(lambda: _raise(RuntimeError("[enforce fail] pipe: Too many open files"))).advice


def test_failure_when_records_meet_a_full_disk_then_it_is_one_sentence_of_misuse():
    def writes() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    error = caught(writes)
    assert error.origin == "task"  # raised in this file: the task's own full disk is the task's to explain
    with pytest.raises(OSError, match="No space") as info:
        writes()
    info.value.__traceback__ = None
    failure = describe_failure(info.value, 0, 3)
    assert (failure.type, failure.exit_code, failure.is_ours) == (DiskFull.__name__, 2, True)


def in_loader(deed) -> None:
    exec(compile("deed()", torch.utils.data.dataloader.__file__, "exec"), {"deed": deed})


def test_failure_when_a_loader_finds_no_shared_memory_then_it_is_not_the_disk(monkeypatch):
    monkeypatch.setattr("dure.failures.report.is_foreign", lambda file: False)
    monkeypatch.setattr("dure.failures.report.users_first", lambda files: [])
    failure = caught(lambda: in_loader(lambda: _raise(OSError(errno.ENOSPC, "No space left on device"))))
    assert (failure.exit_code, failure.is_ours) == (3, True)
    assert failure.message.startswith("there is no space left in /dev/shm")


def test_failure_when_a_sample_cannot_be_read_then_no_loader_process_has_died():
    failure = caught(lambda: in_loader(lambda: _raise(FileNotFoundError("no image"))))
    assert failure.message == "no image"


def test_failure_when_the_loss_is_not_finite_then_its_message_stands_alone():
    failure = caught(lambda: _raise(LossNotFinite("the loss is nan at step 5")))
    assert failure.is_ours
    assert failure.user_traceback is None


class Unprintable(Exception):
    def __init__(self, fault):
        super().__init__("x")
        self.fault = fault

    def __str__(self):
        return self.fault()


@pytest.mark.parametrize("fault", [lambda: 1 / 0, lambda: 7], ids=["raises", "is no text"])
def test_failure_when_its_message_cannot_be_made_then_its_type_and_line_are_there(fault):
    def raise_it():
        raise Unprintable(fault)

    failure = caught(raise_it)
    assert (failure.type, failure.message) == ("Unprintable", "<exception str() failed>")
    assert failure.user_line.function == "raise_it"
    assert "Unprintable: <exception str() failed>" in failure.traceback


def refused():
    socket.create_connection(("127.0.0.1", 1))


def closed():
    process = subprocess.Popen(["true"], stdin=subprocess.PIPE, bufsize=0)
    process.wait()
    with process.stdin as pipe:
        pipe.write(b"x")


def late_service():
    if True: raise RuntimeError("timed out waiting for the annotation service")  # fmt: skip  # noqa: E701


@pytest.mark.parametrize("service", [refused, closed, late_service])
def test_failure_when_a_service_of_the_task_is_gone_then_it_is_no_consequence(service):
    failure = caught(service)
    assert not failure.is_consequence
    assert failure.user_line.function == service.__name__


def test_failure_when_an_error_was_raised_from_itself_then_it_is_reported():
    def step():
        error = RuntimeError("the step failed")
        raise error from error

    failure = caught(step)
    assert (failure.message, failure.is_consequence) == ("the step failed", False)


def test_failure_when_errors_were_being_handled_then_the_first_ones_are_told_unless_they_are_hidden():
    def fail(depth=0, hidden=False):
        try:
            if depth == 3:
                raise KeyError("first")
            fail(depth + 1)
        except Exception:
            if hidden:
                raise ValueError(depth) from None
            raise ValueError(depth)  # noqa: B904

    kinds = [one.partition(" (")[0] for one in caught(fail).handled]
    assert kinds == ["ValueError: 2", "ValueError: 3", "KeyError: 'first'"]
    assert caught(lambda: fail(hidden=True)).handled == ()


def test_failure_when_an_error_was_raised_from_a_lost_peers_then_it_is_a_consequence():
    def step():
        try:
            raise PeerLost("rank 1 went away")
        except PeerLost as error:
            raise RuntimeError("the step failed") from error

    assert caught(step).is_consequence


def test_failure_when_an_error_was_raised_because_of_a_lost_peers_then_it_is_a_consequence():
    def step():
        try:
            raise PeerLost("rank 1 went away")
        except PeerLost:
            raise RuntimeError("the training failed") from None

    assert caught(step).is_consequence
    with pytest.raises(RuntimeError, match="the training failed") as raised:
        step()
    assert not is_peer_lost(raised.value)  # a server that goes on without lost workers must not go on after this


def test_failure_when_a_group_of_errors_holds_lost_peers_alone_then_it_is_a_consequence():
    def step():
        try:
            raise ExceptionGroup("in 1 task", [ExceptionGroup("in 1 part", [PeerLost("rank 1 went away")])])
        except ExceptionGroup as group:
            raise RuntimeError("the step failed") from group

    assert caught(step).is_consequence


def test_failure_when_a_group_of_errors_holds_another_than_lost_peers_then_that_one_is_named():
    def fail_part():
        raise ValueError("no such label")

    def step():
        errors = [PeerLost("rank 1 went away")]
        try:
            fail_part()
        except ValueError as error:
            errors.append(error)
        raise ExceptionGroup("in 2 tasks", errors)

    failure = caught(step)
    assert not failure.is_consequence
    assert failure.message == "in 2 tasks (2 sub-exceptions): ValueError: no such label"
    assert failure.user_line.function == "fail_part"


def test_failure_when_a_member_of_a_group_was_raised_from_the_group_then_both_are_looked_at_once():
    def step():
        member = RuntimeError("Connection closed by peer")
        raise member from ExceptionGroup("in 1 task", [member])

    assert not caught(step).is_consequence


def test_failure_when_a_module_of_python_translates_the_error_of_its_socket_then_it_is_no_consequence():
    def step():
        urllib.request.urlopen("http://127.0.0.1:9/labels", timeout=5)

    failure = caught(step)
    assert "Connection refused" in failure.message
    assert not failure.is_consequence


def test_failure_when_an_error_was_raised_because_of_a_lost_loaders_then_it_is_no_consequence():
    def step():
        try:
            try:
                raise PeerLost("stands for the connection to a loader process")
            except PeerLost:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.") from None
        except RuntimeError as error:
            raise ValueError("no data") from error

    assert not caught(step).is_consequence
