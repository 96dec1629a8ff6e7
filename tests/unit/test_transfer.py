"""What counts as an answer, whom the token is sent to, and what a refusal means."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds4 import transfer
from ds4.errors import Ds4Error
from ds4.transfer import Network, TransferError

CONTENT = bytes(range(256)) * 8


class Web(http.server.ThreadingHTTPServer):
    """Answers what a test put in ``answers``: a function of the request, for each path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, Any] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.other = f"http://localhost:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Web

    def do_GET(self) -> None:
        self.server.seen.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        status, headers, body = self.server.answers[self.path](self.headers)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if self.headers.get("X-Close"):
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass


def ranged(headers: Any) -> tuple[int, dict[str, str], bytes]:
    start, end = (int(part) for part in headers["Range"].removeprefix("bytes=").split("-"))
    return 206, {"Content-Range": f"bytes {start}-{end}/{len(CONTENT)}"}, CONTENT[start : end + 1]


def fixed(status: int, body: bytes = b"", **headers: str) -> Any:
    return lambda _request: (status, {key.replace("_", "-"): value for key, value in headers.items()}, body)


@pytest.fixture
def web() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def fetch(url: str, start: int = 0, end: int = 100, network: Network | None = None, **wanted: Any) -> bytes:
    source = transfer.source(
        url, network or Network(stall_seconds=2), wanted.get("size", len(CONTENT)), wanted.get("sha256", "")
    )
    lines = source.connections()
    try:
        body = source.open(lines, start, end)
        data, buffer = b"", memoryview(bytearray(64))
        while len(data) < end - start:
            data += buffer[: body.readinto(buffer)]
        body.close()
        return data
    finally:
        lines.close()


def test_a_range_through_a_redirect_and_a_kept_connection(web: Web) -> None:
    web.answers = {
        "/resolve": fixed(302, Location="/signed?sig=1", X_Linked_Size=str(len(CONTENT))),
        "/signed?sig=1": ranged,
    }
    source = transfer.source(web.url + "/resolve", Network(), len(CONTENT), "")
    lines = source.connections()
    buffer = memoryview(bytearray(1000))
    for start in (0, 500, 1000):
        body = source.open(lines, start, start + 10)
        assert body.readinto(buffer) == 10
        assert buffer[:10] == CONTENT[start : start + 10]
        body.close()
    assert [path for path, _ in web.seen] == ["/resolve", "/signed?sig=1", "/signed?sig=1", "/signed?sig=1"]
    assert source.name == web.url + "/resolve"


def test_an_expired_address_is_asked_for_again(web: Web) -> None:
    state = {"signed": "/a"}
    web.answers = {
        "/resolve": lambda _h: (302, {"Location": state["signed"]}, b""),
        "/a": lambda h: ranged(h) if state["signed"] == "/a" else (403, {}, b"expired"),
        "/b": ranged,
    }
    source = transfer.source(web.url + "/resolve", Network(), len(CONTENT), "")
    lines = source.connections()
    source.open(lines, 0, 10).close()
    state["signed"] = "/b"
    with pytest.raises(TransferError) as caught:
        source.open(lines, 10, 20)
    assert not caught.value.final and not caught.value.first
    source.open(lines, 10, 20).close()
    assert [path for path, _ in web.seen] == ["/resolve", "/a", "/a", "/resolve", "/b"]


HERE: Any = {"token": "hf_secret", "token_hosts": ("127.0.0.1", "hub.example")}


def test_the_token_goes_to_the_first_host_only(web: Web) -> None:
    web.answers = {
        "/resolve": fixed(307, Location="/renamed"),
        "/renamed": fixed(302, Location=web.other + "/cdn"),
        "/cdn": ranged,
    }
    fetch(web.url + "/resolve", network=Network(**HERE, allowed_hosts=("localhost",)))
    sent = {path: headers.get("authorization") for path, headers in web.seen}
    assert sent == {"/resolve": "Bearer hf_secret", "/renamed": "Bearer hf_secret", "/cdn": None}


