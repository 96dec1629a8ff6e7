"""What the lab needs from the machine it runs on: root, Debian packages, control groups, locks, child processes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CACHE_DIR = os.environ.get("DS4_LAB_CACHE", "/var/cache/ds4-lab")
STATE_DIR = os.environ.get("DS4_LAB_STATE", "/var/lib/ds4-lab")

# program → Debian package that brings it
PROGRAMS = {
    "systemd-nspawn": "systemd-container",
    "mmdebstrap": "mmdebstrap",
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "losetup": "mount",
    "mkfs.ext4": "e2fsprogs",
    "openssl": "openssl",
    "git": "git",
}
FILES = {"/usr/share/keyrings/debian-archive-keyring.gpg": "debian-archive-keyring"}


T = TypeVar("T")


class LabError(Exception):
    """An expected condition that stops the lab; the text says what failed and what cures it."""


class Ran(NamedTuple):
    """Outcome of a command: exit status as shells count it (128 + signal), output, error. 124: past the time limit."""

    rc: int
    out: str
    err: str


def run(
    argv: Sequence[str],
    *,
    check: bool = True,
    timeout: float = 60.0,
    stdin: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run ``argv`` on this machine.

    Args:
        check: raise LabError when it fails or is absent.
        timeout: seconds before it is killed with its process group.
        stdin: text for standard input; /dev/null when None.
        env: variables added to the inherited environment.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LabError(f"{argv[0]} is missing. Cure: python3 -m lab needs --install") from error
    try:
        out, err = process.communicate(stdin, timeout=timeout)
        ran = Ran(process.returncode if process.returncode >= 0 else 128 - process.returncode, out, err)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        ran = Ran(124, out, err + f"\nno end within {timeout:g} s")
    if check and ran.rc != 0:
        raise LabError(f"{shlex.join(argv)} failed with {ran.rc}: {(ran.err or ran.out).strip()}")
    return ran


def needs() -> list[str]:
    """Debian packages this machine lacks for the lab, sorted; empty when it is ready."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = {package for program, package in PROGRAMS.items() if shutil.which(program, path=path) is None}
    missing |= {package for file, package in FILES.items() if not os.path.exists(file)}
    return sorted(missing)


def require() -> None:
    """Refuse to go on, with the cure, when this machine cannot run the lab."""
    if os.geteuid() != 0:
        raise LabError("The lab needs root: it makes bridges, mounts and containers. Cure: sudo, or run it as root.")
    if not sys.platform.startswith("linux"):
        raise LabError(f"The lab needs Linux. Found: {sys.platform}.")
    missing = needs()
    if missing:
        raise LabError(
            f"Debian packages are missing: {', '.join(missing)}. Cure: python3 -m lab needs --install "
            f"(runs apt-get install -y {' '.join(missing)})."
        )
    cgroup_root()


