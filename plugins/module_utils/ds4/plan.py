# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The plan of a fetch: everything ``ds4-fetch`` needs to know, in one JSON file (docs/schemas/weights-plan.schema.json)."""

from __future__ import annotations

import dataclasses
import os
import re
import urllib.parse
from collections.abc import Sequence
from typing import Any

from .errors import Ds4Error
from .files import digest, read_json, write_json

SCHEMA = 1
HUB = "huggingface.co"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TODAY = ("adopt", "memory_floor_kib", "drop_cache")  # depend on what runs on the host at the moment


@dataclasses.dataclass
class PlanFile:
    """One file that is wanted.

    Attributes:
        role: ``base``, ``drafter``, ``mtp``, …: what the engine uses it for.
        file: its name in the repository; may contain folders.
        bytes: its length; None when nobody knows.
        sha256: its hash; empty when nobody knows (first use records it).
        sources: addresses in the order in which they are tried.
        target: plain name in the plan's directory.
    """

    role: str
    file: str
    target: str
    bytes: int | None = None
    sha256: str = ""
    sources: list[str] = dataclasses.field(default_factory=list)
    repo: str = ""
    revision: str = ""


@dataclasses.dataclass
class Plan:
    """A whole plan. Times in seconds, rates in bytes per second, paths absolute.

    Attributes:
        fetch: false only verifies what is there.
        adopt: files and directories on this host that may hold the wanted content already.
        known: sha256 → ``generation role`` of everything our manifests know, for messages.
        token_file, proxy_credentials_file: paths; their content is never in a plan.
        token_hosts: the only hosts that get the token, see :func:`token_hosts`.
        mount: ``path`` and ``uuid`` of the file system that must hold the directory; empty path: not checked.
        memory_floor_kib: transfers wait while MemAvailable is below; 0: never.
        drop_cache: leave no pages of the weights in the page cache (a guest beside a live engine).
        margin_bytes: room that must remain free.
        status_file: where progress is told.
    """

    generation: str
    directory: str
    user: str
    files: list[PlanFile]
    status_file: str
    group: str = ""
    fetch: bool = True
    adopt: list[str] = dataclasses.field(default_factory=list)
    known: dict[str, str] = dataclasses.field(default_factory=dict)
    connections: int = 8
    segment_bytes: int = 0
    stall_seconds: float = 30.0
    stall_bytes_per_second: float = 4096.0
    retries: int = 10
    backoff_seconds: float = 1.0
    backoff_limit_seconds: float = 60.0
    deadline_seconds: float = 0.0
    bandwidth_bytes_per_second: float = 0.0
    proxy_url: str = ""
    proxy_credentials_file: str = ""
    no_proxy: str = ""
    ca_file: str = ""
    token_file: str = ""
    token_hosts: list[str] = dataclasses.field(default_factory=list)
    allowed_hosts: list[str] = dataclasses.field(default_factory=list)
    memory_floor_kib: int = 0
    drop_cache: bool = False
    mount: dict[str, str] = dataclasses.field(default_factory=dict)
    margin_bytes: int = 0
    schema: int = SCHEMA

    @property
    def id(self) -> str:
        """16 hex digits that change with what is wanted, not with how considerate the fetch has to be today."""
        return digest({key: value for key, value in self.as_json().items() if key not in _TODAY})[:16]

    def path(self, item: PlanFile) -> str:
        """Final path of a file."""
        return os.path.join(self.directory, item.target)

    def part(self, item: PlanFile) -> str:
        """Path of a file on its way."""
        return os.path.join(self.directory, f".{item.target}.part")

    @property
    def unfinished(self) -> str:
        """A file that exists while there is work to do: systemd looks at it after a reboot."""
        return unfinished_path(self.directory)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def write(self, path: str) -> None:
        """Store the plan, readable by everybody (it holds no secret)."""
        write_json(path, self.as_json())


def unfinished_path(directory: str) -> str:
    return os.path.join(directory, ".fetch", "unfinished")


