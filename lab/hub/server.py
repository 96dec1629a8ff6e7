# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in hub's process: a resolve port, a CDN port, a forward proxy and a control port.

``GET|HEAD /OWNER/NAME/resolve/REVISION/FILE`` answers 302 to a signed, expiring link on the CDN port and carries
X-Linked-Size, X-Linked-ETag (the quoted sha256), X-Repo-Commit and X-Xet-Hash; 307 when only the letter case of the
repository is wrong; 401, 403, 404, 429 with X-Error-Code. Files that are not ``.gguf`` are answered directly, as the
real hub does for small files. ``/api/models/...`` carries what the ``huggingface_hub`` client asks for.

The control port listens on loopback only and is plain HTTP, so that no fault ever reaches it:
``GET /_lab/info``, ``GET /_lab/stats``, ``GET|POST /_lab/faults``, ``GET|POST /_lab/options``, ``POST /_lab/reset``.
"""

from __future__ import annotations

import base64
import dataclasses
import errno
import fcntl
import hashlib
import hmac
import http.server
import json
import os
import re
import secrets
import select
import socket
import ssl
import struct
import tempfile
import termios
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from . import certificates
from .faults import ANSWER_FAULTS, BODY_FAULTS, HEADER_FAULTS, TIME_FAULTS, Rule, Rules

PIECE = 256 * 1024
SENDFILE_PIECE = 8 * 1024 * 1024
IDLE_SECONDS = 60.0
SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
LOGIN_PAGE = (
    b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign in to this network.</body></html>"
)


@dataclasses.dataclass
class Options:
    """What can be changed while the hub runs (``POST /_lab/options``)."""

    token: str = ""  # a bearer token that resolve and API demand; empty: none
    forbidden: bool = False  # the token is known but has no permission: 403
    mirror: bool = False  # no X-Linked-*, X-Repo-Commit and X-Xet-Hash headers
    xet: bool = False  # send X-Xet-Hash
    direct: bool = False  # resolve answers with the bytes instead of a redirect
    link_seconds: float = 3600.0  # life of a signed link; it is checked when a request arrives
    cdn_refuses_auth: bool = True  # the CDN answers 400 to a request that carries Authorization, as signed stores do
    connection_rate: float = 0.0  # bytes per second of one connection; 0: unlimited
    total_rate: float = 0.0  # bytes per second of all connections together; 0: unlimited
    send_buffer: int = 0  # bytes of SO_SNDBUF of CDN connections; 0: the kernel's default
    requests_per_address: int = 0  # resolve requests one address may make in a window; 0: unlimited
    window_seconds: float = 60.0
    send_retry_after: bool = True  # the 429 of requests_per_address carries Retry-After
    only_proxy: bool = False  # a connection that does not come through our proxy is reset
    proxy_credentials: str = ""  # user:password that the proxy demands; empty: none
    proxy_hosts: list[str] = dataclasses.field(
        default_factory=list
    )  # the only hosts that the proxy connects to; empty: all


class Pacer:
    """Lets bytes through at a rate, shared by any number of threads."""

    BURST_SECONDS = 0.02

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int, rate: float) -> None:
        """Sleep until ``count`` more bytes fit into ``rate`` bytes per second."""
        if rate <= 0:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now - self.BURST_SECONDS, self._free_at)
            self._free_at = begin + count / rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)


class Blob(NamedTuple):
    """A file that can be asked for."""

    path: str
    name: str
    size: int
    sha256: str


class State:
    """Everything that the ports share."""

    def __init__(self, root: str, options: Options) -> None:
        self.root = os.path.realpath(root)
        self.started_with = options
        self.options = dataclasses.replace(options)
        self.rules = Rules()
        self.pacer = Pacer()
        self.lock = threading.Lock()
        self.secret = secrets.token_bytes(32)
        self.cdn_url = ""
        self.info: dict[str, Any] = {}
        self.proxied: set[int] = set()  # local ports of the proxy's own connections
        self._hashes: dict[tuple[str, int, int], str] = {}
        self._blobs: dict[str, str] = {}
        self._revoked: set[str] = set()
        self._windows: dict[str, tuple[float, int]] = {}
        self.requests: list[dict[str, Any]] = []
        self.connections = {"hub": 0, "cdn": 0, "proxy": 0}
        self.open_now = dict.fromkeys(self.connections, 0)
        self.open_peak = dict.fromkeys(self.connections, 0)
        self.refused_direct = 0

    def reset(self) -> None:
        """Forget faults, options, links and the log."""
        self.rules.set([])
        with self.lock:
            self.options = dataclasses.replace(self.started_with)
            self._revoked.clear()
            self._windows.clear()
            self.requests = []
            self.connections = dict.fromkeys(self.connections, 0)
            self.open_peak = dict(self.open_now)
            self.refused_direct = 0

    def set_options(self, values: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(Options)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown options {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        with self.lock:
            self.options = dataclasses.replace(self.options, **values)

    def public_options(self) -> dict[str, Any]:
        """The options, without the words that open something."""
        hidden = {name: bool(getattr(self.options, name)) for name in ("token", "proxy_credentials")}
        return dataclasses.asdict(self.options) | hidden

    def stats(self) -> dict[str, Any]:
        """The log and its sums. ``bytes`` are those of bodies that reached the other side's kernel."""
        with self.lock:
            requests = [dict(entry) for entry in self.requests]
            return {
                "bytes": {at: sum(r["sent"] for r in requests if r["at"] == at) for at in self.connections},
                "tokens": {at: sum(r["token"] for r in requests if r["at"] == at) for at in self.connections},
                "connections": dict(self.connections),
                "open": dict(self.open_now),
                "peak": dict(self.open_peak),
                "refused_direct": self.refused_direct,
                "requests": requests,
            }

    # Files

    def blob(self, path: str) -> Blob:
        found = os.stat(path)
        key = (path, found.st_size, found.st_mtime_ns)
        sha256 = self._hashes.get(key)
        if sha256 is None:
            with open(path, "rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            self._hashes[key] = sha256
        with self.lock:
            self._blobs[sha256] = path
        return Blob(path, os.path.basename(path), found.st_size, sha256)

    def blob_by_hash(self, sha256: str) -> Blob | None:
        path = self._blobs.get(sha256)
        return self.blob(path) if path and os.path.isfile(path) else None

    def inside(self, *parts: str) -> str | None:
        """Path of something under the root, or None when it is absent or would leave the root."""
        path = os.path.realpath(os.path.join(self.root, *parts))
        return path if os.path.exists(path) and path.startswith(self.root + os.sep) else None

    def repo_in_right_case(self, repo: str) -> str | None:
        """The repository as it is spelled, for any letter case; None when there is none."""
        owner, _, name = repo.partition("/")
        for spelled_owner in os.listdir(self.root):
            if spelled_owner.lower() == owner.lower() and os.path.isdir(os.path.join(self.root, spelled_owner)):
                for spelled_name in os.listdir(os.path.join(self.root, spelled_owner)):
                    if spelled_name.lower() == name.lower():
                        return f"{spelled_owner}/{spelled_name}"
        return None

    # Signed links

    def _signature(self, path: str, nonce: str, expires: str) -> str:
        return hmac.new(self.secret, f"{path}\n{nonce}\n{expires}".encode(), "sha256").hexdigest()

    def sign(self, repo: str, blob: Blob) -> str:
        path = f"/repos/{hashlib.sha256(repo.encode()).hexdigest()}/{blob.sha256}"
        nonce = secrets.token_hex(8)
        expires = f"{time.time() + self.options.link_seconds:.3f}"
        query = {
            "response-content-disposition": f'inline; filename="{blob.name}"',
            "X-Lab-Id": nonce,
            "Expires": expires,
            "Signature": self._signature(path, nonce, expires),
        }
        return f"{self.cdn_url}{path}?{urllib.parse.urlencode(query)}"

    def link_problem(self, path: str, query: str) -> str:
        """Why a signed link is refused, or an empty string."""
        values = dict(urllib.parse.parse_qsl(query))
        nonce, expires = values.get("X-Lab-Id", ""), values.get("Expires", "")
        if not hmac.compare_digest(values.get("Signature", ""), self._signature(path, nonce, expires)):
            return "SignatureDoesNotMatch"
        if float(expires) < time.time() or nonce in self._revoked:
            return "AccessDenied: Request has expired"
        return ""

    def revoke(self, query: str) -> None:
        self._revoked.add(dict(urllib.parse.parse_qsl(query)).get("X-Lab-Id", ""))

    def over_limit(self, address: str) -> float:
        """Seconds that an address must wait because of ``requests_per_address``, or 0."""
        limit = self.options.requests_per_address
        if not limit:
            return 0.0
        now = time.monotonic()
        with self.lock:
            since, count = self._windows.get(address, (now, 0))
            if now - since >= self.options.window_seconds:
                since, count = now, 0
            self._windows[address] = (since, count + 1)
        return since + self.options.window_seconds - now if count >= limit else 0.0


class HangupError(Exception):
    """End this connection. ``reset`` tells a reset from a clean close."""

    def __init__(self, *, reset: bool = True) -> None:
        super().__init__()
        self.reset = reset


class Handler(http.server.BaseHTTPRequestHandler):
    """Common to all ports: one thread per connection, one log entry per request."""

    protocol_version = "HTTP/1.1"
    server_version = "ds4-lab-hub"
    sys_version = ""
    timeout = IDLE_SECONDS
    at: ClassVar[str] = ""
    server: Port  # type: ignore[assignment]

    @property
    def state(self) -> State:
        return self.server.state

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def begin(self) -> None:
        """Open this request's log entry."""
        self.entry: dict[str, Any] = {
            "at": self.at,
            "client": self.client_address[0],
            "method": self.command,
            "path": self.path.partition("?")[0],
            "file": "",
            "range": self.headers.get("Range", ""),
            "status": 0,
            "sent": 0,
            "token": "authorization" in self.headers,
            "headers": {k: v for k, v in self.headers.items() if k.lower() not in SECRET_HEADERS},
            "faults": [],
            "begin": time.time(),
            "end": 0.0,
        }
        with self.state.lock:
            self.state.requests.append(self.entry)

    def take(self, names: frozenset[str], span: tuple[int, int] | None = None, most: int = 99) -> list[Rule]:
        """Spend the rules of these names that hit this request."""
        taken = self.state.rules.take(self.at, self.command, self.entry["file"], span, names, most)
        self.entry["faults"] += [rule.fault for rule in taken]
        return taken

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except HangupError as hangup:
            self.close_connection = True
            if hangup.reset:
                _reset_on_close(self.connection)
        except (ConnectionError, TimeoutError, ssl.SSLError):
            self.close_connection = True

    def _dispatch(self) -> None:
        self.begin()
        try:
            if not self._fail_before_answer():
                self.answer()
        except BaseException:  # what still lies in our own send queue never reaches the other side
            self.entry["sent"] = max(0, self.entry["sent"] - _unsent(self.connection))
            raise
        finally:
            self.entry["end"] = time.time()

    do_GET = do_HEAD = do_POST = do_CONNECT = _dispatch  # noqa: N815

    def answer(self) -> None:
        raise NotImplementedError

    def file_asked_for(self) -> str:
        return str(self.entry["path"]).rpartition("/")[2]

    def _fail_before_answer(self) -> bool:
        """Perform the faults that replace the answer; True when one did."""
        self.entry["file"] = self.file_asked_for()
        for rule in self.take(TIME_FAULTS):
            self.pause(rule.seconds)
        for rule in self.take(ANSWER_FAULTS, most=1):
            if rule.fault == "reset":
                raise HangupError
            if rule.fault == "refuse":
                self.server.refuse(rule.seconds)
                raise HangupError
            headers = {}
            body = b""
            status = rule.status
            if rule.fault == "status":
                body = f"status {status} on request\n".encode()
                if rule.retry_after:
                    headers["Retry-After"] = rule.retry_after
            elif rule.fault == "html":
                status, body, headers = 200, LOGIN_PAGE, {"Content-Type": "text/html; charset=utf-8"}
            elif rule.fault == "no_head":
                status, headers = 405, {"Allow": "GET"}
            elif rule.fault in {"redirect", "loop"}:
                status, headers = 302, {"Location": rule.url or self.path}
            self.reply(status, headers, body)
            return True
        return False

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        """A whole small answer."""
        self.entry["status"] = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.entry["sent"] += len(body)

    def reply_json(self, value: Any, status: int = 200) -> None:
        self.reply(status, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode())

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than the client does."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            readable, _, _ = select.select([self.connection], [], [], min(left, 1.0))
            if readable:
                raise HangupError(reset=False)

    # Bodies

    def send_blob(self, blob: Blob, headers: dict[str, str]) -> None:
        """Answer with a file or a range of it, with the faults that belong to headers and bodies."""
        span = parse_range(self.headers.get("Range", ""), blob.size)
        if self.headers.get("If-Range", headers["ETag"]) != headers["ETag"]:
            span = None
        if span == "unsatisfiable":
            self.reply(416, {"Content-Range": f"bytes */{blob.size}", "ETag": headers["ETag"]})
            return
        lies = {rule.fault: rule for rule in self.take(HEADER_FAULTS)} if self.command == "GET" else {}
        if "ignore_range" in lies:
            span = None
        first, end = span or (0, blob.size)
        length = end - first
        total = blob.size
        if span and "wrong_range" in lies:
            first, end = _other_range(first, end, blob.size, lies["wrong_range"].extra)
        if "wrong_total" in lies:
            total += lies["wrong_total"].extra
        declared = f"bytes {first}-{end - 1}/{total}"
        tail = b""
        if "short_length" in lies:
            length = max(0, length - lies["short_length"].extra)
        if "long" in lies:
            tail = b"x" * lies["long"].extra
        self.entry["status"] = 206 if span else 200
        self.send_response(self.entry["status"])
        for name, value in headers.items():
            self.send_header(name, value)
        if span:
            self.send_header("Content-Range", declared)
        if "no_length" in lies:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(length + len(tail)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.state.options.send_buffer:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.state.options.send_buffer)
        self._send_body(blob, first, first + length)
        if tail:
            self._send_bytes(tail)
        if lies.keys() & {"short_length", "long"}:
            self.close_connection = True

    def _send_body(self, blob: Blob, first: int, end: int) -> None:
        events = sorted(
            (_place(rule, first, end), index, rule) for index, rule in enumerate(self.take(BODY_FAULTS, (first, end)))
        )
        self.trickle = 0.0
        self.own_pacer = Pacer()
        with open(blob.path, "rb") as stream, tempfile.TemporaryFile() as blank:
            handle, at = stream.fileno(), first
            for position, _, rule in events:
                self._send_file(handle, at, position)
                at = position
                if rule.fault == "flip":
                    self._send_bytes(bytes([os.pread(stream.fileno(), 1, at)[0] ^ 0xFF]))
                    at += 1
                elif rule.fault == "zeros":
                    blank.truncate(end)
                    handle = blank.fileno()
                elif rule.fault == "trickle":
                    self.trickle = rule.rate
                elif rule.fault == "stall":
                    self.pause(rule.seconds)
                    raise HangupError
                elif rule.fault == "short":
                    raise HangupError(reset=False)
                else:  # cut, expire
                    if rule.fault == "expire":
                        self.state.revoke(self.path.partition("?")[2])
                    self._drain()
                    raise HangupError
            self._send_file(handle, at, end)

    def _send_file(self, handle: int, first: int, end: int) -> None:
        while first < end:
            options = self.state.options
            rates = [rate for rate in (self.trickle, options.connection_rate, options.total_rate) if rate]
            # Fifty pieces a second keep a slow stream even; without a limit the kernel copies as much as it likes.
            piece = min(end - first, max(256, min(PIECE, int(min(rates) / 50))) if rates else SENDFILE_PIECE)
            self.own_pacer.wait(piece, self.trickle or options.connection_rate)
            self.state.pacer.wait(piece, options.total_rate)
            self._send_piece(handle, first, piece)
            first += piece

    def _send_piece(self, handle: int, first: int, count: int) -> None:
        while count:
            if isinstance(self.connection, ssl.SSLSocket):
                data = os.pread(handle, min(count, PIECE), first)
                self.connection.sendall(data)
                sent = len(data)
            else:
                sent = _sendfile(self.connection, handle, first, count)
            self.entry["sent"] += sent
            first += sent
            count -= sent

    def _drain(self) -> None:
        """Let everything before the cut arrive, so that a test knows what the client has."""
        end = time.monotonic() + 2
        while _unsent(self.connection) and time.monotonic() < end:
            time.sleep(0.001)

    def _send_bytes(self, data: bytes) -> None:
        self.connection.sendall(data)
        self.entry["sent"] += len(data)


class HubHandler(Handler):
    """Resolve and API."""

    at = "hub"

    def answer(self) -> None:
        state, options = self.state, self.state.options
        path = urllib.parse.unquote(self.entry["path"])
        if wait := state.over_limit(self.client_address[0]):
            headers = {"Retry-After": str(int(wait) + 1)} if options.send_retry_after else {}
            self.reply(429, headers, b"Too many requests from this address\n")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(?:/(.*))?)?", path):
            self._api(*match.groups())
        else:
            self._refuse(404, "", "Not Found")

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        named = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, named | (headers or {}), f"{message}\n".encode())

    def _folder(self, repo: str, revision: str) -> str | None:
        """Folder of a revision, or None after a refusal or a redirect was sent."""
        options = self.state.options
        given = self.headers.get("Authorization", "")
        if options.token:
            if not given:
                self._refuse(401, "GatedRepo", f"Access to model {repo} is restricted. You must be authenticated.")
                return None
            if not hmac.compare_digest(given, f"Bearer {options.token}"):
                self._refuse(401, "", "Invalid credentials in Authorization header")
                return None
        if options.forbidden:
            self._refuse(
                403, "GatedRepo", f"Access to model {repo} is restricted and you are not in the authorized list."
            )
            return None
        spelled = self.state.repo_in_right_case(repo)
        if spelled is None:
            # The real hub does not tell strangers whether a repository exists.
            self._refuse(404 if given else 401, "RepoNotFound", "Repository not found")
            return None
        if spelled != repo:
            self.reply(307, {"Location": urllib.parse.quote(self.entry["path"].replace(repo, spelled, 1))})
            return None
        folder = self.state.inside(spelled, revision)
        if folder is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder

    def _resolve(self, repo: str, revision: str, file: str) -> None:
        folder = self._folder(repo, revision)
        if folder is None:
            return
        bare = self.state.options.mirror or bool(self.take(frozenset({"bare"})))
        commit = {} if bare else {"X-Repo-Commit": os.path.basename(folder)}
        path = self.state.inside(folder, file)
        if path is None or not os.path.isfile(path):
            self._refuse(404, "EntryNotFound", "Entry not found", commit)
            return
        blob = self.state.blob(path)
        if self.state.options.direct or not file.endswith(".gguf"):
            headers = {"ETag": f'"{blob.sha256}"', "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
            self.send_blob(blob, headers | commit)
            return
        headers = {"Location": self.state.sign(repo, blob), "Accept-Ranges": "bytes", "Vary": "Origin, Accept"}
        if not bare:
            headers |= commit | {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.sha256}"'}
            if self.state.options.xet:
                headers["X-Xet-Hash"] = hashlib.sha256(blob.sha256.encode()).hexdigest()
        self.reply(302, headers, b"Found. Redirecting\n")

    def _api(self, repo: str, kind: str | None, revision: str | None, below: str | None) -> None:
        folder = self._folder(repo, revision or "main")
        if folder is None:
            return
        files = sorted(name for name in os.listdir(folder) if not name.endswith(".part"))
        if kind != "tree":
            commit = os.path.basename(folder)
            self.reply_json({"id": repo, "modelId": repo, "sha": commit, "siblings": [{"rfilename": n} for n in files]})
            return
        entries = []
        for name in files if not below else []:
            blob = self.state.blob(os.path.join(folder, name))
            oid = hashlib.sha1(blob.sha256.encode(), usedforsecurity=False).hexdigest()
            entry: dict[str, Any] = {"type": "file", "oid": oid, "size": blob.size, "path": name}
            if name.endswith(".gguf"):
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 135}
            entries.append(entry)
        self.reply_json(entries)


