# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Serves a bare repository over smart HTTP: a small front for ``git http-backend``."""

from __future__ import annotations

import gzip
import http.server
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)

    def _answer(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": self.server.path,
            "GIT_PROJECT_ROOT": str(self.server.repo.parent),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": str(self.server.repo),
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "REMOTE_ADDR": self.client_address[0],
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        ran = subprocess.run(
            [self.server.git, "http-backend"], input=body, env=environment, capture_output=True, check=False
        )
        head, _, data = ran.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode("latin-1").split("\r\n") if ": " in line)
        failure = 500 if ran.returncode else 200
        self.send_response(int(headers.pop("Status", str(failure)).split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Http(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], repo: Path) -> None:
        self.repo, self.path = repo, os.environ.get("PATH", os.defpath)
        self.git = shutil.which("git") or "git"
        super().__init__(address, _Handler)


class Server:
    """``Server(repo).url`` is what ``git clone`` wants; usable as a context manager.

    Args:
        repo: bare repository; it is served under the name of its folder.
        address: IPv4 address to listen on.
        port: TCP port; 0 takes a free one.
    """

    def __init__(self, repo: str | Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self.repo = Path(repo).resolve()
        self._http = _Http((address, port), self.repo)
        self.address, self.port = self._http.server_address[:2]
        self.url = f"http://{address}:{self.port}/{self.repo.name}"

    def start(self) -> Server:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def serve_forever(self) -> None:
        self._http.serve_forever()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(repo: str | Path, address: str, port: int) -> Any:
    """Serve until interrupted."""
    Server(repo, address, port).serve_forever()