@contextlib.contextmanager
def lock(name: str, *, wait: bool = True) -> Iterator[None]:
    """Hold the machine-wide exclusive lock ``name``, which dies with this process.

    Args:
        wait: wait for whoever has it; otherwise BlockingIOError when it is held.
    """
    folder = os.path.join(CACHE_DIR, "locks")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "a", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def wait(condition: Callable[[], T], what: str, *, timeout: float, period: float = 0.05) -> T:
    """Poll ``condition()`` until it is truthy and return its value; LabError past ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {timeout:g} s.")
        time.sleep(period)


# --- the one limit of the machine that several booted systems exceed

INOTIFY_LIMIT = "/proc/sys/fs/inotify/max_user_instances"
INOTIFY_WANTED = 1024  # a host takes up to ten, and the usual limit for all of root's processes is 128
_INOTIFY_BEFORE = os.path.join(CACHE_DIR, "inotify-before")


def raise_limits() -> None:
    """Allow enough inotify instances while hosts run; the value found is kept for restore_limits()."""
    found = int(read(INOTIFY_LIMIT))
    if found < INOTIFY_WANTED:
        write(_INOTIFY_BEFORE, f"{found}\n")
        write(INOTIFY_LIMIT, f"{INOTIFY_WANTED}\n")


def restore_limits() -> None:
    """Put the limit back to what it was before the first instance; call it when the last one is gone."""
    if os.path.exists(_INOTIFY_BEFORE):
        if int(read(INOTIFY_LIMIT)) == INOTIFY_WANTED:
            write(INOTIFY_LIMIT, read(_INOTIFY_BEFORE))
        os.unlink(_INOTIFY_BEFORE)


# --- control groups: everything of an instance lives under one, so that ending it can miss nothing


def cgroup_root() -> str:
    """Mount point of the version 2 control group tree of this machine."""
    with open("/proc/self/mounts", encoding="utf-8") as handle:
        for line in handle:
            fields = line.split()
            if fields[2] == "cgroup2" and fields[1].startswith("/sys/fs/cgroup"):
                return fields[1]
    raise LabError("This machine has no cgroup2 file system. Cure: boot with systemd.unified_cgroup_hierarchy=1.")


def cgroup(*parts: str) -> str:
    """Path of the lab's control group for an instance (and host), whether or not it exists."""
    return os.path.join(cgroup_root(), "ds4-lab", *parts)


def cgroup_pids(path: str) -> list[int]:
    """Processes in the control group ``path`` and below; empty when it does not exist."""
    pids: list[int] = []
    for directory, _, _ in os.walk(path):
        with contextlib.suppress(OSError), open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as handle:
            pids += [int(line) for line in handle]
    return pids


def cgroup_kill(path: str, *, timeout: float = 10.0) -> None:
    """Kill everything in ``path`` at once, wait until it is gone, remove the control group."""
    if not os.path.isdir(path):
        return
    deadline = time.monotonic() + timeout
    while True:
        for directory, _, _ in os.walk(path):
            # A frozen group dies only once thawed.
            with contextlib.suppress(OSError):
                write(os.path.join(directory, "cgroup.freeze"), "0")
        with contextlib.suppress(OSError):
            write(os.path.join(path, "cgroup.kill"), "1")
        for directory, _, _ in os.walk(path, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if not os.path.isdir(path):
            return
        if time.monotonic() > deadline:
            raise LabError(f"Processes {cgroup_pids(path)} of {path} do not end within {timeout:g} s.")
        time.sleep(0.02)


def spawn(
    argv: Sequence[str], *, group: str, log: str, cwd: str = REPOSITORY, env: Mapping[str, str] | None = None
) -> None:
    """Start a process that outlives us, in the control group ``group`` (which identifies it), with its output in ``log``."""
    os.makedirs(group, exist_ok=True)
    # Forked away, so that init collects it and not we.
    joined = ["/bin/sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec setsid --fork "$@"', group, *argv]
    with open(log, "ab") as output:
        started = subprocess.run(
            joined,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            check=False,
        )
    if started.returncode != 0:
        raise LabError(f"Cannot start {shlex.join(argv)}: see {log}")


def write(path: str, text: str, *, mode: int | None = None) -> None:
    """Write ``text`` to ``path`` in place, making its folder; ``mode`` is set when given."""
    if not path.startswith(("/sys/", "/proc/")):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as handle:
        handle.write(text)
    if mode is not None:
        os.chmod(path, mode)


def tree_digest(path: str) -> str:
    """Hash of names and contents of all files below ``path``, wherever it lies."""
    digest = hashlib.sha256()
    for directory, directories, names in os.walk(path):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted(names):
            file = os.path.join(directory, name)
            digest.update(f"{os.path.relpath(file, path)}\0{read(file)}\0".encode())
    return digest.hexdigest()


def read(path: str) -> str:
    """Text of ``path``."""
    with open(path, encoding="utf-8", errors="replace") as handle:
        return handle.read()
