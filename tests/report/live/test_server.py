"""Server of the live page: who may ask, and what is answered."""

import asyncio
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from dure.errors import Misuse
from dure.records.events import Evaluated
from dure.records.step_record import Metric
from dure.report.live.examination import Examination
from dure.report.live.live_run import LiveRun
from tests.report.hostile import add_hostile_records
from tests.report.live.watched_runs import append, going_on, new_run, start, watched

pytest.importorskip("bokeh", reason="draws and serves the page: pip install 'dure[report]'")


@pytest.fixture
def run(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start())
    append(run, 0, range(1, 4))
    append(run, 1, range(1, 4))
    return run


def get(server, path, *, host=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


def messages(server, number, **headers):
    """Return the first messages that a page receives."""
    from tornado.httpclient import HTTPRequest
    from tornado.websocket import websocket_connect

    async def receive():
        address = f"ws://127.0.0.1:{server.port}/live?token={server.token}"
        connection = await websocket_connect(HTTPRequest(address, headers=headers))
        found = [json.loads(await connection.read_message()) for _ in range(number)]
        connection.close()
        while await connection.read_message() is not None:
            pass
        return found

    return asyncio.run(receive())


@pytest.mark.parametrize("path", ["/", "/metrics", "/bokeh.js", "/watch.js", "/live", "/anything"])
def test_request_when_its_token_is_wrong_or_missing_then_is_refused(run, path):
    with watched(run) as server:
        assert get(server, path)[0] == 403
        assert get(server, f"{path}?token=")[0] == 403
        assert get(server, f"{path}?token={server.token}x")[0] == 403
        assert get(server, f"{path}?token=%ff%00")[0] in (400, 403)
        assert get(server, path, Authorization="Bearer x")[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "evil.example:{port}", "127.0.0.1.:{port}"]
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/live"])
def test_request_when_its_host_is_not_the_servers_then_is_refused(run, path, host):
    with watched(run) as server:
        status, text, _ = get(server, f"{path}?token={server.token}", host=host.format(port=server.port))
        assert status == 403
        assert "run" not in text.replace("running", "")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_request_when_a_page_of_another_origin_makes_it_then_is_refused(run, origin):
    with watched(run) as server:
        origin = origin.format(port=server.port)
        assert get(server, f"/?token={server.token}", Origin=origin)[0] == 403
        assert get(server, f"/metrics?token={server.token}", Origin=origin)[0] == 403
        with pytest.raises(Exception, match="403"):
            messages(server, 1, Origin=origin)


def test_request_when_all_is_right_then_is_answered_and_nothing_may_be_kept_or_framed(run):
    with watched(run) as server:
        for host in server.hosts:
            status, text, headers = get(server, f"/?token={server.token}", host=host)
            assert status == 200
            assert "<h1>run " in text
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "script-src 'self';" in headers["Content-Security-Policy"]
        assert get(server, "/metrics", Authorization=f"Bearer {server.token}")[0] == 200
        assert get(server, f"/metrics?token={server.token}")[2]["Content-Type"].startswith("text/plain; version=0.0.4")
        assert get(server, f"/anything?token={server.token}")[0] == 404
        assert get(server, f"/bokeh.js?token={server.token}")[0] == 200


def test_server_when_it_runs_then_it_listens_on_loopback_alone(run):
    with watched(run) as server:
        listening = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert [(one.ip, one.port) for one in listening if one.port == server.port] == [("127.0.0.1", server.port)]


def test_tokens_when_servers_start_then_are_random_and_long(run):
    with watched(run) as one, watched(run) as other:
        assert one.token != other.token
        assert len(one.token) >= 40


def test_port_when_it_is_in_use_then_that_is_said(run):
    from dure.report.live.server import WatchServer

    with socket.socket() as taken, Examination(run, lambda _: ()) as examination:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Misuse, match=r"cannot be used \(Address already in use\): choose another --port"):
            WatchServer(LiveRun(run), examination, port=taken.getsockname()[1])


def test_page_when_it_connects_then_receives_all_and_later_only_what_has_changed(run):
    with going_on(run), watched(run) as server:
        whole, first = messages(server, 2)
        assert whole["order"] == ["loss", "throughput", "parts", "lateness", "events"]
        assert [*whole["charts"]] == [*whole["numbers"]] == whole["order"]
        assert "running" in whole["parts"]["status"]
        assert first["charts"] == {}
        assert "below" not in first["parts"]


