"""`flopwise serve`: what is answered, what is refused, and that nothing asked for leads out of the store."""

from __future__ import annotations

import csv
import http.client
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from flopwise.base.errors import FlopwiseError
from flopwise.cli import app, serving
from flopwise.cli.serving import Live, Server, listening
from flopwise.records.measurement import RunRecord
from flopwise.setup.training import Training
from flopwise.store import collecting
from flopwise.store.results import FIELDS
from flopwise.store.runs import RECORD, STEPS, write_record

OUTSIDE = "what lies outside of the store"
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def a_record(name: str, steps: int = 3) -> RunRecord:
    plan = {"hardware": "this-cpu", "sequence_tokens": 128, "precision": "fp32"}
    return RunRecord(
        id=name,
        state="done",
        started="2026-11-15T12:00:00+00:00",
        model={"architecture": "transformer", "name": "tiny"},
        task="language",
        training=Training(steps=steps),
        plan=plan,
        data={},
        environment={},
        steps_done=steps,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside") / "runs"
    (folder.parent / "secret.json").write_text(OUTSIDE)
    (folder.parent / RECORD).write_text(OUTSIDE)
    for name in ("0001", "0002"):
        (folder / name).mkdir(parents=True)
        write_record(folder / name, a_record(name))
    (folder / "0003").mkdir()
    (folder / "0003" / RECORD).write_text("{ damaged")
    (folder / "0002" / STEPS).write_text("no step\n")
    (folder / "notes.json").write_text(OUTSIDE)
    return folder


@contextmanager
def running(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with running(listening(Live(store), 0)) as found:
        yield found


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


def address(server: Server) -> tuple[str, int]:
    return str(server.server_address[0]), server.server_port


def raw(server: Server, request: bytes) -> bytes:
    """The whole answer to bytes as they are."""
    with socket.create_connection(address(server), timeout=120) as connection:
        connection.sendall(request)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def ask(server: Server, target: str, method: str = "GET", host: str | None = None, **headers: str) -> Reply:
    """One request whose target is sent as it is."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{server.server_port}'}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    answer = raw(server, ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape"))
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ")[::2] for line in rest)
    return Reply(int(first.split()[1]), dict(pairs), body)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/data.json",
        "/results.csv",
        "/results.md",
        "/run/0001.json",
        "/predict?model=gpt2&on=h200",
        "/around?model=gpt2",
    ],
)
def test_every_route_answers_with_its_headers(server: Server, path: str) -> None:
    reply = ask(server, path)
    assert reply.status == 200
    assert len(reply.body) == int(reply.headers["Content-Length"]) > 0
    assert HEADERS.items() <= reply.headers.items()
    assert "default-src 'none'" in reply.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]
    assert "unsafe-eval" not in reply.headers["Content-Security-Policy"]
    assert not [name for name in reply.headers if name.lower().startswith("access-control")]
    head = ask(server, path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == reply.headers["Content-Length"]
    again = ask(server, path, If_None_Match=reply.headers["ETag"])
    assert (again.status, again.body) == (304, b"")
    assert ask(server, path, If_None_Match='"another"').status == 200


@pytest.mark.parametrize(
    "query", ["model=/etc/passwd", "on=mine.toml", "seq=1&seq=2", "%00", "&".join(["a=b"] * 99), "=" * 9]
)
def test_a_question_that_is_none_is_refused_in_words(server: Server, query: str) -> None:
    for path in ("/predict", "/plan", "/around"):
        reply = ask(server, f"{path}?{query}")
        told = json.loads(reply.body)
        assert (reply.status, told["kind"]) == (400, "refused") and told["what"]
    assert ask(server, f"/predict?config={'a' * 70_000}").status == 414


@pytest.mark.parametrize("headers", [{"Origin": "http://elsewhere.example"}, {"Sec_Fetch_Site": "cross-site"}])
def test_no_other_site_asks(server: Server, headers: dict[str, str]) -> None:
    assert ask(server, "/predict?model=gpt2&on=h200", **headers).status == 403
    own = {"Origin": f"http://127.0.0.1:{server.server_port}", "Sec_Fetch_Site": "same-origin"}
    assert json.loads(ask(server, "/predict?model=gpt2&on=h200", **own).body)["kind"] == "predicted"


def test_a_search_ends_when_the_one_who_asked_goes_away(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def search(_: str, is_wanted: Callable[[], bool]) -> str | None:
        while is_wanted():
            time.sleep(0.01)
        ended.set()
        return None

    monkeypatch.setattr(server.live.searches, "ask", search)
    with socket.create_connection(address(server), timeout=120) as connection:
        host = f"127.0.0.1:{server.server_port}"
        connection.sendall(f"GET /plan?model=gpt2 HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert not ended.wait(0.1)
    assert ended.wait(60)


def test_the_data_are_the_runs_by_column_and_broken_ones_are_among_them(server: Server) -> None:
    data = json.loads(ask(server, "/data.json").body)
    assert (data["count"], data["live"]) == (3, True)
    assert tuple(data["names"]) == FIELDS
    runs = data["columns"][FIELDS.index("run")]["values"]
    assert runs == ["0001", "0002", "0003"]
    rows = list(csv.DictReader(io.StringIO(ask(server, "/results.csv").body.decode())))
    assert [(row["run"], row["state"]) for row in rows] == [("0001", "ok"), ("0002", "ok"), ("0003", "unreadable")]
    assert rows[2]["reason"]
    assert b"tiny" in ask(server, "/results.md").body
    page = ask(server, "/").body
    assert b'data-live="true"' in page
    assert b"0003" in page


def test_the_page_and_its_header_allow_the_same(server: Server) -> None:
    reply = ask(server, "/")
    rules = reply.headers["Content-Security-Policy"].removesuffix("; frame-ancestors 'none'")
    assert "connect-src 'self'" in rules
    assert rules.replace("'", "&#x27;").encode() in reply.body


def test_details_of_a_run_and_of_one_that_is_damaged(server: Server) -> None:
    assert json.loads(ask(server, "/run/0001.json").body)["state"] == "ok"
    # Its steps are damaged, the rest is shown.
    assert json.loads(ask(server, "/run/0002.json").body)["model"] == "tiny"
    broken = json.loads(ask(server, "/run/0003.json").body)
    assert broken["state"] == "unreadable"
    assert "damaged" in broken["reason"]
    assert ask(server, "/run/0004.json").status == 404


NOWHERE = (
    *(
        "/run/../secret.json",
        "/run/..%2fsecret.json",
        "/run/%2e%2e%2fsecret.json",
        "/../secret.json",
        "/../record.json",
    ),
    *("//", "//data.json", "/run//0001.json", "/run/0001", "/run/0001.json/", "/run/", "/runs", "/notes.json"),
    *(
        "/run/1.json",
        "/run/00001.json",
        "/run/0001.json%00",
        "/run/0001%00.json",
        "/run/00\x0001.json",
        "/run/+001.json",
    ),
    *("/run/٠٠٠١.json", "/run/０００１.json", "/run/%D9%A0%D9%A0%D9%A0%D9%A1.json", "/etc/passwd", "/run//etc/passwd"),
    *(
        "http://127.0.0.1/",
        "file:///etc/passwd",
        "*",
        "data.json",
        "/data.json;x",
        "/DATA.JSON",
        "/%2e",
        "/./data.json",
    ),
    *("\\..\\secret.json", "/run/..\\secret.json", "/run/0001/record.json", "/0001/record.json", "/.index.json"),
    "/run/" + "0" * 1000 + "1.json",
)


@pytest.mark.parametrize("target", NOWHERE, ids=range(len(NOWHERE)))
def test_nothing_else_is_found_and_nothing_leaks(server: Server, target: str) -> None:
    reply = ask(server, target)
    assert reply.status in (400, 404)
    assert OUTSIDE.encode() not in reply.body
    assert b"root:" not in reply.body
    assert b"Traceback" not in reply.body
    assert len(reply.body) < 200


@given(target=st.text(st.characters(exclude_categories=["Cc", "Zs", "Zl", "Zp", "Cs"]), min_size=1, max_size=60))
@example("?\U00049800")
@settings(max_examples=40)
def test_any_address_is_a_route_or_nothing(server: Server, target: str) -> None:
    path = "/" + target
    reply = ask(server, path)
    known = path.partition("?")[0] in (*serving.ROUTES, "/run/0001.json", "/run/0002.json")
    # A byte of a letter that is sent as it is may be a blank to those who read requests as Latin-1.
    assert reply.status in ((400, 404) if not known else (200,) if path.isascii() else (200, 400))
    assert OUTSIDE.encode() not in reply.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "X"])
def test_only_get_and_head(server: Server, method: str) -> None:
    reply = ask(server, "/data.json", method)
    assert reply.status == 405
    assert reply.headers["Allow"] == "GET, HEAD"
    assert HEADERS.items() <= reply.headers.items()


def test_names_of_this_machine_alone(server: Server) -> None:
    port = server.server_port
    for good in ("localhost", "127.0.0.1", "LOCALHOST"):
        assert ask(server, "/data.json", host=f"{good}:{port}").status == 200
    for bad in (
        "evil.example",
        f"evil.example:{port}",
        "localhost",
        f"127.0.0.1:{port + 1}",
        "192.168.0.1",
        f"127.0.0.1.:{port}",
    ):
        reply = ask(server, "/data.json", host=bad)
        assert (reply.status, b"count" in reply.body) == (403, False)
    assert b" 403 " in raw(server, b"GET / HTTP/1.1\r\n\r\n").partition(b"\r\n")[0]
    twice = f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\nHost: evil.example\r\n\r\n".encode()
    assert b" 403 " in raw(server, twice).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost:%d\r\n\r\n", (b"414",)),
        (b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n" + b"X: " + b"a" * 70_000 + b"\r\n\r\n", (b"431", b"400")),
        (b"GET / HTTP/1.1\r\nHost: localhost:%d\r\n" + b"X: 1\r\n" * 200 + b"\r\n", (b"431", b"400")),
        (b"nonsense\r\n\r\n", (b"400",)),
        (b"GET / HTTP/9.9\r\n\r\n", (b"505",)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (b"400",)),
    ],
    ids=["address", "header", "headers", "nonsense", "version", "tls"],
)
def test_requests_are_bounded(server: Server, request_bytes: bytes, statuses: tuple[bytes, ...]) -> None:
    request = request_bytes.replace(b"%d", str(server.server_port).encode())
    try:
        answer = raw(server, request)
    except ConnectionResetError:
        # Closed with bytes of ours unread: the answer may be lost on the way.
        return
    assert answer.split()[1] in statuses
    assert b"Traceback" not in answer
    assert ask(server, "/data.json").status == 200


def test_rows_have_a_price_where_one_is_given(store: Path) -> None:
    answer = Live(store, price=3.6).answer("/results.csv")
    assert answer is not None
    rows = list(csv.DictReader(answer.body.decode().splitlines()))
    assert rows
    for row in rows:
        assert float(row["price_per_device_hour"]) == 3.6
        rate = row["predicted_tokens_per_s" if row["state"] == "planned" else "tokens_per_s"]
        if rate:
            assert float(row["tokens_per_dollar"]) == pytest.approx(1000 * float(rate) / int(row["devices"]))
    refused = CliRunner().invoke(app, ["serve", "--price", "nothing", "--store", str(store)])
    assert isinstance(refused.exception, FlopwiseError) and "--price" in str(refused.exception)


def test_the_store_is_read_once_in_two_seconds_however_many_ask(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = collecting.collect

    def counted(*words: object, **named: object) -> collecting.Collected:
        calls.append(1)
        return real(*words, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting, "collect", counted)
    now = [100.0]
    live = Live(store, clock=lambda: now[0])
    threads = [threading.Thread(target=live.answer, args=("/data.json",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live.answer("/results.csv")
    assert len(calls) == 1
    now[0] += 1.9
    live.answer("/data.json")
    assert len(calls) == 1
    now[0] += 0.2
    live.answer("/data.json")
    assert len(calls) == 2


def test_new_runs_change_the_data_and_nothing_else_does(tmp_path: Path) -> None:
    now = [0.0]
    live = Live(tmp_path / "runs", clock=lambda: now[0])

    def data() -> serving.PageAnswer:
        now[0] += 3
        found = live.answer("/data.json")
        assert found is not None
        return found

    empty = data()
    assert json.loads(empty.body)["count"] == 0
    assert data().etag == empty.etag
    (tmp_path / "runs" / "0001").mkdir(parents=True)
    write_record(tmp_path / "runs" / "0001", a_record("0001"))
    one = data()
    assert one.etag != empty.etag
    assert data().etag == one.etag
    write_record(tmp_path / "runs" / "0001", replace(a_record("0001"), state="failed", reason="no"))
    assert data().etag != one.etag


@pytest.mark.parametrize("error", [FlopwiseError("the disk is gone", why="why"), RuntimeError("secret detail")])
def test_what_fails_is_told_in_a_sentence(
    store: Path, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(collecting, "collect", failing)
    with running(listening(Live(store), 0)) as server:
        reply = ask(server, "/data.json")
        assert reply.status == 500
        assert str(error).splitlines()[0] not in reply.body.decode()
        assert b"Traceback" not in reply.body
        assert HEADERS.items() <= reply.headers.items()
        assert ask(server, "/run/0001.json").status == 200
    assert str(error).splitlines()[0] in capsys.readouterr().err


def test_a_port_that_is_taken(store: Path) -> None:
    first = listening(Live(store), 0)
    try:
        assert first.server_address[0] == "127.0.0.1"
        with pytest.raises(FlopwiseError, match=f"port {first.server_port} cannot be had") as caught:
            listening(Live(store), first.server_port)
        assert "in use" in str(caught.value.why)
        assert "--port 0" in str(caught.value.hint)
    finally:
        first.server_close()


@pytest.mark.parametrize("words", [("--port", "70000"), ("--port", "-1"), ("--port", "x"), ("--store", __file__)])
def test_mistakes_are_told(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, FlopwiseError | SystemExit)
    assert result.exit_code != 0


def test_the_command_says_its_address_and_ends_quietly(store: Path) -> None:
    words = [
        sys.executable,
        "-c",
        "from flopwise.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--store",
        str(store),
    ]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        port = int(line.partition("http://127.0.0.1:")[2].partition("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", "/run/0001.json")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert out == ""
    assert "Traceback" not in err