@pytest.mark.parametrize("port_changes", [True, False])
def test_another_port_or_scheme_is_another_host_for_the_token(port_changes: bool) -> None:
    source = transfer.HttpSource("https://hub.example/x", Network(**HERE), 1, "")
    url = "https://hub.example:8443/x" if port_changes else "http://hub.example/x"
    assert source._authorization(url) == {}
    assert source._authorization("https://hub.example:443/y") != {}


@pytest.mark.parametrize("url", ["http://nas.lan/models/x.gguf", "https://mirror.example/o/n/resolve/r/x.gguf"])
def test_the_token_is_not_for_every_source(url: str) -> None:
    source = transfer.HttpSource(url, Network(**HERE), 1, "")
    assert source._authorization(url) == {}


def test_a_refusal_says_that_the_token_was_kept_back(web: Web) -> None:
    web.answers = {"/x": fixed(401)}
    with pytest.raises(TransferError) as caught:
        fetch(web.url + "/x", network=Network(token="hf_secret", token_hosts=("hub.example",)))
    assert caught.value.cure.startswith("weights_token_hosts: [127.0.0.1]")
    assert web.seen[0][1].get("authorization") is None


def test_an_address_that_cannot_be_used(web: Web) -> None:
    with pytest.raises(TransferError, match="cannot be used") as caught:
        transfer.source("http://nas:port/x", Network(), 1, "")
    assert caught.value.final
    web.answers = {"/x": fixed(302, Location="http://h:99999/y")}
    with pytest.raises(TransferError, match="cannot be used"):
        fetch(web.url + "/x")
    assert transfer.bare("http://u:p@nas:port/x?sig=1") == "http://nas:port/x"


def test_a_mirror_may_not_send_us_anywhere(web: Web) -> None:
    web.answers = {"/resolve": fixed(302, Location=web.other + "/cdn"), "/cdn": ranged}
    with pytest.raises(TransferError) as caught:
        fetch(web.url + "/resolve")
    assert caught.value.final
    assert "localhost" in caught.value.reason
    assert caught.value.cure.startswith("weights_allowed_hosts: [localhost]")
    assert [path for path, _ in web.seen] == ["/resolve"]


def test_hugging_face_may_send_us_to_its_cdn_but_not_to_plain_http() -> None:
    source = transfer.HttpSource("https://huggingface.co/x", Network(), 1, "")
    assert source._checked("https://cas-bridge.xethub.hf.co/y", source.url) == "https://cas-bridge.xethub.hf.co/y"
    with pytest.raises(TransferError, match="plain http"):
        source._checked("http://cas-bridge.xethub.hf.co/y", source.url)
    with pytest.raises(TransferError, match="not HTTP"):
        source._checked("ftp://huggingface.co/y", source.url)
    lookalike = transfer.HttpSource("https://nothuggingface.co/x", Network(), 1, "")
    with pytest.raises(TransferError, match="allowed hosts"):
        lookalike._checked("https://cas-bridge.xethub.hf.co/y", lookalike.url)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            fixed(200, b"<html>", Content_Type="text/html; charset=utf-8"),
            "ignored the Range request (HTTP 200, text/html)",
        ),
        (fixed(206, CONTENT[:100], Content_Range=f"bytes 1-100/{len(CONTENT)}"), "Content-Range"),
        (fixed(206, CONTENT[:100], Content_Range=f"bytes 0-99/{len(CONTENT) + 1}"), "Content-Range"),
        (fixed(206, CONTENT[:100], Content_Range="bytes 0-99/*"), "Content-Range"),
        (fixed(206, CONTENT[:100]), "Content-Range None"),
        (fixed(206, CONTENT[:99], Content_Range=f"bytes 0-99/{len(CONTENT)}"), "length 99"),
        (fixed(206, CONTENT[:101], Content_Range=f"bytes 0-99/{len(CONTENT)}"), "length 101"),
        (
            fixed(206, CONTENT[:100], Content_Range=f"bytes 0-99/{len(CONTENT)}", Content_Encoding="gzip"),
            "Content-Range",
        ),
        (fixed(206, b"--x", Content_Type="multipart/byteranges; boundary=x"), "Content-Range None"),
        (fixed(500), "HTTP 500"),
        (fixed(503, Retry_After="7"), "HTTP 503"),
    ],
)
def test_anything_but_the_range_is_refused_and_may_pass(web: Web, answer: Any, reason: str) -> None:
    web.answers = {"/x": answer}
    with pytest.raises(TransferError) as caught:
        fetch(web.url + "/x")
    assert reason in caught.value.reason
    assert not caught.value.final and not caught.value.first


