"""The server of `hfscale watch`: a page and its data, for reading only, unless it may ask runs for checkpoints.

It answers GET and HEAD on fixed routes, and no part of a request becomes a path. Where checkpoints may be asked for,
it answers POST on one route, if the request has a header that no page of another site can set. On an address of this
machine it accepts only requests whose `Host` names this machine, so that a page of another site cannot reach it
through a DNS name of its own (DNS rebinding). On any other address each request needs the token: as `Authorization:
Bearer TOKEN`, or once as `?token=TOKEN`, which sets a cookie that no script can read.
"""

import errno
import gzip
import hmac
import ipaddress
import json
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hfscale import __version__
from hfscale.core.logging import get_logger
from hfscale.core.redaction import redact
from hfscale.core.spelling import spelled
from hfscale.errors import HfScaleError, ParameterError, UsageError
from hfscale.report.watch.live import CHARTS, Runs, describe
from hfscale.report.watch.open_metrics import CONTENT_TYPE, Textfile, exposition
from hfscale.report.watch.page import (
    CONTENT_SECURITY_POLICY,
    PAGE,
    DrawnRuns,
    draw_header,
    draw_save,
)

logger = get_logger(__name__)

TOKEN_VARIABLE = "HFSCALE_WATCH_TOKEN"  # noqa: S105  the name of the variable
"""The environment variable that holds the token; unlike a flag it is not in the list of processes."""
MIN_TOKEN_LENGTH = 16
"""Characters of the shortest token."""
REQUEST_S = 30.0
"""Seconds after which a connection that sends or takes nothing is closed."""
READING_S = 10.0
"""Seconds that a client has to send its whole request."""
CONNECTION_S = 120.0
"""Seconds that it has for all: to send the request, and to take the answer."""
MAX_CONNECTIONS = 64
"""Connections at the same time; the oldest whose request is not complete is closed for a new one."""
MIN_COMPRESSED = 4096
"""Bytes from which an answer is compressed: the maps of many ranks are large, and a page is often read through ssh."""
SAVE_ROUTE = "/api/save"
"""Where a run is asked for a checkpoint."""
ACTION_HEADER = "X-Hfscale-Action"
"""A header of such a request. Before a browser sends it to another server than that of the page, it asks that one."""
_JSON = "application/json; charset=utf-8"


