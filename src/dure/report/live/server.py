"""Server of the live page: on loopback alone, for those who know the token of this start.

Any program and any web page of this host can reach a port of it. So every request needs the token, which is random; the
`Host` header has to be the server's own address, or a name that an attacker lets resolve to 127.0.0.1 would do (DNS
rebinding); and a request that a page of another origin makes is refused.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tornado.httpserver
import tornado.web
import tornado.websocket

from dure.errors import Misuse, RunInvalid
from dure.report.live.examination import Examination
from dure.report.live.live_run import LiveRun, Moment
from dure.report.live.metrics import CONTENT_TYPE, metrics_text
from dure.report.live.page_updates import PageUpdates, page_contents
from dure.report.page import PAINT, rendered_page
from dure.terminal import one_line, print_status

ADDRESS = "127.0.0.1"
_INTERVAL_SECONDS = 1.0
_LEAST_PAUSE_SECONDS = 0.05
_MOST_PAGES = 200
_MOST_REQUEST_BYTES = 2**16
_PING_SECONDS = 20.0
_IDLE_SECONDS = 120.0
_LIVE = Path(__file__).with_name("live.js")


class WatchServer:
    """Server of one run.

    Args:
        live: Reader of the run.
        examination: Diagnosis of the run, open.
        port: Port on the loopback address; 0 for a free one.
        token: Token that requests need; by default a random one.
        interval_seconds: Time between two looks at the records.

    Raises:
        Misuse: The port is in use, or not allowed.
    """

    def __init__(
        self,
        live: LiveRun,
        examination: Examination,
        *,
        port: int = 0,
        token: str | None = None,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self.live, self.examination = live, examination
        self.token = secrets.token_urlsafe(32) if token is None else token
        self.updates = PageUpdates()
        self.pages: set[_Live] = set()
        self.moment: Moment | None = None
        self._interval_seconds = interval_seconds
        self._socket = _bound(port)
        self.port: int = self._socket.getsockname()[1]
        self.hosts = (f"{ADDRESS}:{self.port}", f"localhost:{self.port}")
        self._has_news = asyncio.Event()
        self._was_over = False
        self._reported = ""

    @property
    def address(self) -> str:
        """Address of the page, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self.token}"

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until the task is cancelled.

        Args:
            started: Called once requests are answered.
        """
        application = tornado.web.Application(
            [("/", _Page), ("/live", _Live), ("/metrics", _Metrics), (r"/(bokeh|watch)\.js", _Script)],
            default_handler_class=_Missing,
            log_function=lambda handler: None,
            watch=self,
            websocket_ping_interval=_PING_SECONDS,
            websocket_max_message_size=_MOST_REQUEST_BYTES,
        )
        server = tornado.httpserver.HTTPServer(
            application,
            max_body_size=_MOST_REQUEST_BYTES,
            max_header_size=_MOST_REQUEST_BYTES,
            idle_connection_timeout=_IDLE_SECONDS,
        )
        log, handler = logging.getLogger("tornado"), _LogToStatus(logging.ERROR)
        log.addHandler(handler)
        try:
            await self._look()
            server.add_socket(self._socket)
            started()
            await self._follow()
        finally:
            server.stop()
            self._socket.close()
            for page in [*self.pages]:
                page.close(1001)
            await server.close_all_connections()
            log.removeHandler(handler)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            await self._look()
            pause = self._interval_seconds - (loop.time() - begin)
            if self.moment is not None and self.moment.unread_fraction:
                pause = 0.0
            await self._pause(max(_LEAST_PAUSE_SECONDS, pause))

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), seconds)
        self._has_news.clear()

    async def _look(self) -> None:
        """Read the records in a thread, and send the changes to all pages."""
        moment = self.moment = await asyncio.to_thread(self.live.refresh)
        if moment.is_over and not self._was_over:
            self.examination.hasten()
        self._was_over = moment.is_over
        if not self.pages:
            return
        try:
            with self.live.run.understood():
                change = await asyncio.to_thread(self.updates.update, moment, self.examination.findings)
        except RunInvalid as error:  # the pages stay as they are
            self._report(str(error))
            return
        whole = None
        for page in [*self.pages]:
            if page.is_behind:
                whole = self.updates.whole() if whole is None else whole
            page.send(whole if page.is_behind and whole is not None else change)

    def _report(self, fault: str) -> None:
        """Write a fault to stderr, once and not every second."""
        if fault != self._reported:
            print_status(fault)
        self._reported = fault

    def welcome(self, page: "_Live") -> None:
        """Send the whole state to a page soon."""
        self.pages.add(page)
        self._has_news.set()

    def is_allowed(self, handler: tornado.web.RequestHandler) -> bool:
        """Return whether a request has the token, this server's address, and no other origin."""
        headers = handler.request.headers
        origin = headers.get("Origin")
        kind, _, bearer = headers.get("Authorization", "").partition(" ")
        given = bearer if kind.lower() == "bearer" else handler.get_query_argument("token", "")
        return (
            hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())
            and handler.request.host in self.hosts
            and (origin is None or self.is_own(origin))
        )

    def is_own(self, origin: str) -> bool:
        """Return whether an origin is this server's."""
        return origin in [f"http://{host}" for host in self.hosts]


