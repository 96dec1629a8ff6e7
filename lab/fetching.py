# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Runs the product's fetcher, as systemd and operators do (``python3 -m ds4.fetch``), against a stand-in hub."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .hub import ROOT, Control, weights

MECHANISM = ROOT / "plugins/module_utils"
sys.path.insert(0, str(MECHANISM))

from ds4.files import is_ours, mark  # noqa: E402  (needs the path above)
from ds4.plan import Plan, PlanFile, source_urls, token_hosts  # noqa: E402

# Patience that suits a test: seconds, not minutes.
IMPATIENT: dict[str, Any] = {
    "connections": 4,
    "stall_seconds": 1.0,
    "backoff_seconds": 0.05,
    "backoff_limit_seconds": 0.5,
    "deadline_seconds": 90.0,
}


class Finished(NamedTuple):
    """A fetcher that ended. ``peak_kib`` is its largest resident size."""

    rc: int
    text: str
    seconds: float
    peak_kib: int
    argv: list[str]


class Running:
    """A fetcher at work."""

    def __init__(self, argv: Sequence[str], env: dict[str, str]) -> None:
        self.argv = list(argv)
        self._output = tempfile.TemporaryFile()
        self._begun = time.monotonic()
        self._peak_kib = 0
        self._process = subprocess.Popen(
            self.argv, env=env, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
        )
        self.pid = self._process.pid

    def text(self) -> str:
        """What it has said so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode("utf-8", "replace")

    def kill(self) -> Finished:
        """End it as a crash would, and say how it ended."""
        self._process.send_signal(signal.SIGKILL)
        return self.wait()

    def ended(self, timeout_seconds: float = 0.0) -> Finished | None:
        """How it ended; None when it is still at work after ``timeout_seconds``."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            self._peak_kib = max(self._peak_kib, self._resident_kib())
            rc = self._process.poll()
            if rc is not None:
                return Finished(rc, self.text(), time.monotonic() - self._begun, self._peak_kib, self.argv)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.005)

    def _resident_kib(self) -> int:
        # The kernel's own high-water mark; ru_maxrss would include what this process had at the fork.
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:") and self._executed():
                    return int(line.split()[1])
        return 0

    def _executed(self) -> bool:
        return b"ds4.fetch" in Path(f"/proc/{self.pid}/cmdline").read_bytes()

    def wait(self, timeout_seconds: float = 120.0) -> Finished:
        """Wait for its end.

        Raises:
            TimeoutError: it hangs; it is killed and its words are in the message.
        """
        ended = self.ended(timeout_seconds)
        if ended is None:
            self._process.kill()
            self.ended(10)
            raise TimeoutError(f"the fetcher was still at work after {timeout_seconds:g} s; it said:\n{self.text()}")
        return ended


class Fetcher:
    """A directory of weights, its plan and the command that fills it.

    Args:
        folder: holds ``weights/``, ``plan.json`` and ``status.json``.
        control: of the hub that serves; its log tells what came over the wire.
        files: entries of a manifest by role (``lab.hub.weights.manifest()["0731"]``).
        sources: as in ``weights_sources``; by default the hub.
        prefix: words before the command, for example ``ip netns exec NAME``.
        settings: fields of ``ds4.plan.Plan`` that differ from ``IMPATIENT``.
    """

    def __init__(
        self,
        folder: Path,
        control: Control,
        files: dict[str, dict[str, Any]],
        *,
        sources: Sequence[str] = (),
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.control = control
        self.directory = folder / "weights"
        self.plan_path = folder / "plan.json"
        self.status_path = folder / "status.json"
        self.prefix = list(prefix)
        self.directory.mkdir(parents=True, exist_ok=True)
        if not is_ours(str(self.directory)):
            mark(str(self.directory), "weights of a test")
        cdn_host = control.cdn_url.partition("://")[2].rpartition(":")[0]
        self.plan = Plan(
            **{
                "generation": "0731",
                "directory": str(self.directory),
                "user": "root",
                "token_hosts": token_hosts(list(sources) or [control.url]),
                "status_file": str(self.status_path),
                "allowed_hosts": [cdn_host],
                "ca_file": control.ca_file,
                "files": [
                    PlanFile(
                        role=role,
                        file=entry["file"],
                        target=entry["file"],
                        bytes=entry.get("bytes"),
                        sha256=entry.get("sha256", ""),
                        sources=source_urls(
                            list(sources) or [control.url], entry["repo"], entry["revision"], entry["file"]
                        ),
                        repo=entry["repo"],
                        revision=entry["revision"],
                    )
                    for role, entry in files.items()
                ],
                **IMPATIENT,
                **settings,
            }
        )
        self.plan.write(str(self.plan_path))

    def start(self, *words: str, env: dict[str, str] | None = None) -> Running:
        """Start the command in a clean environment; ``run`` when no words are given."""
        clean = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": "/root", "PYTHONPATH": str(MECHANISM)}
        argv = [*self.prefix, sys.executable, "-m", "ds4.fetch", "--plan", str(self.plan_path), *(words or ("run",))]
        return Running(argv, clean | (env or {}))

    def run(self, *words: str, env: dict[str, str] | None = None, timeout_seconds: float = 120.0) -> Finished:
        """Start the command and wait for its end."""
        return self.start(*words, env=env).wait(timeout_seconds)

    def path(self, role: str) -> Path:
        """Final path of a file."""
        return self.directory / next(item.target for item in self.plan.files if item.role == role)

    def sha256(self, role: str) -> str:
        """Hash of what is under the final name; empty when nothing is."""
        try:
            with self.path(role).open("rb") as stream:
                return hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            return ""

    def status(self) -> dict[str, Any]:
        """Content of the status file; empty when there is none."""
        try:
            return dict(json.loads(self.status_path.read_text()))
        except FileNotFoundError:
            return {}

    def leftovers(self) -> list[str]:
        """Names in the directory beside finished files, their records, our marker and the lock."""
        expected = {item.target for item in self.plan.files} | {
            f"{item.target}.record.json" for item in self.plan.files
        }
        return sorted({path.name for path in self.directory.iterdir()} - expected - {".ds4-fleet", ".fetch"})

    def wire_bytes(self) -> int:
        """Bytes of bodies that the CDN sent, as its own log says."""
        return int(self.control.stats()["bytes"]["cdn"])


def lab_file(generation: str, role: str) -> weights.LabFile:
    """The lab's file for a role."""
    return next(file for file in weights.FILES if (file.generation, file.role) == (generation, role))