class CdnHandler(Handler):
    """The bytes, behind signed links."""

    at = "cdn"

    def file_asked_for(self) -> str:
        blob = self.state.blob_by_hash(self.entry["path"].rpartition("/")[2])
        return blob.name if blob else ""

    def begin(self) -> None:
        super().begin()
        path, _, query = self.path.partition("?")
        self.link_problem = self.state.link_problem(path, query)  # judged on arrival, however slowly it is answered

    def answer(self) -> None:
        path, _, query = self.path.partition("?")
        if self.entry["token"] and self.state.options.cdn_refuses_auth:
            self.reply(400, {}, b"Only one auth mechanism allowed\n")
        elif self.link_problem:
            body = f"<Error><Code>{self.link_problem}</Code></Error>".encode()
            self.reply(403, {"Content-Type": "application/xml"}, body)
        elif (blob := self.state.blob_by_hash(path.rpartition("/")[2])) is None:
            self.reply(404, {}, b"NoSuchKey\n")
        else:
            headers = {"ETag": f'"{blob.sha256[:32]}"', "Accept-Ranges": "bytes", "Content-Type": "binary/octet-stream"}
            headers["Content-Disposition"] = dict(urllib.parse.parse_qsl(query))["response-content-disposition"]
            self.send_blob(blob, headers)