class WatchServer(ThreadingHTTPServer):
    """Serves the page, and its data.

    Args:
        runs (`Runs`): the runs by name.
        host (`str`): the address to listen on.
        port (`int`): its port; 0: a free one.
        token (`str`, *optional*): the secret that each request needs; None: none is needed.
        textfile (`Textfile`, *optional*): a file that is written while the server runs.
        allows_save (`bool`): whether who may read the page may ask a run for a checkpoint.

    Raises:
        UsageError: the token is missing or too short, or the host or port cannot be listened on.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        runs: Runs,
        *,
        host: str,
        port: int,
        token: str | None = None,
        textfile: Textfile | None = None,
        allows_save: bool = False,
    ) -> None:
        self.runs = runs
        self.allows_save = allows_save
        self.drawn_runs = DrawnRuns(runs)
        self._textfile = textfile
        self.is_local = is_loopback(host)
        if token is None and not self.is_local:
            fix = f"give a {spelled('token')}, or {TOKEN_VARIABLE}, or leave {spelled('host')} out and use ssh -L"
            raise UsageError(f"{spelled('host', host)} can be reached by other machines: {fix}")
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            raise UsageError(
                f"the token has {len(token)} characters: give at least {MIN_TOKEN_LENGTH}"
            )
        self.token = token
        self.session = secrets.token_urlsafe(32)
        self._connections = _Connections()
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ParameterError(
                    "port", port, "another program uses it: give another port, or 0"
                ) from None
            raise ParameterError(
                "host", host, f"it cannot be listened on: {error.strerror or error}"
            ) from None
        except OverflowError as error:
            raise ParameterError("port", port, str(error)) from None

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    @property
    def cookie_name(self) -> str:
        """The name of the cookie; browsers send those of all ports of a host."""
        return f"hfscale_watch_{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind the socket; unlike the base class it asks no name server for the name of this machine."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = (
            str(self.server_address[0]),
            int(self.server_address[1]),
        )

    def service_actions(self) -> None:
        """Close what takes too long, and write the textfile where it is due; it is called about twice a second."""
        self._connections.close_late()
        if self._textfile is not None:
            self._textfile.write_if_due()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own; there are at most `MAX_CONNECTIONS`."""
        self._connections.add(request)
        super().process_request(request, client_address)

    def request_is_complete(self, request: socket.socket, *, is_known: bool) -> None:
        """Record that a client has sent its whole request.

        Args:
            request (`socket.socket`): its connection.
            is_known (`bool`): whether it has proved the token: it is not closed for another.
        """
        self._connections.is_complete(request, is_known=is_known)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._connections.forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that was lost; `_Handler` reports every other error."""


class _Connections:
    """The open connections, each with the time at which it was opened and how far it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened_at: dict[socket.socket, float] = {}  # the oldest first
        self._stages: dict[socket.socket, int] = {}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MAX_CONNECTIONS
        if limit != resource.RLIM_INFINITY:
            self._most = max(4, min(MAX_CONNECTIONS, limit // 4))

    def add(self, opened: socket.socket) -> None:
        """Take a new connection; where they are too many, shut down the oldest of those that are least far."""
        with self._lock:
            surplus = None
            if len(self._opened_at) >= self._most:
                surplus = min(self._opened_at, key=self._stages.__getitem__)
                self._drop(surplus)
            self._opened_at[opened] = time.monotonic()
            self._stages[opened] = _READING
        if surplus is not None:
            _shut_down(surplus)

    def is_complete(self, opened: socket.socket, *, is_known: bool) -> None:
        with self._lock:
            if opened in self._stages:
                self._stages[opened] = _KNOWN if is_known else _ANSWERING

    def forget(self, opened: socket.socket) -> None:
        with self._lock:
            self._drop(opened)

    def close_late(self) -> None:
        """Shut down connections that take too long: byte by byte, no time limit of a single read ends them."""
        now = time.monotonic()
        with self._lock:
            late = [
                opened for opened, at in self._opened_at.items() if now - at > self._limit(opened)
            ]
            for opened in late:
                self._drop(opened)
        for opened in late:
            _shut_down(opened)

    def _limit(self, opened: socket.socket) -> float:
        return READING_S if self._stages[opened] == _READING else CONNECTION_S

    def _drop(self, opened: socket.socket) -> None:
        self._opened_at.pop(opened, None)
        self._stages.pop(opened, None)


_READING, _ANSWERING, _KNOWN = range(3)  # how far a connection is


def _shut_down(opened: socket.socket) -> None:
    with suppress(OSError):  # its thread has closed it
        opened.shutdown(socket.SHUT_RDWR)


def is_loopback(host: str) -> bool:
    """Return whether an address or name of a host can be reached from this machine only."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: WatchServer
    server_version = f"hfscale/{__version__}"
    sys_version = ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer with the page or data, or with why not."""
        asked = self._asked()
        if asked is None:
            return
        path, query = asked
        may_read = self._may_read()
        self.server.request_is_complete(self.connection, is_known=may_read)
        answer = _ROUTES.get(path)
        has_token = self.server.token is not None and self._equals(
            query.get("token"), self.server.token
        )
        if self._is_refused(is_known=may_read or has_token):
            return
        if has_token:
            self._open_session(path if answer else "/")
        elif answer is None:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page\n")
        else:
            self._answer(answer, query)

    def do_POST(self) -> None:
        """Ask a run for a checkpoint, where that is allowed."""
        self.close_connection = True  # no body is read
        if not self.server.allows_save:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)
            return
        asked = self._asked()
        if asked is None:
            return
        path, query = asked
        may_ask = self._may_read()
        self.server.request_is_complete(self.connection, is_known=may_ask)
        if self._is_refused(is_known=may_ask):
            return
        if path != SAVE_ROUTE:
            self._send(HTTPStatus.NOT_FOUND, "there is no such page\n")
        elif self.headers.get(ACTION_HEADER) != "save":
            self._send(
                HTTPStatus.FORBIDDEN, f"a request to save needs the header {ACTION_HEADER}: save\n"
            )
        else:
            self._answer(_save, query)

    def _asked(self) -> tuple[str, dict[str, str]] | None:
        """Return the path and the query of the request; None, with an answer, where they cannot be read."""
        try:
            url = urlsplit(self.path)
            found = parse_qs(url.query, max_num_fields=20)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return None
        return url.path, {name: values[-1] for name, values in found.items()}

    def _is_refused(self, *, is_known: bool) -> bool:
        """Refuse a request to the name of another site, or without the token; return whether it was refused."""
        host = _host_of(self.headers.get("Host", ""))
        if self.server.is_local and not is_loopback(host):
            text = "open it as http://localhost or by a loopback address\n"
            self._send(HTTPStatus.FORBIDDEN, text)
            return True
        if not is_known:
            text = "this page needs its token: open it once with ?token=TOKEN\n"
            self._send(HTTPStatus.UNAUTHORIZED, text)
        return not is_known

    def do_HEAD(self) -> None:
        """Answer as GET, without the body."""
        self.do_GET()

    def _answer(self, answer: "_Answer", query: dict[str, str]) -> None:
        try:
            self._send(HTTPStatus.OK, *answer(self.server, query))
        except UsageError as error:
            self._send(HTTPStatus.BAD_REQUEST, f"{redact(str(error))}\n")
        except HfScaleError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{redact(str(error))}\n")
        except ConnectionError:
            raise
        except Exception as error:  # damaged files must not end the server
            logger.warning(
                "the page cannot show a run: %s: %s", type(error).__name__, redact(str(error))[:200]
            )
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "the files of the run have values that cannot be shown\n",
            )

    def _may_read(self) -> bool:
        if self.server.token is None:
            return True
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._equals(given.strip(), self.server.token):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie_name)
        except CookieError:
            return False
        return cookie is not None and self._equals(cookie.value, self.server.session)

    @staticmethod
    def _equals(given: str | None, secret: str) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), secret.encode())

    def _open_session(self, path: str) -> None:
        """Give the browser a cookie, and send it to the address without the token."""
        cookie = (
            f"{self.server.cookie_name}={self.server.session}; HttpOnly; SameSite=Strict; Path=/"
        )
        self._send(HTTPStatus.SEE_OTHER, "", headers={"Location": path, "Set-Cookie": cookie})

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        kind: str = "text/plain; charset=utf-8",
        headers: Any = None,
    ) -> None:
        body = text.encode()
        fields = {"Content-Type": kind} | (headers or {})
        if len(body) >= MIN_COMPRESSED and _takes_gzip(getattr(self, "headers", None)):
            body = gzip.compress(body, compresslevel=1)
            fields["Content-Encoding"] = "gzip"
        fields["Content-Length"] = str(len(body))
        self.send_response(status)
        for name, value in fields.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def end_headers(self) -> None:
        """Add the headers that restrict what a browser does with any answer."""
        for name, value in (
            ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("X-Frame-Options", "DENY"),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        super().end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is malformed, or of another method, without repeating any of it."""
        self.close_connection = True
        self.command = getattr(self, "command", None) or "GET"
        self._send(HTTPStatus(code), f"{HTTPStatus(code).phrase}\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the address of a request may have the token in it."""


def _takes_gzip(headers: Any) -> bool:
    offered = headers.get("Accept-Encoding", "").split(",") if headers is not None else []
    return "gzip" in (one.strip() for one in offered)


def _host_of(header: str) -> str:
    """Return the host of a `Host` header, without its port."""
    return (
        header.rpartition("]")[0].strip("[") if header.startswith("[") else header.partition(":")[0]
    )


def _page(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    return PAGE, "text/html; charset=utf-8"


def _runs(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    return json.dumps({"runs": list(server.runs), "charts": CHARTS}), _JSON


def _asked_name(server: WatchServer, query: dict[str, str]) -> str:
    name = query.get("run") or next(iter(server.runs))
    if name not in server.runs:
        raise UsageError("no run has this name: /api/runs.json lists them")
    return name


def _run(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    name = _asked_name(server, query)
    try:
        after, generation = int(query.get("after", "0")), int(query.get("generation", "-1"))
    except ValueError:
        raise UsageError("after and generation must be integers") from None
    answer = describe(
        server.runs[name].view(),
        after=after,
        generation=generation,
        version=query.get("version", ""),
    )
    return json.dumps(answer, allow_nan=False), _JSON


def _sections(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    """Return what the page shows of a run: its header always, its sections if the page has others."""
    name = _asked_name(server, query)
    view, drawn = server.drawn_runs.of(name)
    save = ""
    if server.allows_save:
        save = draw_save(view, is_asked=server.runs[name].is_save_asked)
    is_known = query.get("version") == drawn.version
    answer = {
        "header": draw_header(view, save),
        "sections": None if is_known else drawn.sections,
        "version": drawn.version,
    }
    return json.dumps(answer), _JSON


def _save(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    """Ask a run for a checkpoint."""
    if "run" not in query:
        raise UsageError("run must name the run: /api/runs.json lists them")
    server.runs[_asked_name(server, query)].ask_for_save()
    return "A checkpoint of the next step is asked for.\n", "text/plain; charset=utf-8"


def _metrics(server: WatchServer, query: dict[str, str]) -> tuple[str, str]:
    return exposition(server.runs), CONTENT_TYPE


_Answer = Callable[[WatchServer, dict[str, str]], tuple[str, str]]
_ROUTES: dict[str, _Answer] = {
    "/": _page,
    "/api/runs.json": _runs,
    "/api/run.json": _run,
    "/api/sections.json": _sections,
    "/metrics": _metrics,
}