@pytest.mark.parametrize(
    ("status", "cure"),
    [(401, "weights_token_file"), (403, "weights_token_file"), (404, "ds4_weights"), (410, "ds4_weights"), (416, "")],
)
def test_refusals_that_end_it_when_they_come_first(web: Web, status: int, cure: str) -> None:
    web.answers = {"/repo/file.gguf": fixed(status)}
    with pytest.raises(TransferError) as caught:
        fetch(web.url + "/repo/file.gguf")
    assert caught.value.first and not caught.value.final
    assert f"HTTP {status}" in caught.value.reason
    assert cure in caught.value.cure


def test_retry_after_of_a_limit(web: Web) -> None:
    web.answers = {"/x": fixed(429, Retry_After="12")}
    with pytest.raises(TransferError) as caught:
        fetch(web.url + "/x")
    assert caught.value.retry_after_seconds == 12.0


def test_hub_says_that_another_file_is_there(web: Web) -> None:
    web.answers = {
        "/size": fixed(302, Location="/cdn", X_Linked_Size="7"),
        "/hash": fixed(302, Location="/cdn", X_Linked_ETag=f'"{"cd" * 32}"'),
        "/weak": fixed(302, Location="/cdn", X_Linked_ETag='W/"not-a-hash"', X_Repo_Commit="1" * 40),
        "/cdn": ranged,
    }
    for path, found in (("/size", "7 bytes, wanted 2048"), ("/hash", "cd" * 32)):
        with pytest.raises(TransferError) as caught:
            fetch(web.url + path, sha256="ab" * 32)
        assert caught.value.final
        assert found in caught.value.reason
        assert "ds4_weights" in caught.value.cure
    assert "/cdn" not in [path for path, _ in web.seen], "not a byte before that is settled"
    assert fetch(web.url + "/weak", sha256="ab" * 32) == CONTENT[:100]


def test_probe_learns_length_hash_and_commit(web: Web) -> None:
    tag = f'"{"AB" * 32}"'
    web.answers = {"/x": fixed(302, Location="/cdn", X_Linked_ETag=tag, X_Repo_Commit="1" * 40), "/cdn": ranged}
    source = transfer.source(web.url + "/x", Network(), None, "")
    assert source.probe(source.connections()) == transfer.Claims(len(CONTENT), "ab" * 32, "1" * 40)


def test_redirects_without_an_end(web: Web) -> None:
    web.answers = {"/x": fixed(302, Location="/x")}
    with pytest.raises(TransferError, match="more than 8 redirects"):
        fetch(web.url + "/x")


def test_a_kept_connection_that_died_is_opened_again(web: Web) -> None:
    web.answers = {"/x": ranged}
    source = transfer.source(web.url + "/x", Network(), len(CONTENT), "")
    lines = source.connections()
    source.open(lines, 0, 1).close()
    body = source.open(lines, 0, 10)
    body.readinto(memoryview(bytearray(10)))
    body.close()
    for connection in lines._idle.values():
        assert connection.sock is not None
        connection.sock.close()
        connection.sock = None
    body = source.open(lines, 10, 20)
    assert body.readinto(memoryview(bytearray(10))) == 10