class ProxyHandler(Handler):
    """A forward proxy: CONNECT, and GET or HEAD of an absolute address."""

    at = "proxy"

    def file_asked_for(self) -> str:
        return ""

    def answer(self) -> None:
        options = self.state.options
        if options.proxy_credentials:
            wanted = "Basic " + base64.b64encode(options.proxy_credentials.encode()).decode()
            if self.headers.get("Proxy-Authorization", "") != wanted:
                self.reply(407, {"Proxy-Authenticate": 'Basic realm="lab"'}, b"Proxy authentication required\n")
                return
        target = urllib.parse.urlsplit(f"//{self.path}" if self.command == "CONNECT" else self.path)
        if not target.hostname or (self.command != "CONNECT" and target.scheme != "http"):
            self.reply(400, {}, b"A proxy request names a host\n")
            return
        if options.proxy_hosts and target.hostname not in options.proxy_hosts:
            self.reply(403, {}, f"This network does not let you reach {target.hostname}\n".encode())
            return
        upstream = socket.socket()
        upstream.bind(("", 0))
        local_port = upstream.getsockname()[1]
        self.state.proxied.add(local_port)  # before connecting: the other end asks at once
        try:
            upstream.settimeout(10)
            try:
                upstream.connect((target.hostname, target.port or 80))
            except OSError as error:
                self.reply(502, {}, f"{target.hostname}: {error.strerror or error}\n".encode())
                return
            upstream.settimeout(None)
            if self.command == "CONNECT":
                self.entry["status"] = 200
                self.send_response_only(200, "Connection established")
                self.end_headers()
            else:
                upstream.sendall(self._forwarded(target))
                self.entry["status"] = 200
            self.close_connection = True
            self._relay(upstream)
        finally:
            upstream.close()
            self.state.proxied.discard(local_port)

    def _forwarded(self, target: urllib.parse.SplitResult) -> bytes:
        lines = [f"{self.command} {urllib.parse.urlunsplit(('', '', target.path or '/', target.query, ''))} HTTP/1.1"]
        dropped = {"proxy-connection", "proxy-authorization", "connection"}
        lines += [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in dropped]
        return ("\r\n".join([*lines, "Connection: close", "Via: 1.1 lab"]) + "\r\n\r\n").encode()

    def _relay(self, upstream: socket.socket) -> None:
        pairs = {self.connection: upstream, upstream: self.connection}
        while True:
            readable, _, _ = select.select(list(pairs), [], [], IDLE_SECONDS * 60)
            if not readable:
                return
            for source in readable:
                data = source.recv(PIECE)
                if not data:
                    return
                pairs[source].sendall(data)
                if source is upstream:
                    self.entry["sent"] += len(data)


