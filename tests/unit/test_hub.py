"""The stand-in hub, fault by fault, seen by plain http.client; what later tests rest on."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.hub import ROOT, Control, Hub, weights
from lab.hub.faults import FAULTS, Rule, Rules, random_rules
from lab.hub.server import parse_range

FILE = weights.FILES[1]  # the 0731 drafter
SIZE = 300_000
SIZES = {"base": 700_000, "drafter": SIZE, "mtp": 200_000}
CONTENT = b"".join(weights.content(FILE, SIZE))
SHA256 = weights.manifest(SIZES)["0731"]["drafter"]["sha256"]
RESOLVE = f"/{FILE.repo}/resolve/{FILE.revision}/{FILE.file}"


BEARER = {"Authorization": "Bearer hf_secret"}


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes
    error: str  # name of the exception that ended the body, or empty


def ask(
    url: str, *, method: str = "GET", range_: str = "", timeout: float = 5, headers: dict[str, str] | None = None
) -> Answer:
    """One request without redirects, proxies or retries."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    sent = (headers or {}) | ({"Range": range_} if range_ else {})
    with contextlib.closing(connection):
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path, headers=sent)
        response = connection.getresponse()
        body, error = b"", ""
        try:
            while piece := response.read1(65536):
                body += piece
            # read1 ends quietly at a close; the declared length tells a short body.
            if response.length:
                error = "IncompleteRead"
        except OSError as caught:
            error = type(caught).__name__
        return Answer(response.status, response.headers, body, error)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    weights.write(str(folder), SIZES)
    (folder / FILE.repo / FILE.revision / "README.md").write_text("small\n")
    return folder


@pytest.fixture(scope="module")
def running(root: Path) -> Iterator[Hub]:
    with Hub(root) as hub:
        yield hub


@pytest.fixture
def hub(running: Hub) -> Hub:
    running.reset()
    return running


def link(hub: Hub, headers: dict[str, str] | None = None) -> str:
    answer = ask(hub.url + RESOLVE, headers=headers)
    assert answer.status == 302
    return answer.headers["Location"]


# Weights


def test_lab_weights_are_the_same_everywhere_and_tell_what_they_are(root: Path) -> None:
    manifest = weights.manifest(SIZES)
    assert manifest["0731"]["base"]["bytes"] == manifest["legacy"]["base"]["bytes"]
    hashes = {entry["sha256"] for generation in manifest.values() for entry in generation.values()}
    assert len(hashes) == 5
    for file in weights.FILES:
        path = root / file.repo / file.revision / file.file
        found = weights.describe(str(path))
        assert (found["generation"], found["role"]) == (file.generation, file.role)
        done = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == manifest[file.generation][file.role]["sha256"]
    assert weights.describe(str(root / weights.FOREIGN.repo / "main" / weights.FOREIGN.file))["role"] == ""


def test_default_lab_weights_never_change() -> None:
    # Written down on purpose: an inventory of the lab may pin it.
    assert (
        weights.manifest()["0731"]["base"]["sha256"]
        == "c649ace1e3c709a6deebe18861940787202b39a3207203a2f0ca3ac94e52606b"
    )


def test_manifest_without_a_hash_for_the_legacy_drafter() -> None:
    assert set(weights.manifest(SIZES, first_use=True)["legacy"]["drafter"]) == {"repo", "revision", "file"}


@pytest.mark.parametrize("content", [b"", b"GGU", b"<html>", b"GGUF\x02\0\0\0", CONTENT[:60]])
def test_describe_refuses_what_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        weights.describe(str(path))


def test_a_damaged_lab_file_of_the_right_size_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(SIZE))
    weights.write_file(FILE, SIZE, str(path))
    assert path.read_bytes() == CONTENT


