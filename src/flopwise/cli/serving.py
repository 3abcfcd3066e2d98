"""The page over HTTP, on this machine's loopback alone: it reads the store, and nothing that is asked for changes it.

No path of a request is ever made a path of the file system, but for a run's number that the store itself has listed.
"""

from __future__ import annotations

import hashlib
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any

from flopwise.base.errors import FlopwiseError
from flopwise.cli.planning import Searches
from flopwise.store.runs import RUN_NAME

if TYPE_CHECKING:
    from flopwise.report.page.data import PageData
    from flopwise.report.page.progress import RunProgress
    from flopwise.store.results import Result

EVERY_S = 2.0
"""The store is read at most so often, however many ask."""
REQUEST_S = 10.0
"""In which each part of a request must arrive, and of an answer be taken."""
HOST = "127.0.0.1"
NAMES = ("localhost", HOST)
"""What a request may call this server: any other name leads here by a trick."""

RUN = re.compile(rf"/run/({RUN_NAME.pattern})\.json", re.ASCII)
NOTHING = "default-src 'none'; frame-ancestors 'none'"
HTML, JSON, CSV, MARKDOWN, TEXT = (
    f"{kind}; charset=utf-8" for kind in ("text/html", "application/json", "text/csv", "text/markdown", "text/plain")
)


def tell(line: str) -> None:
    """Say something on the terminal, where everybody but the data is told."""
    from flopwise.report.words import visible

    sys.stderr.write(f"{visible(line)}\n")
    sys.stderr.flush()


# -- what is served --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """What a request is answered with."""

    body: bytes
    kind: str
    policy: str = NOTHING
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.body).hexdigest()[:32]}"'


@dataclass(frozen=True, slots=True)
class _Seen:
    """The rows as they were last read, and the answers that have been made of them."""

    rows: list[Result]
    progress: dict[str, RunProgress]
    """Of the runs that go on."""
    created: str
    """When they came to be as they are: while nothing changes, nothing of the page does."""
    answers: dict[str, PageAnswer] = field(default_factory=dict)


class Live:
    """A store as it is now, read at most every `EVERY_S` seconds."""

    def __init__(self, store: Path, clock: Callable[[], float] = time.monotonic, *, price: float | None = None) -> None:
        self.store, self.price = store, price
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: _Seen | None = None
        self._failure: FlopwiseError | None = None
        self._read_at = 0.0
        self._told: set[str] = set()
        self._foreseen: dict[Result, dict[str, Any] | None] = {}
        self.searches = Searches()

    def answer(self, path: str, query: str = "", is_wanted: Callable[[], bool] = lambda: True) -> PageAnswer | None:
        """What stands at a path; None: nothing does. `is_wanted`: whether anybody waits for it still."""
        if path in QUESTIONS:
            return self._question(path, query, is_wanted)
        run = RUN.fullmatch(path)
        if run is not None:
            return self._run(run[1])
        make = ROUTES.get(path)
        if make is None:
            return None
        with self._lock:
            seen = self._now()
            if path not in seen.answers:
                seen.answers[path] = make(self, seen)
            return seen.answers[path]

    def _question(self, path: str, query: str, is_wanted: Callable[[], bool]) -> PageAnswer:
        """What the planner asks: nothing of the store is read for it."""
        from flopwise.cli.planning import around, predicted, read_query, view_text
        from flopwise.report.page.planner import refusal_view

        try:
            question = read_query(query)
        except FlopwiseError as error:
            return PageAnswer(view_text(refusal_view(error, "")).encode(), JSON, status=HTTPStatus.BAD_REQUEST)
        if path == SEARCH:
            found = self.searches.ask(query, is_wanted)
            return _refusal(HTTPStatus.CONFLICT, "nobody waits for it") if found is None else _json(found)
        return _json(view_text(around(question) if path == AROUND else predicted(question)))

    def _now(self) -> _Seen:
        is_fresh = (self._seen or self._failure) and self._clock() - self._read_at < EVERY_S
        if not is_fresh:
            try:
                self._look()
            except FlopwiseError as error:
                self._failure = error
            self._read_at = self._clock()
        if self._failure is not None:
            raise self._failure
        assert self._seen is not None
        return self._seen

    def _look(self) -> None:
        rows = self._collect()
        progress = self._progress(rows)
        self._failure = None
        # NaN is not itself: where rows seem to differ, they are compared as they are written.
        if self._seen is None or _differ(rows, self._seen.rows) or _differ(progress, self._seen.progress):
            self._seen = _Seen(rows, progress, datetime.now().astimezone().isoformat(timespec="milliseconds"))

    def _progress(self, rows: list[Result]) -> dict[str, RunProgress]:
        from flopwise.cli.run_details import progress_of_run

        # The names are those of the store's own list.
        going_on = [row.run for row in rows if row.state == "running" and row.run]
        found = {run: progress_of_run(self.store / run, self._tell_once) for run in going_on}
        return {run: progress for run, progress in found.items() if progress is not None}

    def _collect(self) -> list[Result]:
        from flopwise.cli.report import tell_unsettled
        from flopwise.store.collecting import collect
        from flopwise.store.results import add_price, check_result

        tell_unsettled(self.store, (), self._tell_once)
        found = collect(self.store)
        for problem in found.problems:
            self._tell_once(f"note: {problem.path}: {problem.why}")
        sound = [check_result(row) for row in found.rows]
        return sound if self.price is None else [add_price(row, self.price) for row in sound]

    def _tell_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            tell(line)

    def page(self, seen: _Seen) -> PageData:
        from flopwise.cli.foreseen import foresee_rows
        from flopwise.cli.planning import options
        from flopwise.report.page.data import PageData

        title = str(self.store)
        short = title if len(title) <= 60 else f"…{title[-59:]}"
        return PageData(
            title=short,
            created=seen.created,
            rows=seen.rows,
            progress=seen.progress,
            foreseen=foresee_rows(seen.rows, self._foreseen),
            live=True,
            planner=options(),
        )

    def _run(self, name: str) -> PageAnswer | None:
        from flopwise.cli.run_details import detail_of
        from flopwise.report.page.data import detail_json
        from flopwise.store.runs import run_names

        # The name is taken from the store's own list, never from the request.
        found = next((known for known in run_names(self.store) if known == name), None)
        return None if found is None else PageAnswer(detail_json(detail_of(self.store / found, tell)).encode(), JSON)


