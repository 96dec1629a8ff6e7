# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One range of one file from one source: a Hugging Face style address, a plain URL or a file on this host.

Only an answer that is exactly what was asked for becomes a :class:`Body`: status 206, the very Content-Range, the very
length. Redirects are followed by hand, so that the token goes to the source's own origin and to nobody else, and the
signed address behind the redirect is shared by all workers until it stops working. ``http.client`` is used instead of a
richer client because its ``readinto1`` returns what has arrived: a trickle is then seen and not slept through.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import http.client
import os
import re
import socket
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

from .errors import Ds4Error
from .plan import HUB

CONNECT_SECONDS = 15.0  # limit for a TCP or TLS handshake
REDIRECTS = 8
RETRY_AFTER_LIMIT_SECONDS = 900.0  # a server asking for more is asked again after this
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)\s*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GONE = frozenset({401, 403, 404, 410})  # what a signed address answers when its time is over


class TransferError(Exception):
    """A request that gave nothing usable.

    Attributes:
        reason: one phrase, without addresses' query strings and without secrets.
        final: asking this source again cannot help.
        first: final only while this source has not given a single byte (a refusal in the middle may pass).
        retry_after_seconds: what the server asked for; None when it did not.
        cure: variable or command that cures it.
    """

    def __init__(
        self,
        reason: str,
        *,
        final: bool = False,
        first: bool = False,
        retry_after_seconds: float | None = None,
        cure: str = "",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.final = final
        self.first = first
        self.retry_after_seconds = retry_after_seconds
        self.cure = cure


class Network(NamedTuple):
    """How to reach the sources.

    Attributes:
        proxy_url: ``http://host:port`` of a forward proxy; empty for none.
        proxy_credentials: ``user:password`` for it; empty for none.
        no_proxy: hosts that are reached directly, separated by commas.
        ca_file: PEM file of authorities trusted beside those of the system; empty for none.
        token: sent as ``Authorization: Bearer`` to the source's own origin; empty for none.
        token_hosts: the only hosts that get it.
        allowed_hosts: hosts to which a mirror may redirect beside itself.
        stall_seconds: a connection silent for so long is given up.
    """

    proxy_url: str = ""
    proxy_credentials: str = ""
    no_proxy: str = ""
    ca_file: str = ""
    token: str = ""
    token_hosts: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    stall_seconds: float = 30.0

    def context(self) -> ssl.SSLContext:
        """TLS settings.

        Raises:
            Ds4Error: the CA file cannot be used.
        """
        context = ssl.create_default_context()
        if self.ca_file:
            try:
                context.load_verify_locations(self.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise Ds4Error(
                    f"The CA bundle {self.ca_file} cannot be used",
                    found=str(error),
                    required="a readable PEM file with at least one certificate",
                    cure="correct weights_ca_file",
                ) from error
        return context

    def proxied(self, host: str) -> bool:
        return bool(self.proxy_url) and not urllib.request.proxy_bypass_environment(host, {"no": self.no_proxy})  # type: ignore[attr-defined]


class Origin(NamedTuple):
    """Whom a request speaks to."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """The other side of an address.

        Raises:
            TransferError: there can be none of this form.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            return cls(parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        except ValueError as error:
            raise TransferError(f"an address that cannot be used: {error}", final=True) from error


def bare(url: str) -> str:
    """An address without its query (signatures) and without credentials, fit for messages and records."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2]
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def retry_after_seconds(value: str | None, date: str | None = None) -> float | None:
    """Seconds of a Retry-After header: a number or an HTTP date; None when absent or unreadable.

    A date is compared with the server's own ``Date``, so that a wrong clock here does not matter.
    """
    if not value:
        return None
    try:
        return min(max(float(int(value)), 0.0), RETRY_AFTER_LIMIT_SECONDS)
    except ValueError:
        pass
    try:
        then = email.utils.parsedate_to_datetime(value).timestamp()
        now = email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()
    except (TypeError, ValueError):
        return None
    return min(max(then - now, 0.0), RETRY_AFTER_LIMIT_SECONDS)


def content_range(value: str | None) -> tuple[int, int, int] | None:
    """First byte, last byte and total of a Content-Range header; None when it is anything else."""
    found = _CONTENT_RANGE.fullmatch(value or "")
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


class Connections:
    """The kept-alive connections of one worker. Only :meth:`abort` may be called from another thread."""

    def __init__(self, network: Network, context: ssl.SSLContext) -> None:
        self._network = network
        self._context = context
        self._idle: dict[Origin, http.client.HTTPConnection] = {}
        self._active: http.client.HTTPConnection | None = None
        self._aborted = False

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Send one GET.

        Raises:
            TransferError: no answer came.
        """
        origin = Origin.of(url)
        parts = urllib.parse.urlsplit(url)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        sent = {"User-Agent": "ds4-fetch/1", "Accept-Encoding": "identity", **headers}
        if self._network.proxied(origin.host) and origin.scheme == "http":
            target = url
            sent.update(self._proxy_headers())
        try:
            while True:
                connection = self._idle.pop(origin, None)
                kept = connection is not None
                connection = self._active = connection or self._connect(origin)
                try:
                    if self._aborted:  # it may have been said while we connected or waited for another worker
                        raise TransferError("stopped")
                    connection.request("GET", target, headers=sent)
                    return Answer(self, origin, connection, connection.getresponse())
                except (http.client.RemoteDisconnected, ConnectionError):
                    connection.close()
                    if not kept:  # a kept connection that the server closed meanwhile says nothing about the server
                        raise
                except BaseException:
                    connection.close()
                    raise
        except ssl.SSLCertVerificationError as error:
            raise TransferError(
                f"the certificate of {origin.host} is not trusted ({error.verify_message})",
                final=True,
                cure="weights_ca_file: the bundle of your network's own authority",
            ) from error
        except socket.gaierror as error:
            raise TransferError(f"the name {origin.host} is not known ({error.strerror})") from error
        except TimeoutError as error:
            raise TransferError(f"{origin.host}:{origin.port} is silent") from error
        except (OSError, http.client.HTTPException) as error:
            raise TransferError(f"{origin.host}:{origin.port}: {_said(error)}") from error

    def keep(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        self._active = None
        self._idle[origin] = connection

    def abort(self) -> None:
        """End the work of a worker: the read it waits for fails at once, and so does everything it begins later."""
        self._aborted = True
        connection = self._active
        sock = connection.sock if connection else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self._idle.values():
            connection.close()
        self._idle.clear()

    def _connect(self, origin: Origin) -> http.client.HTTPConnection:
        host, port = origin.host, origin.port
        through = urllib.parse.urlsplit(self._network.proxy_url) if self._network.proxied(host) else None
        if through is not None:
            host, port = through.hostname or "", through.port or 3128
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._context)
            if through is not None:
                connection.set_tunnel(origin.host, origin.port, headers=self._proxy_headers())
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            if "Tunnel connection failed: 407" in str(error):
                raise TransferError(*_PROXY_407, final=True, cure=_PROXY_CURE) from error
            if through is not None and not isinstance(error, ssl.SSLError):
                raise TransferError(
                    f"the proxy {host}:{port} does not lead to {origin.host}: {_said(error)}"
                ) from error
            raise
        connection.sock.settimeout(self._network.stall_seconds)
        return connection

    def _proxy_headers(self) -> dict[str, str]:
        if not self._network.proxy_credentials:
            return {}
        return {"Proxy-Authorization": "Basic " + base64.b64encode(self._network.proxy_credentials.encode()).decode()}


_PROXY_407 = ("the proxy demands credentials (407)",)
_PROXY_CURE = "weights_proxy_credentials_file: a file on the host, mode 0600, with one line user:password"


def _said(error: BaseException) -> str:
    """What an exception says, in one short line."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__).splitlines()[0][:200]


class Answer(NamedTuple):
    """An answer whose body is not read yet."""

    connections: Connections
    origin: Origin
    connection: http.client.HTTPConnection
    response: http.client.HTTPResponse

    def discard(self) -> None:
        """Finish with an answer that is of no use; a short body is read so that the connection can be kept."""
        length = self.response.length
        if length is not None and length <= 65536 and not self.response.will_close:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.response.read()
                self.connections.keep(self.origin, self.connection)
                return
        self.connection.close()


class Body:
    """The bytes of a range, to be read exactly once and in order."""

    def __init__(self, answer: Answer, count: int) -> None:
        self._answer = answer
        self._left = count

    def readinto(self, view: memoryview) -> int:
        """Put what has arrived into ``view`` and say how much; at least one byte.

        Raises:
            TransferError: the connection broke, ended early or is silent.
        """
        try:
            count = self._answer.response.readinto1(view[: min(len(view), self._left)])
        except TimeoutError as error:
            raise TransferError(f"{self._answer.origin.host} stopped sending") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TransferError(f"the connection to {self._answer.origin.host} broke: {_said(error)}") from error
        if not count:
            raise TransferError(f"{self._answer.origin.host} ended the answer {self._left} bytes early")
        self._left -= count
        return count

    def close(self) -> None:
        """Keep the connection when everything was read, else drop it."""
        response = self._answer.response
        clean = self._left == 0 and response.length == 0 and not response.will_close
        response.close()
        if clean:
            self._answer.connections.keep(self._answer.origin, self._answer.connection)
        else:
            self._answer.connection.close()


class Claims(NamedTuple):
    """What a source says about a file before its bytes come. Absent on mirrors: never relied on."""

    size: int | None = None
    sha256: str = ""
    commit: str = ""


class HttpSource:
    """One file at one address, shared by all workers.

    Args:
        url: where to begin, for example ``https://huggingface.co/OWNER/NAME/resolve/REVISION/FILE``.
        network: proxy, authorities, token.
        size: bytes that the file must have; None when nobody knows yet.
        sha256: hash that it must have; empty when nobody knows yet.
    """

    def __init__(self, url: str, network: Network, size: int | None, sha256: str) -> None:
        self.url = url
        self.name = bare(url)
        self.size = size
        self.sha256 = sha256
        self.claims = Claims()
        self._network = network
        self._origin = Origin.of(url)
        self._context = network.context() if network.ca_file else None  # a wrong file is said before anything moves
        self._resolving = threading.Lock()
        self._address: str | None = None  # where the redirects led

    def connections(self) -> Connections:
        """Connections for one more worker."""
        self._context = self._context or self._network.context()
        return Connections(self._network, self._context)

    def open(self, connections: Connections, start: int, end: int) -> Body:
        """Ask for the bytes from ``start`` to before ``end``.

        Raises:
            TransferError: anything but exactly these bytes was offered.
        """
        wanted = f"bytes={start}-{end - 1}"
        address = self._address
        if address is None:
            with self._resolving:  # one worker asks the hub, the others wait for what it learns
                if self._address is None:
                    answer = self._walk(connections, wanted)
                    return self._judged(answer, start, end)
                address = self._address
        answer = connections.get(address, {"Range": wanted, **self._authorization(address)})
        moved = 300 <= answer.response.status < 400
        if moved or (address != self.url and answer.response.status in _GONE):
            answer.discard()
            self._forget(address)
            raise TransferError(
                f"the address on {answer.origin.host} is not valid any more (HTTP {answer.response.status})"
            )
        return self._judged(answer, start, end)

    def probe(self, connections: Connections) -> Claims:
        """Learn size and, where the hub tells it, sha256 of a file whose manifest does not say.

        Raises:
            TransferError: no usable answer.
        """
        with self._resolving:
            answer = self._walk(connections, "bytes=0-0")
        found = content_range(answer.response.getheader("Content-Range"))
        answer.discard()
        if answer.response.status != 206 or found is None:
            raise self._refusal(answer)
        return self.claims._replace(size=found[2])

    def _walk(self, connections: Connections, wanted: str) -> Answer:
        """Follow the redirects from the beginning; remembers where they led."""
        url = self.url
        for _ in range(REDIRECTS):
            answer = connections.get(url, {"Range": wanted, **self._authorization(url)})
            if url == self.url or answer.origin == self._origin:
                self._believe(answer.response)
            location = answer.response.getheader("Location")
            if answer.response.status not in (301, 302, 303, 307, 308) or not location:
                if answer.response.status == 206:  # a web page of the local network is no address to remember
                    self._address = url
                return answer
            answer.discard()
            url = self._checked(urllib.parse.urljoin(url, location), url)
        raise TransferError(f"more than {REDIRECTS} redirects from {self.name}", first=True)

    def _checked(self, url: str, before: str) -> str:
        """A redirect's target, when it may be followed."""
        target = Origin.of(url)
        if target.scheme not in ("http", "https") or not target.host:
            raise TransferError(f"{bare(before)} redirects to an address that is not HTTP", first=True)
        if target.scheme == "http" and Origin.of(before).scheme == "https":
            raise TransferError(f"{bare(before)} redirects from https to plain http on {target.host}", final=True)
        mirror = self._origin.host != HUB  # whose signed addresses may be anywhere
        if mirror and target.host != self._origin.host and target.host not in self._network.allowed_hosts:
            raise TransferError(
                f"{self._origin.host} redirects to {target.host}, which is not among the allowed hosts",
                final=True,
                cure=f"weights_allowed_hosts: [{target.host}], when this mirror may send you there",
            )
        return url

    def _authorization(self, url: str) -> dict[str, str]:
        if self._network.token and Origin.of(url) == self._origin and self._origin.host in self._network.token_hosts:
            return {"Authorization": f"Bearer {self._network.token}"}
        return {}

    def _believe(self, response: http.client.HTTPResponse) -> None:
        """Compare the hub's own statements with the manifest, before 80 GiB move."""
        size = response.getheader("X-Linked-Size")
        tag = (response.getheader("X-Linked-ETag") or "").removeprefix("W/").strip('"').lower()
        self.claims = Claims(
            int(size) if size and size.isdigit() else self.claims.size,
            tag if _SHA256.fullmatch(tag) else self.claims.sha256,
            response.getheader("X-Repo-Commit") or self.claims.commit,
        )
        cure = (
            "correct the entry in ds4_weights or ds4_weights_extra (revision, file, bytes, sha256), or weights_sources"
        )
        if self.sha256 and self.claims.sha256 and self.claims.sha256 != self.sha256:
            raise TransferError(
                f"holds another file under this name: sha256 {self.claims.sha256}, wanted {self.sha256}",
                final=True,
                cure=cure,
            )
        if self.size is not None and self.claims.size is not None and self.claims.size != self.size:
            raise TransferError(
                f"holds another file under this name: {self.claims.size} bytes, wanted {self.size}",
                final=True,
                cure=cure,
            )

    def _forget(self, address: str) -> None:
        with self._resolving:
            if self._address == address:
                self._address = None

    def _judged(self, answer: Answer, start: int, end: int) -> Body:
        """A body only for exactly the range asked for."""
        response = answer.response
        if response.status != 206:
            answer.discard()
            raise self._refusal(answer)
        found = content_range(response.getheader("Content-Range"))
        size = self.size if self.size is not None or not found else found[2]
        length = response.length
        encoding = (response.getheader("Content-Encoding") or "identity").lower()
        if found != (start, end - 1, size) or (length is not None and length != end - start) or encoding != "identity":
            said = response.getheader("Content-Range")
            answer.connection.close()
            raise TransferError(
                f"{answer.origin.host} answered bytes {start}-{end - 1}/{size} with Content-Range {said!r}, length {length}"
            )
        return Body(answer, end - start)

    def _refusal(self, answer: Answer) -> TransferError:
        response, host = answer.response, answer.origin.host
        status, kind = response.status, (response.getheader("Content-Type") or "no type").split(";")[0]
        wait = retry_after_seconds(response.getheader("Retry-After"), response.getheader("Date"))
        if status == 407:
            return TransferError(*_PROXY_407, final=True, cure=_PROXY_CURE)
        if status in (401, 403):
            self._address = None
            cure = "weights_token_file: a token that may read this repository"
            if self._network.token and self._origin.host not in self._network.token_hosts:
                cure = f"weights_token_hosts: [{self._origin.host}], when the token is meant for this host"
            elif status == 403 and not self._network.token:
                cure += ", or ask its owner for access"
            return TransferError(f"{host} refuses access (HTTP {status})", first=True, cure=cure)
        if status in (404, 410):
            self._address = None
            return TransferError(
                f"{host} does not have {urllib.parse.urlsplit(self.name).path} (HTTP {status})",
                first=True,
                cure="repo, revision and file of this entry in ds4_weights, or weights_sources",
            )
        if status == 416:
            return TransferError(f"{host} has a shorter file than {self.size} bytes (HTTP 416)", first=True)
        if status == 200:
            return TransferError(f"{host} ignored the Range request (HTTP 200, {kind})")
        return TransferError(f"{host} answered HTTP {status} {response.reason}".rstrip(), retry_after_seconds=wait)


class FileBody:
    """The bytes of a range of a local file."""

    def __init__(self, path: str, start: int, end: int) -> None:
        self._path = path
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._at = start
        self._end = end

    def readinto(self, view: memoryview) -> int:
        """As :meth:`Body.readinto`."""
        try:
            count = os.preadv(self._handle, [view[: min(len(view), self._end - self._at)]], self._at)
        except OSError as error:
            raise TransferError(f"{self._path} cannot be read: {_said(error)}") from error
        if not count:
            raise TransferError(f"{self._path} became shorter than {self._end} bytes")
        self._at += count
        return count

    def close(self) -> None:
        os.close(self._handle)


class FileSource:
    """A file on this host: a USB disk, an NFS mount, a bundle. Same interface as :class:`HttpSource`."""

    def __init__(self, url: str, network: Network, size: int | None, sha256: str) -> None:
        del network
        self.url = self.name = url
        self.size = size
        self.sha256 = sha256
        self.claims = Claims()
        self._path = urllib.parse.unquote(urllib.parse.urlsplit(url).path)

    def connections(self) -> Connections:
        return Connections(Network(), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def probe(self, connections: Connections) -> Claims:
        del connections
        return Claims(self._stat())

    def open(self, connections: Connections, start: int, end: int) -> FileBody:
        """As :meth:`HttpSource.open`."""
        del connections
        found = self._stat()
        if self.size is not None and found != self.size:
            raise TransferError(f"{self._path} has {found} bytes, wanted {self.size}", final=True)
        try:
            return FileBody(self._path, start, end)
        except OSError as error:
            raise TransferError(
                f"{self._path}: {_said(error)}", first=True, cure="let the service user read it"
            ) from error

    def _stat(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError as error:
            raise TransferError(
                f"{self._path}: {_said(error)}", first=True, cure="mount or fill this directory"
            ) from error


Source = Union[HttpSource, FileSource]
AnyBody = Union[Body, FileBody]
Failure = Optional[TransferError]


def source(url: str, network: Network, size: int | None, sha256: str) -> Source:
    """The source behind an address.

    Raises:
        Ds4Error: an address of another kind.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme in ("http", "https"):
        return HttpSource(url, network, size, sha256)
    if scheme == "file":
        return FileSource(url, network, size, sha256)
    raise Ds4Error(
        "A source of weights cannot be used",
        found=bare(url) or url,
        required="an http, https or file address",
        cure="correct weights_sources",
    )