# Like Hugging Face


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_resolve_redirects_to_a_signed_link_on_another_host(hub: Hub, method: str) -> None:
    answer = ask(hub.url + RESOLVE, method=method)
    assert answer.status == 302
    assert answer.headers["X-Linked-Size"] == str(SIZE)
    assert answer.headers["X-Linked-ETag"] == f'"{SHA256}"'
    assert answer.headers["X-Repo-Commit"] == FILE.revision
    assert "X-Xet-Hash" not in answer.headers
    location = answer.headers["Location"]
    assert location.startswith(hub.cdn_url + "/")
    assert urllib.parse.urlsplit(location).hostname != urllib.parse.urlsplit(hub.url).hostname
    assert ask(location).body == CONTENT
    assert ask(location[:-1] + ("0" if location[-1] != "0" else "1")).status == 403


@pytest.mark.parametrize(
    ("header", "first", "end"),
    [("bytes=0-0", 0, 1), ("bytes=100-199", 100, 200), ("bytes=299000-", 299000, SIZE), ("bytes=-10", SIZE - 10, SIZE)],
)
def test_ranges(hub: Hub, header: str, first: int, end: int) -> None:
    answer = ask(link(hub), range_=header)
    assert (answer.status, answer.body) == (206, CONTENT[first:end])
    assert answer.headers["Content-Range"] == f"bytes {first}-{end - 1}/{SIZE}"
    assert answer.headers["ETag"]
    assert answer.headers["Accept-Ranges"] == "bytes"


def test_unsatisfiable_range(hub: Hub) -> None:
    answer = ask(link(hub), range_=f"bytes={SIZE}-")
    assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{SIZE}")


def test_if_range_with_another_etag_gets_the_whole_file(hub: Hub) -> None:
    assert ask(link(hub), range_="bytes=5-9", headers={"If-Range": '"other"'}).status == 200


@pytest.mark.parametrize("header", ["", "bytes=-", "bytes=9-3", "bytes=0-1,5-6", "items=0-1"])
def test_ranges_that_mean_the_whole_file(header: str) -> None:
    assert parse_range(header, 100) is None


def test_wrong_letter_case_is_redirected(hub: Hub) -> None:
    answer = ask(hub.url + RESOLVE.replace("bleysg", "BleySG"))
    assert (answer.status, answer.headers["Location"]) == (307, RESOLVE)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"/{FILE.repo}/resolve/{FILE.revision}/absent.gguf", 404, "EntryNotFound"),
        (f"/{FILE.repo}/resolve/{'0' * 40}/{FILE.file}", 404, "RevisionNotFound"),
        ("/nobody/nothing/resolve/main/x.gguf", 401, "RepoNotFound"),
        (f"/{FILE.repo}/resolve/{FILE.revision}/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd", 404, "EntryNotFound"),
        (f"/{FILE.repo}/resolve/%2e%2e/{FILE.file}", 404, "EntryNotFound"),
    ],
)
def test_what_is_not_there(hub: Hub, path: str, status: int, code: str) -> None:
    answer = ask(hub.url + path)
    assert answer.status == status
    assert answer.headers["X-Error-Code"] == code


def test_small_files_are_answered_directly(hub: Hub) -> None:
    answer = ask(f"{hub.url}/{FILE.repo}/resolve/main/README.md", range_="bytes=1-2")
    assert (answer.status, answer.body) == (206, b"ma")


def test_api_lists_the_files(hub: Hub) -> None:
    info = json.loads(ask(f"{hub.url}/api/models/{FILE.repo}/revision/main").body)
    assert info["sha"] == FILE.revision
    assert {"rfilename": FILE.file} in info["siblings"]
    tree = json.loads(ask(f"{hub.url}/api/models/{FILE.repo}/tree/{FILE.revision}?recursive=true").body)
    assert [e["lfs"]["oid"] for e in tree if e["path"] == FILE.file] == [SHA256]


# Options


def test_token(hub: Hub) -> None:
    hub.options(token="hf_secret")
    assert ask(hub.url + RESOLVE).status == 401
    assert ask(hub.url + RESOLVE, headers={"Authorization": "Bearer other"}).status == 401
    location = link(hub, BEARER)
    assert ask(location).status == 200
    assert ask(location, headers=BEARER).status == 400, "signed stores refuse a second way in"
    stats = hub.stats()
    assert (stats["tokens"]["hub"], stats["tokens"]["cdn"]) == (2, 1)
    assert "hf_secret" not in json.dumps(stats)
    assert hub.options()["token"] is True
    hub.options(forbidden=True)
    assert ask(hub.url + RESOLVE, headers=BEARER).status == 403