def _bound(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a server may follow another one at once
        bound.bind((ADDRESS, port))
        bound.listen(_MOST_PAGES)
    except OSError as error:
        bound.close()
        fault = f"port {port} cannot be used ({error.strerror}): choose another --port, or leave it out"
        raise Misuse(fault) from None
    bound.setblocking(False)
    return bound


class _Guarded(tornado.web.RequestHandler):
    """Request that needs the token, the server's own address and its own origin."""

    @property
    def watch(self) -> WatchServer:
        found: WatchServer = self.settings["watch"]
        return found

    def set_default_headers(self) -> None:
        ports = " ".join(f"ws://{host}" for host in self.watch.hosts)
        self.clear_header("Server")
        self.set_header(
            "Content-Security-Policy",
            "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data: blob:; "
            f"font-src data:; connect-src 'self' {ports}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        )
        self.set_header("Cross-Origin-Resource-Policy", "same-origin")
        self.set_header("Cross-Origin-Opener-Policy", "same-origin")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")

    def prepare(self) -> None:
        if not self.watch.is_allowed(self):
            raise tornado.web.HTTPError(403)

    def write_error(self, status_code: int, **details: Any) -> None:
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        text = "open the address that dure watch has printed" if status_code == 403 else "there is nothing here"
        self.finish(f"{status_code}: {text}\n")


class _Page(_Guarded):
    """Page of the run; its script draws the charts."""

    def get(self) -> None:
        watch, token = self.watch, self.watch.token
        assert watch.moment is not None
        scripts = "".join(
            f'<script src="/{name}.js?token={token}"{mode}></script>\n'
            for name, mode in (("bokeh", ""), ("watch", " defer"))
        )
        shown = page_contents(watch.moment, watch.examination.findings)
        self.finish(rendered_page(watch.live.run, shown, is_live=True, scripts=scripts))


class _Script(_Guarded):
    """Script of the page, from this installation."""

    def get(self, name: str) -> None:
        from bokeh.util.paths import bokehjs_path

        self.set_header("Content-Type", "text/javascript; charset=utf-8")
        if name == "bokeh":
            self.finish((bokehjs_path() / "js" / "bokeh.min.js").read_bytes())
        else:
            self.finish(PAINT.read_text(encoding="utf-8") + _LIVE.read_text(encoding="utf-8"))


class _Metrics(_Guarded):
    """Metrics of the run for Prometheus."""

    def get(self) -> None:
        assert self.watch.moment is not None
        self.set_header("Content-Type", CONTENT_TYPE)
        self.finish(metrics_text(self.watch.moment))


class _Missing(_Guarded):
    """Answer to a request for anything else."""

    def prepare(self) -> None:
        super().prepare()
        raise tornado.web.HTTPError(404)


class _Live(_Guarded, tornado.websocket.WebSocketHandler):
    """Connection of one page. It receives the whole state first, and again if it was too slow for the changes."""

    is_behind = True
    _sending: "asyncio.Future[None] | None" = None

    def check_origin(self, origin: str) -> bool:
        return self.watch.is_own(origin)

    def prepare(self) -> None:
        super().prepare()
        if len(self.watch.pages) >= _MOST_PAGES:
            raise tornado.web.HTTPError(503)

    def open(self, *args: str, **kwargs: str) -> None:
        self.watch.welcome(self)

    def on_message(self, message: str | bytes) -> None:
        """Ignore it: a page has nothing to say."""

    def on_close(self) -> None:
        self.watch.pages.discard(self)

    def send(self, text: str) -> None:
        """Send a message, unless an earlier one is still on its way."""
        if self._sending is not None and not self._sending.done():
            self.is_behind = True
            return
        try:
            self._sending = asyncio.ensure_future(self.write_message(text))
        except tornado.websocket.WebSocketClosedError:
            self.watch.pages.discard(self)
            return
        self._sending.add_done_callback(_retrieve)
        self.is_behind = False


def _retrieve(done: "asyncio.Future[None]") -> None:
    """Take note of the end of a message: a page may be closed in the middle of it."""
    if not done.cancelled():
        done.exception()


class _LogToStatus(logging.Handler):
    """Handler that writes the errors of tornado as one line to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print_status(one_line(record.getMessage().partition("\n")[0]))