def load(path: str) -> Plan:
    """Read a plan.

    Raises:
        Ds4Error: absent, torn, of another version, or not usable.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise Ds4Error(
            f"There is no plan of weights at {path}"
            if not os.path.exists(path)
            else f"The plan of weights {path} is damaged",
            cure="run site.yml, which writes it",
        )
    if value.get("schema") != SCHEMA:
        raise Ds4Error(
            f"The plan of weights {path} is of another version",
            found=f"schema {value.get('schema')!r}",
            required=f"schema {SCHEMA}",
            cure="run site.yml, which writes it anew",
        )
    try:
        plan = Plan(**{**value, "files": [PlanFile(**item) for item in value["files"]]})
    except (TypeError, KeyError, AttributeError) as error:
        raise Ds4Error(
            f"The plan of weights {path} is damaged", found=str(error), cure="run site.yml, which writes it"
        ) from error
    problems = errors(plan)
    if problems:
        raise Ds4Error(
            f"The plan of weights {path} cannot be used",
            found="; ".join(problems),
            cure="correct the weights_ variables",
        )
    return plan


def errors(plan: Plan) -> list[str]:
    """Everything that makes a plan unusable, one phrase each."""
    found = []
    for item in plan.files:
        if item.target != os.path.basename(item.target) or item.target.startswith(".") or not item.target:
            found.append(f"{item.role}: the name {item.target!r} is not a plain file name")
        if item.sha256 and not _SHA256.fullmatch(item.sha256):
            found.append(f"{item.role}: sha256 {item.sha256!r} is not 64 lower-case hex digits")
        if item.bytes is not None and item.bytes <= 0:
            found.append(f"{item.role}: {item.bytes} bytes")
        if plan.fetch and not item.sources:
            found.append(f"{item.role}: no source (weights_sources is empty)")
        found += [f"{item.role}: weights_sources holds {problem}" for problem in _address_problems(item.sources)]
    for key in ("role", "target"):
        values = [getattr(item, key) for item in plan.files]
        found += [
            f"{key} {value} appears twice" for value in sorted({value for value in values if values.count(value) > 1})
        ]
    if not os.path.isabs(plan.directory):
        found.append(f"directory {plan.directory!r} is not absolute")
    proxy = _split(plan.proxy_url)
    if plan.proxy_url and (proxy is None or proxy.scheme != "http" or not proxy.hostname):
        found.append("weights_proxy_url is not of the form http://host:port")
    if proxy and (proxy.username or proxy.password):
        found.append("weights_proxy_url holds credentials; put user:password into weights_proxy_credentials_file")
    if not 1 <= plan.connections <= 64:
        found.append(f"weights_connections {plan.connections} is not between 1 and 64")
    return found


def _split(url: str) -> urllib.parse.SplitResult | None:
    """Parts of an address; None when it is none, as with a port that is no number."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts if parts.port is None or parts.port else None
    except ValueError:
        return None


def _address_problems(urls: Sequence[str]) -> list[str]:
    """Each kind of unusable address once."""
    found = []
    for url in urls:
        parts = _split(url)
        if parts is None or (parts.scheme in ("http", "https") and not parts.hostname):
            found.append(f"{url.partition('?')[0].rpartition('@')[2]}, which is no address")
        elif parts.scheme not in ("http", "https", "file"):
            found.append(f"{parts.scheme}, not http, https or a directory")
    return list(dict.fromkeys(found))


def token_hosts(sources: Sequence[str]) -> list[str]:
    """Whom a token is meant for when nobody says: the hub. A mirror or a machine of the LAN in the same list is not.

    The hub is huggingface.co where it is among the sources, else the first endpoint, else the first address at all.
    """
    addresses = [source for source in sources if not source.startswith(("/", "file:"))]
    endpoints = [source for source in addresses if "{" not in source]
    hosts = [parts.hostname or "" for source in [*endpoints, *addresses] if (parts := _split(source))]
    return [HUB] if HUB in hosts else hosts[:1]


def source_urls(sources: Sequence[str], repo: str, revision: str, file: str) -> list[str]:
    """Addresses of one file, in the order of ``weights_sources``.

    Args:
        sources: hub-like endpoints (``https://huggingface.co``), patterns with ``{file}`` (also ``{name}``, ``{repo}``,
            ``{revision}``), or absolute directories that hold the files by name or as ``OWNER/NAME/FILE``.
    """
    urls: list[str] = []
    values = {"repo": repo, "revision": revision or "main", "file": file, "name": os.path.basename(file)}
    quoted = {key: urllib.parse.quote(value, safe="/") for key, value in values.items()}
    for source in sources:
        text = source.rstrip("/")
        if text.startswith(("/", "file://")):
            folder = urllib.parse.quote(text) if text.startswith("/") else text[len("file://") :]
            urls += [f"file://{folder}/{quoted['name']}", f"file://{folder}/{quoted['repo']}/{quoted['file']}"]
        elif "{" in text:
            urls.append(re.sub(r"\{(repo|revision|file|name)\}", lambda found: quoted[found[1]], text))
        else:
            urls.append(f"{text}/{quoted['repo']}/resolve/{quoted['revision']}/{quoted['file']}")
    return list(dict.fromkeys(urls))


def segment_size(size: int) -> int:
    """Bytes of a segment: what a crash can cost, from 128 KiB to 16 MiB, about a thousand per file."""
    segment = 128 * 1024
    while segment < 16 * 1024**2 and size > segment * 1024:
        segment *= 2
    return segment