def test_mirror_lacks_the_headers(hub: Hub) -> None:
    hub.options(mirror=True)
    headers = ask(hub.url + RESOLVE).headers
    assert not [name for name in headers if name.lower().startswith("x-")]


def test_direct_hub_needs_no_cdn(hub: Hub) -> None:
    hub.options(direct=True)
    assert ask(hub.url + RESOLVE, range_="bytes=7-9").body == CONTENT[7:10]


def test_xet_header(hub: Hub) -> None:
    hub.options(xet=True)
    assert re.fullmatch("[0-9a-f]{64}", ask(hub.url + RESOLVE).headers["X-Xet-Hash"])


def test_links_expire(hub: Hub) -> None:
    hub.options(link_seconds=0.2)
    location = link(hub)
    assert ask(location).status == 200
    time.sleep(0.25)
    assert ask(location).status == 403
    assert ask(link(hub)).status == 200


def test_requests_per_address(hub: Hub) -> None:
    hub.options(requests_per_address=2, window_seconds=0.6)
    assert [ask(hub.url + RESOLVE).status for _ in range(3)] == [302, 302, 429]
    assert ask(hub.url + RESOLVE).headers["Retry-After"] == "1"
    hub.options(send_retry_after=False)
    assert "Retry-After" not in ask(hub.url + RESOLVE).headers
    time.sleep(0.6)
    assert ask(hub.url + RESOLVE).status == 302