class ControlHandler(http.server.BaseHTTPRequestHandler):
    """What tests and the command line use to steer and to look."""

    server: ControlServer  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _reply(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.server.state
        views: dict[str, Callable[[], Any]] = {
            "/_lab/info": lambda: state.info,
            "/_lab/stats": state.stats,
            "/_lab/faults": state.rules.as_json,
            "/_lab/options": state.public_options,
        }
        view = views.get(self.path)
        self._reply(*((200, view()) if view else (404, {"error": f"unknown; known: {', '.join(views)}"})))

    def do_POST(self) -> None:
        state = self.server.state
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            value = json.loads(text or b"{}")
            if self.path == "/_lab/faults":
                state.rules.set(value["faults"], keep=value.get("keep", False))
                self._reply(200, state.rules.as_json())
            elif self.path == "/_lab/options":
                state.set_options(value)
                self._reply(200, state.public_options())
            elif self.path == "/_lab/reset":
                state.reset()
                self._reply(200, {})
            else:
                self._reply(404, {"error": "unknown"})
        except (ValueError, KeyError, TypeError) as error:
            self._reply(400, {"error": str(error)})


class ControlServer(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, state: State, port: int) -> None:
        self.state = state
        super().__init__(("127.0.0.1", port), ControlHandler)


class Port:
    """One listening address. Unlike ``socketserver`` it can refuse connections for a while."""

    def __init__(
        self, state: State, handler: type[Handler], address: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.state, self.handler, self.address, self.tls = state, handler, address, tls
        self._socket = self._listen(port)
        self.port: int = self._socket.getsockname()[1]
        self._refuse_until = 0.0
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}:{self.port}"

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.address, port))
        listener.listen(128)
        return listener

    def refuse(self, seconds: float) -> None:
        """Close the listening socket for a while: connections are refused by the kernel."""
        self._refuse_until = time.monotonic() + seconds
        self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        while True:
            try:
                connection, peer = self._socket.accept()
            except OSError:
                self._socket.close()
                time.sleep(max(0.0, self._refuse_until - time.monotonic()))
                self._socket = self._listen(self.port)
                continue
            threading.Thread(target=self._handle, args=(connection, peer), daemon=True).start()

    def _handle(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        state, at = self.state, self.handler.at
        if state.options.only_proxy and at != "proxy" and peer[1] not in state.proxied:
            state.refused_direct += 1
            _reset_on_close(connection)
            connection.close()
            return
        with state.lock:
            state.connections[at] += 1
            state.open_now[at] += 1
            state.open_peak[at] = max(state.open_peak[at], state.open_now[at])
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.tls:
                connection.settimeout(IDLE_SECONDS)
                connection = self.tls.wrap_socket(connection, server_side=True)
            self.handler(connection, peer, self)  # type: ignore[arg-type]
        except OSError:
            pass  # the client went away, or does not trust us
        finally:
            connection.close()
            with state.lock:
                state.open_now[at] -= 1


def parse_range(header: str, size: int) -> tuple[int, int] | Literal["unsatisfiable"] | None:
    """First byte and byte behind the last of a single range; None for the whole file (also for several ranges)."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return (max(0, size - int(last)), size) if int(last) and size else "unsatisfiable"
    if int(first) >= size:
        return "unsatisfiable"
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1 if last else size, size)


def _place(rule: Rule, first: int, end: int) -> int:
    """Byte at which a body fault happens."""
    if rule.offset is not None:
        return rule.offset
    return first if rule.fault == "zeros" else (first + end) // 2


def _other_range(first: int, end: int, size: int, extra: int) -> tuple[int, int]:
    """A range of the same length elsewhere in the file; the same one when it is the whole file."""
    shift = min(extra, size - end) or -min(extra, first)
    return first + shift, end + shift


def _reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _unsent(connection: socket.socket) -> int:
    """Bytes in the send queue that the other side has not acknowledged."""
    try:
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except OSError:
        return 0
    return int(struct.unpack("i", answer)[0])


def _sendfile(connection: socket.socket, handle: int, first: int, count: int) -> int:
    """``os.sendfile`` for a socket with a timeout."""
    while True:
        try:
            sent = os.sendfile(connection.fileno(), handle, first, count)
        except BlockingIOError:
            _, writable, _ = select.select([], [connection], [], IDLE_SECONDS * 60)
            if not writable:
                raise TimeoutError("the client reads nothing") from None
            continue
        if not sent:
            raise OSError(errno.EIO, "file shrank while it was sent")
        return sent


def serve(
    root: str,
    *,
    address: str = "127.0.0.1",
    cdn_address: str = "",
    tls_directory: str = "",
    names: tuple[str, ...] = (),
    ports: tuple[int, int, int, int] = (0, 0, 0, 0),
    options: Options | None = None,
) -> State:
    """Start all ports in threads and return at once.

    Args:
        root: folder with ``OWNER/NAME/REVISION/FILE``.
        address: where hub and proxy listen, as clients write it.
        cdn_address: where the CDN listens; another loopback address when ``address`` is 127.0.0.1, so that it is
            another host to clients, else ``address``.
        tls_directory: where to make an authority and certificates; empty: plain HTTP.
        names: further host names for the certificate.
        ports: of hub, CDN, proxy and control; 0: any free one.
    """
    cdn_address = cdn_address or ("127.0.0.2" if address == "127.0.0.1" else address)
    state = State(root, options or Options())
    context, ca_file = None, ""
    if tls_directory:
        made = certificates.make(tls_directory, (address, cdn_address, "localhost", *names))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(made.cert_file, made.key_file)
        ca_file = made.ca_file
    hub = Port(state, HubHandler, address, ports[0], context)
    cdn = Port(state, CdnHandler, cdn_address, ports[1], context)
    proxy = Port(state, ProxyHandler, address, ports[2])
    control = ControlServer(state, ports[3])
    threading.Thread(target=control.serve_forever, daemon=True).start()
    state.cdn_url = cdn.url
    state.info = {
        "url": hub.url,
        "cdn_url": cdn.url,
        "proxy_url": proxy.url,
        "control_url": f"http://127.0.0.1:{control.server_address[1]}",
        "ca_file": ca_file,
        "pid": os.getpid(),
    }
    return state