def test_an_unread_answer_is_not_kept(web: Web) -> None:
    web.answers = {"/x": ranged}
    source = transfer.source(web.url + "/x", Network(), len(CONTENT), "")
    lines = source.connections()
    source.open(lines, 0, 1000).close()
    assert not lines._idle


def test_nobody_listens() -> None:
    with pytest.raises(TransferError, match="refused") as caught:
        fetch("http://127.0.0.1:1/x")
    assert not caught.value.final


def test_an_aborted_worker_begins_nothing(web: Web) -> None:
    web.answers = {"/x": ranged}
    source = transfer.source(web.url + "/x", Network(), len(CONTENT), "")
    lines = source.connections()
    lines.abort()
    with pytest.raises(TransferError, match="stopped"):
        source.open(lines, 0, 1)
    assert web.seen == []


def test_a_local_file_is_a_source(tmp_path: Path) -> None:
    path = tmp_path / "with space.gguf"
    path.write_bytes(CONTENT)
    url = f"file://{str(path).replace(' ', '%20')}"
    assert fetch(url, 5, 50) == CONTENT[5:50]
    with pytest.raises(TransferError, match=r"2048 bytes, wanted 7") as caught:
        fetch(url, size=7)
    assert caught.value.final
    with pytest.raises(TransferError, match="No such file"):
        fetch(f"file://{tmp_path}/none")


def test_other_kinds_of_addresses() -> None:
    with pytest.raises(Ds4Error, match="ftp://host/x"):
        transfer.source("ftp://user:secret@host/x?sig=1", Network(), None, "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pw@host:8443/a/b?X-Amz-Signature=1#f", "https://host:8443/a/b"),
        ("http://host/a", "http://host/a"),
        ("file:///mnt/usb/x.gguf", "file:///mnt/usb/x.gguf"),
    ],
)
def test_no_message_shows_a_signature(url: str, shown: str) -> None:
    assert transfer.bare(url) == shown


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        (None, None, None),
        ("", None, None),
        ("0", None, 0.0),
        ("30", None, 30.0),
        ("-5", None, 0.0),
        ("99999", None, 900.0),
        ("soon", None, None),
        ("Sun, 29 Nov 2026 10:00:30 GMT", "Sun, 29 Nov 2026 10:00:00 GMT", 30.0),
        ("Sun, 29 Nov 2026 09:00:00 GMT", "Sun, 29 Nov 2026 10:00:00 GMT", 0.0),
        ("Sun, 29 Nov 2026 10:00:30 GMT", "yesterday", None),
    ],
)
def test_retry_after(value: str | None, date: str | None, seconds: float | None) -> None:
    assert transfer.retry_after_seconds(value, date) == seconds


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        ("bytes 0-9/100", (0, 9, 100)),
        ("bytes 0-9/*", None),
        ("bytes */100", None),
        ("items 0-9/100", None),
        ("bytes 0-9/100, bytes 20-29/100", None),
        (None, None),
    ],
)
def test_content_range(value: str | None, parsed: tuple[int, int, int] | None) -> None:
    assert transfer.content_range(value) == parsed


def test_proxy_but_not_for_neighbours() -> None:
    network = Network(proxy_url="http://proxy:3128", no_proxy="nas.lan,.example.org")
    assert network.proxied("huggingface.co")
    assert not network.proxied("nas.lan")
    assert not network.proxied("mirror.example.org")
    assert not Network().proxied("huggingface.co")


def test_ca_file_that_is_none(tmp_path: Path) -> None:
    bad = tmp_path / "ca.pem"
    bad.write_text("no certificate")
    for path in (bad, tmp_path / "absent.pem"):
        with pytest.raises(Ds4Error) as caught:
            Network(ca_file=str(path)).context()
        assert "weights_ca_file" in caught.value.cure
