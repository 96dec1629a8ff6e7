"""The smoke questions against a real HTTP server on loopback that can misbehave in every way that matters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ds4 import probe

Answers = dict[str, Callable[[dict[str, Any]], tuple[int, str]]]

QUESTIONS: list[dict[str, Any]] = [
    {"name": "capital", "api": "chat", "prompt": "Capital of France?", "expect": "paris", "finish": ["stop"]},
    {"name": "completions", "api": "completions", "prompt": "Paris is", "finish": ["stop", "length"]},
    {"name": "responses", "api": "responses", "prompt": "Colour?", "finish": ["completed"]},
    {"name": "messages", "api": "messages", "prompt": "Fruit?", "finish": ["end_turn"]},
    {"name": "stream", "api": "chat", "prompt": "Count.", "stream": True, "finish": ["stop"]},
]


class Engine:
    """A server whose answers a test may replace, path by path."""

    def __init__(self) -> None:
        self.port = 0
        self.drafts = 10.0
        self.seen: list[dict[str, Any]] = []
        self.paths: Answers = {
            "/v1/models": lambda body: (200, json.dumps({"object": "list", "data": [{"id": "m"}, {"id": "other"}]})),
            "/metrics": self.metrics,
            "/v1/chat/completions": self.chat,
            "/v1/completions": lambda body: (
                200,
                json.dumps({"choices": [{"text": " nice", "finish_reason": "length"}]}),
            ),
            "/v1/responses": lambda body: (
                200,
                json.dumps(
                    {
                        "status": "completed",
                        "output": [
                            {"type": "reasoning", "content": [{"text": "hm"}]},
                            {"type": "message", "content": [{"type": "output_text", "text": "Blue"}]},
                        ],
                    }
                ),
            ),
            "/v1/messages": lambda body: (
                200,
                json.dumps({"content": [{"type": "text", "text": "Pear"}], "stop_reason": "end_turn"}),
            ),
        }

    def metrics(self, body: dict[str, Any]) -> tuple[int, str]:
        self.drafts += 5
        return 200, f"# HELP x\nds4_spec_drafts_total {self.drafts}\nds4_requests_inflight 2\n"

    def chat(self, body: dict[str, Any]) -> tuple[int, str]:
        if not body.get("stream"):
            choice = {"message": {"content": "It is Paris."}, "finish_reason": "stop"}
            return 200, json.dumps({"choices": [choice]})
        events = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "one "}}]},
            {"choices": [{"delta": {"content": "two"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {}},
        ]
        return 200, "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: dict[str, Any]) -> None:
            made.seen.append({"path": self.path, "body": body, "headers": dict(self.headers)})
            status, text = made.paths[self.path](body) if self.path in made.paths else (404, "unknown endpoint")
            if status == 0:  # a server that dies while it answers
                self.connection.close()
                return
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer({})

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda request, client_address: None  # type: ignore[method-assign]  # a client that gave up is the test
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    made.port = server.server_address[1]
    yield made
    server.shutdown()
    server.server_close()


def smoke(engine: Engine, **changes: Any) -> probe.Smoke:
    values: dict[str, Any] = {
        "model": "m",
        "questions": QUESTIONS,
        "timeout_seconds": 5,
        "total_seconds": 20,
        "speculation": True,
        "forbidden_log": ["generic CUDA build"],
        "journal": "listening",
    }
    return probe.smoke("127.0.0.1", engine.port, **{**values, **changes})


def test_a_good_engine_passes_every_check(engine: Engine) -> None:
    result = smoke(engine)
    assert result.failures == []
    assert [check.name for check in result.checks] == [
        "model",
        "capital",
        "completions",
        "responses",
        "messages",
        "stream",
        "speculation",
        "boot log",
    ]
    assert result.ok
    assert 0 < result.first_answer_seconds <= result.seconds
    asked = next(entry["body"] for entry in engine.seen if entry["path"] == "/v1/chat/completions")
    assert asked["temperature"] == 0
    assert asked["model"] == "m"
    assert json.loads(json.dumps(result.transcript))["questions"][0]["answer"]


def reply(text: str, finish: str = "stop") -> Callable[[dict[str, Any]], tuple[int, str]]:
    return lambda body: (200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}))


@pytest.mark.parametrize(
    ("path", "answer", "fails", "says"),
    [
        ("/v1/models", lambda body: (200, '{"data": [{"id": "x"}]}'), "model", "m is not listed (x)"),
        ("/v1/models", lambda body: (503, "busy"), "model", "not listed (503)"),
        ("/v1/chat/completions", reply("It is Berlin."), "capital", "'paris' expected"),
        ("/v1/chat/completions", reply("Paris", "length"), "capital", "finish reason 'length'"),
        ("/v1/chat/completions", reply("  "), "capital", "an empty answer"),
        ("/v1/chat/completions", lambda body: (500, "CUDA error"), "capital", "HTTP 500: CUDA error"),
        ("/v1/chat/completions", lambda body: (200, "<html>"), "capital", "not the shape"),
        ("/v1/chat/completions", lambda body: (200, '{"choices": []}'), "capital", "not the shape"),
        ("/v1/chat/completions", lambda body: (0, ""), "capital", "RemoteDisconnected"),
        ("/v1/completions", lambda body: (404, "unknown endpoint"), "completions", "HTTP 404"),
        ("/v1/responses", lambda body: (200, '{"output": [], "status": "completed"}'), "responses", "an empty answer"),
        ("/v1/messages", lambda body: (200, '{"type": "error"}'), "messages", "not the shape"),
        ("/metrics", lambda body: (200, "up 1\n"), "speculation", "/metrics has no ds4_spec_drafts_total"),
        ("/metrics", lambda body: (200, "ds4_spec_drafts_total 7\n"), "speculation", "nothing was drafted"),
    ],
)
def test_each_misbehaviour_fails_its_own_check(engine: Engine, path: str, answer: Any, fails: str, says: str) -> None:
    engine.paths[path] = answer
    result = smoke(engine)
    assert not result.ok
    found = {check.name: check for check in result.checks}
    assert not found[fails].ok
    assert says in found[fails].text


@pytest.mark.parametrize(
    "text",
    ["", "data: [DONE]\n\n", 'data: {"choices": [{"delta": {"content": "x"}}]}\n\n', "data: {torn\n\ndata: [DONE]\n\n"],
)
def test_a_stream_that_is_empty_cut_or_torn_is_no_answer(text: str) -> None:
    assert probe.read_stream(text) is None


def test_a_plain_engine_is_not_asked_for_drafts(engine: Engine) -> None:
    engine.paths["/metrics"] = lambda body: (404, "")
    result = smoke(engine, speculation=False)
    assert result.ok
    assert "speculation" not in [check.name for check in result.checks]


def test_a_sign_of_a_wrong_build_in_the_log_fails(engine: Engine) -> None:
    result = smoke(engine, journal="ds4: WARNING: this is a generic CUDA build; slow")
    assert result.failures == ["boot log: it says 'generic CUDA build'"]


def test_a_trickle_ends_at_the_limit(engine: Engine) -> None:
    def slow(body: dict[str, Any]) -> tuple[int, str]:
        time.sleep(3)
        return 200, "{}"

    engine.paths["/v1/chat/completions"] = slow
    start = time.monotonic()
    result = smoke(engine, timeout_seconds=0.3, total_seconds=0.7, speculation=False)
    assert time.monotonic() - start < 2.5
    assert "TimeoutError" in result.failures[0] or "timed out" in result.failures[0]
    assert any("not asked" in failure for failure in result.failures) or len(result.failures) >= 2


def test_proxies_of_the_environment_are_never_used(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert smoke(engine).ok


def test_readiness_is_an_answer_and_nothing_else(engine: Engine) -> None:
    port = engine.port
    assert probe.is_ready("0.0.0.0", port)  # noqa: S104  (asked on loopback)
    engine.paths["/v1/models"] = lambda body: (503, "")
    assert not probe.is_ready("127.0.0.1", port)
    assert not probe.is_ready("127.0.0.1", 9)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('a{x="1"} 2\na{x="2"} 3\n', {"a": 5.0}),
        ("# TYPE a counter\na 1e3\nbroken\nb not-a-number\n", {"a": 1000.0}),
        ("", {}),
    ],
)
def test_metrics(text: str, values: dict[str, float]) -> None:
    assert probe.parse_metrics(text) == values
