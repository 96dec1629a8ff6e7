"""What all programs of the engine share: its build, log, lock, the trace that tests read, and memory accounting."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
import zipfile
from typing import Any

TRACE_DIR = "/run/lab-engine"  # the lab makes it; where it is absent nothing is recorded
TENANT_DIR = "/run/lab-tenants"  # files that the lab's memory simulator subtracts; their format is the simulator's
GIB_KIB = 1024 * 1024
RUNTIME_KIB = 3 * GIB_KIB  # KV banks and graphs beside the weights


def _packed(name: str) -> dict[str, Any]:
    with zipfile.ZipFile(sys.path[0]) as archive:
        content: dict[str, Any] = json.loads(archive.read(name))
    return content


BUILD = _packed("build.json")  # {"version": git describe, "cuda_arch": …}
RELEASE = _packed("release.json")  # {"version": "0.6.5", "faults": {…}}


class FatalError(Exception):
    """Ends the program with a line on standard error and an exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def log(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


class Faults:
    """Misbehaviour: baked into a tag (release.json), then what /run/lab-engine/faults.json says at this moment.

    A key ``only`` in faults.json, a list of versions as ``--version`` prints them, limits the file to those builds.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None
        self._live: dict[str, Any] = {}

    def get(self, name: str, default: Any = None) -> Any:
        path = os.path.join(TRACE_DIR, "faults.json")
        try:
            status = os.stat(path)
            if self._seen != (status.st_mtime_ns, status.st_ino):
                self._seen = (status.st_mtime_ns, status.st_ino)
                with open(path, encoding="utf-8") as stream:
                    content = json.load(stream)
                only = content.pop("only", None)
                self._live = content if only is None or BUILD["version"] in only else {}
        except FileNotFoundError:
            self._seen, self._live = None, {}
        except (OSError, ValueError) as error:
            log(f"stand-in: {path} not used: {error}")
        return self._live.get(name, RELEASE["faults"].get(name, default))


FAULTS = Faults()


def record(program: str, arguments: list[str], **more: Any) -> None:
    """Write what this process was given to /run/lab-engine/PROGRAM-PID.json, for tests."""
    if not os.path.isdir(TRACE_DIR):
        return
    content = {
        "program": program,
        "argv": arguments,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "uid": os.getuid(),
        "pid": os.getpid(),
        "time": time.time(),
        "version": BUILD["version"],
        **more,
    }
    path = os.path.join(TRACE_DIR, f"{program}-{os.getpid()}.json")
    try:
        with open(path + ".new", "w", encoding="utf-8") as stream:
            json.dump(content, stream, indent=1)
        os.replace(path + ".new", path)
    except OSError as error:
        log(f"stand-in: {path} not written: {error.strerror}")


def take_lock() -> int:
    """Only one program of the engine runs at a time: flock on the lock file, held until the process ends."""
    path = os.environ.get("DS4_LOCK_FILE") or "/tmp/ds4.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise FatalError(f"ds4: failed to open lock file {path}: {error.strerror}", 2) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise FatalError(f"ds4: failed to lock {path}: {error.strerror}", 2) from None
        owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
        raise FatalError(f"ds4: another ds4 process is already running (pid {owner}); refusing to start", 2) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle


class Memory:
    """Announces the simulated GPU memory of this process to the lab."""

    def __init__(self) -> None:
        self._path = os.path.join(TENANT_DIR, str(os.getpid()))

    def take(self, kib: int, floor_gib: int) -> None:
        if not os.path.isdir(TENANT_DIR):
            return
        available = _mem_available_kib()
        if available < kib + floor_gib * GIB_KIB:
            # A real Spark freezes here. The mark lets a test assert that it never came to that.
            record("overcommit", sys.argv, wanted_kib=kib, available_kib=available)
            raise FatalError(f"ds4: out of memory: {kib} KiB wanted, {available} KiB available")
        with open(self._path, "w", encoding="ascii") as stream:
            stream.write(f"{kib} {os.getpid()}\n")

    def give_back(self) -> None:
        hold = FAULTS.get("hold_memory_seconds")
        try:
            if hold:  # a negative number holds until the next boot, as a leaking driver does
                until = "" if hold < 0 else f" until={time.time() + hold:.0f}"
                with open(self._path, encoding="ascii") as stream:
                    kib = stream.read().split()[0]
                held = os.path.join(TENANT_DIR, f"held-{os.getpid()}")
                with open(held, "w", encoding="ascii") as stream:
                    stream.write(f"{kib}{until}\n")
            os.unlink(self._path)
        except FileNotFoundError:
            pass


def _mem_available_kib() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1])
    raise FatalError("ds4: no MemAvailable in /proc/meminfo")