def _json(text: str) -> PageAnswer:
    return PageAnswer(text.encode(), JSON)


def _differ(new: object, old: object) -> bool:
    return new != old and repr(new) != repr(old)


def _page(live: Live, seen: _Seen) -> PageAnswer:
    from flopwise.report.page.page import LIBRARIES, SCRIPTS, asset, page_html, policy

    scripts = [asset(name).replace("\r\n", "\n") for name in (*LIBRARIES, *SCRIPTS)]
    rules = f"{policy(scripts, live=True)}; frame-ancestors 'none'"
    return PageAnswer(page_html(live.page(seen)).encode(), HTML, rules)


def _data(live: Live, seen: _Seen) -> PageAnswer:
    from flopwise.report.page.data import page_json

    return PageAnswer(page_json(live.page(seen)).encode(), JSON)


def _csv(_: Live, seen: _Seen) -> PageAnswer:
    from flopwise.report.results_files import results_csv

    return PageAnswer(results_csv(seen.rows).encode(), CSV)


def _markdown(_: Live, seen: _Seen) -> PageAnswer:
    from flopwise.report.document import to_markdown
    from flopwise.report.results import results_document

    return PageAnswer(to_markdown(results_document(seen.rows)).encode(), MARKDOWN)


PREDICT, SEARCH, AROUND = "/predict", "/plan", "/around"
QUESTIONS = (PREDICT, SEARCH, AROUND)

ROUTES: dict[str, Callable[[Live, _Seen], PageAnswer]] = {
    "/": _page,
    "/data.json": _data,
    "/results.csv": _csv,
    "/results.md": _markdown,
}