def test_page_when_the_run_grows_then_receives_new_numbers_and_new_sections(run):
    with going_on(run), watched(run) as server:
        append(run, 0, [4])
        at = {
            "step": 4,
            "samples_seen": 32,
            "epochs": 0.5,
            "train_loss": None,
            "seconds": 0.1,
            "seconds_since_last": 0.1,
        }
        metrics = {"accuracy": Metric(value=0.5, count=1)}
        run.append_event(Evaluated(metrics=metrics, is_best=True, best_metric="accuracy", **at))
        found = {}
        for _ in range(50):
            (found,) = messages(server, 1)
            if "metric0" in found["order"]:
                break
        assert found["order"][:2] == ["loss", "metric0"]
        assert found["parts"]["title-metric0"] == "Evaluation: accuracy"


def test_page_when_it_is_too_slow_then_changes_do_not_pile_up_and_it_begins_again():
    from dure.report.live.server import _Live

    async def send():
        page, sent = object.__new__(_Live), []
        on_its_way = asyncio.get_running_loop().create_future()
        page.write_message = lambda text: sent.append(text) or on_its_way
        page.send("whole")
        assert not page.is_behind
        page.send("change 1")
        page.send("change 2")
        assert (sent, page.is_behind) == (["whole"], True)
        on_its_way.set_result(None)
        page.send("whole again")
        assert (sent[1:], page.is_behind) == (["whole again"], False)

    asyncio.run(send())


def test_pages_when_there_are_many_then_all_receive_the_same_changes(run):
    with going_on(run), watched(run) as server:
        with ThreadPoolExecutor(5) as pool:
            found = [*pool.map(lambda _: messages(server, 3), range(5))]
        assert all(first["order"] == found[0][0]["order"] for first, *_ in found)
        assert all(change["charts"] == {} for _, *changes in found for change in changes)
    assert server.pages == set()


def test_page_when_records_are_not_understood_then_that_is_said_once_and_it_follows_later(run, monkeypatch, capfd):
    with watched(run) as server:
        faults, update = [KeyError("x")] * 3, server.updates.update

        def faulty(moment, findings):
            if faults:
                raise faults.pop()
            return update(moment, findings)

        monkeypatch.setattr(server.updates, "update", faulty)
        (whole,) = messages(server, 1)
        assert (faults, whole["order"][0]) == ([], "loss")
    assert capfd.readouterr().err.count("are damaged or of another version") == 1


def test_texts_when_they_are_hostile_then_no_message_has_them_as_html(run):
    hostile = add_hostile_records(run)
    with watched(run, [hostile]) as server:
        whole = {"parts": {"findings": "being examined"}}
        while "being examined" in whole["parts"]["findings"]:
            (whole,) = messages(server, 1)
        texts = [*whole["parts"].values(), *(chart["html"] for chart in whole["charts"].values())]
        assert not any("<img" in text or "<script" in text or "\x1b" in text for text in texts)
        assert sum(text.count("&lt;/script&gt;") for text in texts) >= 6
        items = json.dumps([chart["item"] for chart in whole["charts"].values()])
        assert "$$" not in items
        assert "alert" not in items
        assert "<img" not in get(server, f"/?token={server.token}")[1]


def test_page_when_there_are_no_records_then_says_so(tmp_path):
    run = new_run(tmp_path / "run")
    with going_on(run), watched(run) as server:
        (whole,) = messages(server, 1)
        assert whole["order"] == []
        assert "There are no records of steps." in whole["parts"]["below"]
        assert "No step is on record yet." in whole["parts"]["head"]


def test_page_when_the_folder_is_out_of_reach_then_says_so_and_keeps_what_was_read(run):
    with watched(run) as server:
        run.path.rename(run.path.with_name("gone"))
        head = ""
        while "cannot be read" not in head:
            (whole,) = messages(server, 1)
            head = whole["parts"]["head"]
        assert "loss" in whole["order"]
        run.path.with_name("gone").rename(run.path)
        while "cannot be read" in head:
            (whole,) = messages(server, 1)
            head = whole["parts"]["head"]