def test_rate_of_a_connection_and_of_all(hub: Hub) -> None:
    location = link(hub)

    def seconds_for(connections: int) -> float:
        begin = time.monotonic()
        threads = [threading.Thread(target=ask, args=(location,)) for _ in range(connections)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - begin

    hub.options(connection_rate=1_000_000)
    one = seconds_for(1)
    assert one > 0.25
    assert seconds_for(3) < 2 * one, "each connection has the rate for itself"
    hub.options(connection_rate=0, total_rate=2_000_000)
    assert seconds_for(3) > 0.4


def test_unknown_option_and_unknown_fault_are_refused(hub: Hub) -> None:
    with pytest.raises(ValueError, match=r"known: .*link_seconds"):
        hub.options(speed=1)
    with pytest.raises(ValueError, match=r"known: .*flip"):
        hub.faults({"fault": "gremlin"})
    with pytest.raises(ValueError, match="sometimes"):
        hub.faults({"fault": "cut", "sometimes": True})


# Faults


def test_cut_delivers_everything_before_it_and_only_as_often_as_asked(hub: Hub) -> None:
    hub.faults({"fault": "cut", "offset": 100_000, "count": 2})
    location = link(hub)
    for _ in range(2):
        answer = ask(location)
        assert (answer.body, answer.error) == (CONTENT[:100_000], "ConnectionResetError")
    assert ask(location, range_="bytes=100000-").body == CONTENT[100_000:]
    assert ask(location).body == CONTENT
    assert hub.stats()["bytes"]["cdn"] == 2 * 100_000 + 200_000 + SIZE
    assert hub.rules()[0]["fired"] == 2


def test_a_body_fault_waits_for_an_answer_that_covers_it(hub: Hub) -> None:
    hub.faults({"fault": "cut", "offset": 100_000, "count": -1})
    location = link(hub)
    assert ask(location, range_="bytes=100000-199999").error == ""
    assert ask(location, range_="bytes=0-99999").error == ""
    assert ask(location, range_="bytes=99999-100001").body == CONTENT[99_999:100_000]


def test_after_lets_requests_pass_and_file_chooses(hub: Hub) -> None:
    hub.faults(
        {"fault": "cut", "after": 1, "count": 1, "file": "drafter"}, {"fault": "cut", "file": "MTP", "count": -1}
    )
    location = link(hub)
    assert [ask(location).error for _ in range(3)] == ["", "ConnectionResetError", ""]


def test_short_ends_cleanly(hub: Hub) -> None:
    hub.faults({"fault": "short", "offset": 5})
    answer = ask(link(hub))
    assert (answer.body, answer.error) == (CONTENT[:5], "IncompleteRead")


def test_stall_then_reset(hub: Hub) -> None:
    hub.faults({"fault": "stall", "offset": 1000, "seconds": 0.5})
    begin = time.monotonic()
    answer = ask(link(hub))
    assert (len(answer.body), answer.error) == (1000, "ConnectionResetError")
    assert time.monotonic() - begin >= 0.5


def test_stall_ends_when_the_client_goes(hub: Hub) -> None:
    hub.faults({"fault": "stall", "offset": 1000})
    assert ask(link(hub), timeout=0.2).error == "TimeoutError"
    deadline = time.monotonic() + 3
    while hub.stats()["open"]["cdn"] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert hub.stats()["open"]["cdn"] == 0


def test_trickle(hub: Hub) -> None:
    hub.faults({"fault": "trickle", "offset": SIZE - 1000, "rate": 2000})
    begin = time.monotonic()
    assert ask(link(hub)).body == CONTENT
    assert time.monotonic() - begin > 0.4


def test_flip_has_the_right_length(hub: Hub) -> None:
    hub.faults({"fault": "flip", "offset": 1234, "count": 1})
    location = link(hub)
    body = ask(location).body
    assert len(body) == SIZE
    assert [i for i, (a, b) in enumerate(zip(body, CONTENT)) if a != b] == [1234]
    assert ask(location).body == CONTENT
    hub.faults({"fault": "flip", "offset": 1234, "count": -1})
    assert ask(location, range_="bytes=1234-1234").body != CONTENT[1234:1235]
    assert ask(location, range_="bytes=1234-1234").body != CONTENT[1234:1235]


def test_zeros_have_the_right_length(hub: Hub) -> None:
    hub.faults({"fault": "zeros", "count": 1}, {"fault": "zeros", "offset": SIZE - 7, "after": 1})
    location = link(hub)
    assert ask(location).body == bytes(SIZE)
    assert ask(location).body == CONTENT[:-7] + bytes(7)


def test_expire_refuses_the_link_but_not_a_new_one(hub: Hub) -> None:
    hub.faults({"fault": "expire", "offset": 10})
    location = link(hub)
    assert ask(location).body == CONTENT[:10]
    assert ask(location, range_="bytes=10-").status == 403
    assert ask(link(hub), range_="bytes=10-").body == CONTENT[10:]


@pytest.mark.parametrize("at", ["hub", "cdn"])
def test_status_with_and_without_retry_after(hub: Hub, at: str) -> None:
    location = link(hub)
    hub.faults(
        {"fault": "status", "status": 429, "retry_after": 7, "at": at}, {"fault": "status", "status": 503, "at": at}
    )
    url = location if at == "cdn" else hub.url + RESOLVE
    first, second, third = ask(url), ask(url), ask(url)
    assert (first.status, first.headers["Retry-After"]) == (429, "7")
    assert (second.status, second.headers["Retry-After"]) == (503, None)
    assert third.status in {200, 302}


def test_html(hub: Hub) -> None:
    hub.faults({"fault": "html"})
    answer = ask(link(hub), range_="bytes=0-99")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    assert b"Sign in" in answer.body


def test_no_head(hub: Hub) -> None:
    hub.faults({"fault": "no_head", "count": -1})
    assert ask(hub.url + RESOLVE, method="HEAD").status == 405
    assert ask(hub.url + RESOLVE).status == 302


def test_bare_answer(hub: Hub) -> None:
    hub.faults({"fault": "bare"})
    assert "X-Linked-Size" not in ask(hub.url + RESOLVE).headers
    assert "X-Linked-Size" in ask(hub.url + RESOLVE).headers


def test_redirect_elsewhere_and_in_a_circle(hub: Hub) -> None:
    hub.faults({"fault": "redirect", "url": "http://foreign.invalid/x"}, {"fault": "loop"})
    assert ask(hub.url + RESOLVE).headers["Location"] == "http://foreign.invalid/x"
    assert ask(hub.url + RESOLVE).headers["Location"] == RESOLVE


def test_ignored_range(hub: Hub) -> None:
    hub.faults({"fault": "ignore_range"})
    answer = ask(link(hub), range_="bytes=100-199")
    assert (answer.status, answer.body, answer.headers["Content-Range"]) == (200, CONTENT, None)


def test_wrong_range_sends_other_bytes(hub: Hub) -> None:
    hub.faults({"fault": "wrong_range", "extra": 50, "count": 2})
    location = link(hub)
    answer = ask(location, range_="bytes=100-199")
    assert (answer.status, answer.headers["Content-Range"]) == (206, f"bytes 150-249/{SIZE}")
    assert answer.body == CONTENT[150:250]
    assert ask(location, range_=f"bytes=100-{SIZE - 1}").headers["Content-Range"] == f"bytes 50-{SIZE - 51}/{SIZE}"


def test_wrong_total(hub: Hub) -> None:
    hub.faults({"fault": "wrong_total", "extra": 9})
    assert ask(link(hub), range_="bytes=0-9").headers["Content-Range"] == f"bytes 0-9/{SIZE + 9}"


def test_lying_lengths(hub: Hub) -> None:
    hub.faults(
        {"fault": "short_length", "extra": 10},
        {"fault": "long", "extra": 10, "after": 1},
        {"fault": "no_length", "after": 2},
    )
    location = link(hub)
    short, long, unknown = (ask(location, range_="bytes=0-99") for _ in range(3))
    assert (short.headers["Content-Length"], short.body) == ("90", CONTENT[:90])
    assert (long.headers["Content-Length"], long.body[:100], len(long.body)) == ("110", CONTENT[:100], 110)
    assert (unknown.headers["Content-Length"], unknown.body) == (None, CONTENT[:100])
    assert {a.headers["Content-Range"] for a in (short, long, unknown)} == {f"bytes 0-99/{SIZE}"}


def test_slow_start(hub: Hub) -> None:
    hub.faults({"fault": "slow_start", "seconds": 0.3})
    location = link(hub)
    begin = time.monotonic()
    assert ask(location).body == CONTENT
    assert time.monotonic() - begin >= 0.3


@pytest.mark.parametrize("at", ["hub", "cdn"])
def test_reset_and_refused_connections(hub: Hub, at: str) -> None:
    location = link(hub)
    url = location if at == "cdn" else hub.url + RESOLVE
    hub.faults({"fault": "reset", "at": at}, {"fault": "refuse", "at": at, "seconds": 0.4})
    with pytest.raises(ConnectionResetError):
        ask(url)
    with pytest.raises(ConnectionResetError):
        ask(url)
    with pytest.raises(ConnectionRefusedError):
        ask(url)
    time.sleep(0.5)
    assert ask(url).status in {200, 302}


def test_every_fault_has_a_test_here() -> None:
    text = Path(__file__).read_text()
    assert [name for name in FAULTS if f'"fault": "{name}"' not in text] == []


def test_two_faults_at_once(hub: Hub) -> None:
    hub.faults({"fault": "flip", "offset": 10}, {"fault": "cut", "offset": 20}, {"fault": "slow_start", "seconds": 0.1})
    answer = ask(link(hub))
    assert len(answer.body) == 20
    assert answer.body != CONTENT[:20]
    assert sorted(hub.stats()["requests"][-1]["faults"]) == ["cut", "flip", "slow_start"]


def test_random_rules_are_repeatable_valid_and_end_by_themselves() -> None:
    assert random_rules(7, SIZE) == random_rules(7, SIZE)
    assert len({json.dumps(random_rules(seed, SIZE)) for seed in range(50)}) > 40
    seen = set()
    for seed in range(300):
        for value in random_rules(seed, SIZE):
            rule = Rule.parse(value)
            seen.add(rule.fault)
            assert 0 < rule.count <= 3
    assert {"cut", "stall", "flip", "html", "refuse", "status"} <= seen


def test_rules_are_spent_by_threads_exactly() -> None:
    rules = Rules()
    rules.set([{"fault": "status", "status": 500, "count": 100}])
    taken: list[int] = []

    def work() -> None:
        taken.append(sum(len(rules.take("cdn", "GET", "x")) for _ in range(100)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == 100


# Routes


def through_proxy(hub: Hub, url: str, **headers: str) -> Answer:
    proxy = urllib.parse.urlsplit(hub.proxy_url)
    connection = http.client.HTTPConnection(proxy.hostname or "", proxy.port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", url, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read(), "")


def test_proxy_as_the_only_route(hub: Hub) -> None:
    hub.options(only_proxy=True)
    with pytest.raises(ConnectionResetError):
        ask(hub.url + RESOLVE)
    location = through_proxy(hub, hub.url + RESOLVE).headers["Location"]
    assert through_proxy(hub, location, Range="bytes=0-9").body == CONTENT[:10]
    stats = hub.stats()
    assert stats["refused_direct"] == 1
    assert [r["at"] for r in stats["requests"]] == ["proxy", "hub", "proxy", "cdn"]


def test_proxy_credentials_blocked_host_and_dead_host(hub: Hub) -> None:
    hub.options(proxy_credentials="ann:secret")
    assert through_proxy(hub, hub.url + RESOLVE).status == 407
    assert through_proxy(hub, hub.url + RESOLVE, Proxy_Authorization="Basic YW5uOnNlY3JldA==").status == 302
    assert "YW5uOnNlY3JldA" not in json.dumps(hub.stats())
    hub.options(proxy_credentials="", proxy_hosts=["127.0.0.1"])
    assert through_proxy(hub, hub.cdn_url + "/x").status == 403
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()[1]
    assert through_proxy(hub, f"http://127.0.0.1:{dead}/").status == 502


def test_tls_with_an_authority_of_its_own_directly_and_through_connect(root: Path) -> None:
    with Hub(root, tls=True) as hub:
        parts, proxy = urllib.parse.urlsplit(hub.url), urllib.parse.urlsplit(hub.proxy_url)
        context = ssl.create_default_context(cafile=hub.ca_file)
        with contextlib.closing(http.client.HTTPSConnection(parts.netloc, context=context, timeout=5)) as direct:
            direct.request("GET", RESOLVE)
            location = urllib.parse.urlsplit(direct.getresponse().headers["Location"])
        hub.options(only_proxy=True)
        tunnel = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, context=context, timeout=5)
        with contextlib.closing(tunnel):
            tunnel.set_tunnel(location.hostname or "", location.port)
            tunnel.request("GET", f"{location.path}?{location.query}", headers={"Range": "bytes=3-8"})
            assert tunnel.getresponse().read() == CONTENT[3:9]
        with pytest.raises(ssl.SSLCertVerificationError):
            stranger = http.client.HTTPSConnection(parts.netloc, timeout=5, context=ssl.create_default_context())
            hub.options(only_proxy=False)
            stranger.request("GET", RESOLVE)


# Process


def test_command_line(root: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "lab.hub", "serve", "--root", str(root), "--until-stdin-ends"]
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    info = json.loads(process.stdout.readline())
    control = ["--control", info["control_url"]]

    def lab_hub(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "lab.hub", *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return done.stdout

    lab_hub("faults", *control, '[{"fault": "html", "at": "hub"}]')
    assert ask(info["url"] + RESOLVE).status == 200
    assert json.loads(lab_hub("faults", *control))[0]["fired"] == 1
    assert json.loads(lab_hub("stats", *control))["requests"][0]["faults"] == ["html"]
    lab_hub("reset", *control)
    assert Control(info["control_url"]).stats()["requests"] == []
    process.communicate(timeout=5)
    assert process.returncode == 0


def test_a_hub_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not start"):
        Hub(tmp_path, "203.0.113.1")