# -- the server ------------------------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Listens on the loopback alone."""

    daemon_threads = True

    def __init__(self, live: Live, port: int) -> None:
        self.live = live
        super().__init__((HOST, port), Handler)
        host_names = {f"{name}:{self.server_port}" for name in NAMES}
        self.host_names = host_names | (set(NAMES) if self.server_port == 80 else set())

    def server_bind(self) -> None:
        # The base class would ask a name server what this host is called.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        del request, client_address
        error = sys.exception()
        # A client that went away, or took too long, is nobody's mistake.
        if not isinstance(error, OSError):
            tell(f"note: a request failed: {type(error).__name__}: {error}")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    """One request for each connection: GET and HEAD."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "flopwise"
    sys_version = ""
    timeout = REQUEST_S

    def do_GET(self) -> None:
        self._respond(self._answer())

    def do_HEAD(self) -> None:
        self._respond(self._answer())

    def _answer(self) -> PageAnswer:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].strip().lower() not in self.server.host_names:
            return _refusal(HTTPStatus.FORBIDDEN, "this server is called localhost, and by no other name")
        # As it was sent: `self.path` has been tidied up.
        target = self.requestline.split()[1]
        path, _, query = target.partition("?")
        if path in QUESTIONS and not self._is_own():
            return _refusal(HTTPStatus.FORBIDDEN, "only the page itself asks that")
        try:
            found = self.server.live.answer(path, query, self._is_waited_for)
        except FlopwiseError as error:
            tell(f"note: {error.what}{f': {error.why}' if error.why else ''}")
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the runs cannot be read; the terminal says why")
        except Exception as error:
            tell(f"note: {self.command} {target!r} failed: {type(error).__name__}: {error}")
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the answer could not be made; the terminal says why")
        return found or _refusal(HTTPStatus.NOT_FOUND, "there is nothing of that name")

    def _is_own(self) -> bool:
        """Whether the page asks, and none of another site, which could keep this machine busy."""
        origins = {f"http://{name}" for name in self.server.host_names}
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        return (origin is None or origin.lower() in origins) and site in ("none", "same-origin")

    def _is_waited_for(self) -> bool:
        """Whether the other side still listens: one that has gone away is at the end of what it sends."""
        try:
            # `recv` alone would wait: this socket has a time in which parts of requests must arrive.
            is_silent = not select.select([self.connection], [], [], 0)[0]
            return is_silent or len(self.connection.recv(1, socket.MSG_PEEK)) > 0
        except (OSError, ValueError):
            return False

    def _respond(self, answer: PageAnswer) -> None:
        wanted = self.headers.get("If-None-Match", "") if answer.status == HTTPStatus.OK else ""
        known = {word.strip().removeprefix("W/") for word in wanted.split(",")}
        is_known = answer.status == HTTPStatus.OK and bool(known & {answer.etag, "*"})
        self.close_connection = True
        # The oldest protocol has no headers, and what cannot be read counts as such a request.
        self.request_version = "HTTP/1.1"
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else answer.status)
        for name, value in (*_headers(answer), *answer.headers, ("Connection", "close")):
            self.send_header(name, value)
        if not is_known:
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD" and not is_known:
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class finds wrong with a request, in our words."""
        del message, explain
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        if not hasattr(self, "headers"):
            self.headers = self.MessageClass()
        is_method = status == HTTPStatus.METHOD_NOT_ALLOWED
        sentence = "only GET and HEAD are answered" if is_method else "the request is not one that can be read"
        self._respond(_refusal(status, sentence))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
        """Requests are not told of; what goes wrong is."""


def _headers(answer: PageAnswer) -> tuple[tuple[str, str], ...]:
    fixed = (
        ("Content-Security-Policy", answer.policy),
        ("X-Content-Type-Options", "nosniff"),
        ("X-Frame-Options", "DENY"),
        ("Referrer-Policy", "no-referrer"),
        ("Cross-Origin-Resource-Policy", "same-origin"),
        ("Cross-Origin-Opener-Policy", "same-origin"),
        ("Cache-Control", "no-cache"),
    )
    return (*fixed, ("ETag", answer.etag)) if answer.status == HTTPStatus.OK else fixed


def _refusal(status: HTTPStatus, sentence: str) -> PageAnswer:
    allowed = (("Allow", "GET, HEAD"),) if status == HTTPStatus.METHOD_NOT_ALLOWED else ()
    return PageAnswer(f"{sentence}\n".encode(), TEXT, status=status, headers=allowed)


# -- from words to a server ------------------------------------------------------------------------------------------


def listening(live: Live, port: int) -> Server:
    """A server on that port, or with 0 on any that is free."""
    try:
        return Server(live, port)
    except OSError as error:
        hint = "--port 0 takes any that is free"
        raise FlopwiseError(f"port {port} cannot be had", why=error.strerror or str(error), hint=hint) from None


def run_server(server: Server, *, open_browser: bool = False) -> None:
    """Serve until Ctrl-C, which ends it quietly."""
    tell(f"serving {server.live.store} at {server.url}   Ctrl-C ends it")
    try:
        if open_browser:
            import webbrowser

            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        tell("")
    finally:
        server.server_close()
        server.live.searches.close()
