"""ds4-server: command line, boot, HTTP front, signals."""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
import time
from typing import Any

import api
import options as command_line
from common import FAULTS, FatalError, log, take_lock
from engine import Engine, RefusedError

MODELS = ("deepseek-v4-flash", "deepseek-v4-pro", "deepseek-chat", "deepseek-reasoner")
MAX_BODY = 64 * 1024 * 1024


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "ds4"
    sys_version = ""
    timeout = 10
    server: Front

    def do_GET(self) -> None:
        engine = self.server.engine
        path = self.path.split("?")[0]
        try:
            engine.refuse_if_busy()
            if path == "/v1/models":
                self.reply(200, api.models(engine))
            elif path.removeprefix("/v1/models/") in MODELS and path.startswith("/v1/models/"):
                self.reply(200, api.model(engine, path.removeprefix("/v1/models/")))
            elif path == "/metrics":
                self.send(200, api.metrics(engine).encode(), "text/plain; version=0.0.4")
            elif path == "/v1/stats":
                stats = api.stats(engine)
                if "application/json" in self.headers.get("Accept", ""):
                    self.reply(200, stats)
                else:
                    text = "\n".join(f"{name}: {json.dumps(value)}" for name, value in stats.items())
                    self.send(200, text.encode() + b"\n", "text/plain")
            else:
                raise RefusedError(404, "unknown endpoint")
        except RefusedError as refusal:
            self.refuse(refusal)

    def do_OPTIONS(self) -> None:
        self.send(204, b"", None)

    def do_POST(self) -> None:
        surface = api.SURFACES.get(self.path.split("?")[0])
        try:
            self.server.engine.refuse_if_busy()
            body = self.read_body()
            if surface is None:
                raise RefusedError(404, "unknown endpoint")
            surface(self, self.server.engine, body).serve()
        except RefusedError as refusal:
            self.refuse(refusal, anthropic=surface is api.Messages)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True

    def read_body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if length > MAX_BODY:
            raise RefusedError(400, "body too large")
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError:
            raise RefusedError(400, "invalid JSON") from None
        if not isinstance(body, dict):
            raise RefusedError(400, "invalid JSON: an object is needed")
        return body

    def reply(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        self.send(code, json.dumps(content).encode(), "application/json", headers)

    def send(self, code: int, data: bytes, kind: str | None, headers: dict[str, str] | None = None) -> None:
        self.begin(code, kind, {"Content-Length": str(len(data)), **(headers or {})})
        self.wfile.write(data)

    def begin(self, code: int, kind: str | None, headers: dict[str, str]) -> None:
        self.send_response(code)
        if kind:
            self.send_header("Content-Type", kind)
        if self.server.engine.options["--cors"]:
            self.send_header("Access-Control-Allow-Origin", "*")
        for name, value in {**headers, "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def refuse(self, refusal: RefusedError, *, anthropic: bool = False) -> None:
        kind = "invalid_request_error"
        if refusal.status == 429:
            kind = "rate_limit_error"
        elif refusal.status >= 500:
            kind = "api_error" if anthropic else "server_error"
        error = {"message": str(refusal), "type": kind, **refusal.extra}
        headers = {"Retry-After": str(refusal.retry_after)} if refusal.retry_after else {}
        self.reply(refusal.status, {"type": "error", "error": error} if anthropic else {"error": error}, headers)

    def log_message(self, format: str, *args: Any) -> None:
        """The engine's log has no line per request."""


class Front(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], engine: Engine) -> None:
        self.engine = engine
        self._clients = 0
        self._lock = threading.Lock()
        super().__init__(address, Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._clients += 1
            full = self._clients > self.engine.max_clients
        try:
            if full:
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 10\r\nConnection: close\r\n\r\n")
                self.shutdown_request(request)
            else:
                super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._clients -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main(arguments: list[str]) -> int:
    try:
        options = command_line.parse(arguments)
    except FatalError as error:
        log(str(error))
        return error.code
    if options["--help"]:
        print(command_line.usage())
        return 0
    if options["--version"] or options["--check-update"]:
        print(command_line.version_line())
        if options["--check-update"]:
            print("update check failed (network?)")
        return 1 if options["--check-update"] else 0
    if options["--upgrade"]:
        print("curl -fsSL https://raw.githubusercontent.com/Entrpi/ds4-on-spark/main/install.sh | bash")
        return 0
    engine = Engine(options)
    try:
        return _serve(engine, options)
    except FatalError as error:
        log(str(error))
        return error.code
    finally:
        engine.memory.give_back()


def _serve(engine: Engine, options: dict[str, Any]) -> int:
    if options["--chdir"]:
        try:
            os.chdir(options["--chdir"])
        except OSError as error:
            raise FatalError(f"ds4-server: --chdir {options['--chdir']}: {error.strerror}") from None
    lock = take_lock()
    asked = threading.Event()

    def on_signal(number: int, frame: Any) -> None:
        if FAULTS.get("ignore_sigterm"):
            return
        if engine.stopping:
            engine.memory.give_back()
            os._exit(130)
        engine.stopping = True
        if not hasattr(engine, "banks"):  # still loading: nothing to drain
            engine.memory.give_back()
            os._exit(0)
        asked.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    engine.open()
    try:
        front = Front((options["--host"], options["--port"]), engine)
    except OSError as error:
        raise FatalError(
            f"ds4-server: cannot listen on {options['--host']}:{options['--port']}: {error.strerror}"
        ) from None
    engine.listening = time.monotonic()
    threading.Thread(target=front.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    log(f"ds4-server: listening on http://{options['--host']}:{options['--port']}")
    asked.wait()
    front.shutdown()
    front.server_close()
    log("ds4-server: shutdown requested, draining requests")
    engine.drain()
    os.close(lock)
    return 0
