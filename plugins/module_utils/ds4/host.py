# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a host is and what runs on it: readers only, nothing here changes or judges anything."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from .process import Process, is_number, user_name

ENGINE_LOCK = "/tmp/ds4.lock"
# Programs of the engine (its Makefile's list); any of them can map the weights and takes the engine's lock.
ENGINE_PROGRAMS = ("ds4-server", "ds4", "ds4-bench", "ds4-eval", "ds4-agent", "ds4_weight_server")
_LISTEN = "0A"


def _pids(proc: str) -> list[int]:
    return sorted(int(name) for name in os.listdir(proc) if is_number(name))


def process_unit(pid: int, *, proc: str = "/proc") -> str:
    """Unit of the system manager that a process belongs to (``ds4.service``, ``session-3.scope``), ``""`` for none."""
    return Process(pid, proc=proc).unit


# ---------------------------------------------------------------------------------------------------- listeners


def _address(text: str) -> tuple[str, int]:
    """``0100007F:1F40`` → (``127.0.0.1``, 8000): the kernel prints each 32-bit word in its own byte order."""
    raw, _colon, port = text.partition(":")
    data = bytes.fromhex(raw)
    words = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, words), int(port, 16)


def parse_tcp_listeners(text: str) -> list[dict[str, Any]]:
    """Listening sockets of ``/proc/net/tcp`` or ``tcp6``: address, port, inode, uid."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _LISTEN:
            address, port = _address(fields[1])
            found.append({"address": address, "port": port, "uid": int(fields[7]), "inode": int(fields[9])})
    return found


def socket_owners(inodes: set[int], *, proc: str = "/proc") -> dict[int, int]:
    """Pid that holds each socket inode; the lowest one when a socket is shared. Needs root for other users' sockets."""
    owners: dict[int, int] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for pid in _pids(proc) if wanted else []:
        for _number, target in Process(pid, proc=proc).descriptors():
            inode = wanted.get(target)
            if inode is not None:
                owners.setdefault(inode, pid)
    return owners


def listeners(ports: list[int] | None = None, *, proc: str = "/proc") -> list[dict[str, Any]]:
    """Listening TCP sockets with their owners, sorted by port.

    Args:
        ports: only these; all of them when None.

    Returns:
        ``[{address, port, inode, pid, user, command, unit}]``. ``pid`` is None when the owner cannot be seen
        (no root, or a process of another namespace); ``user`` is then the socket's own.
    """
    rows = []
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{table}", encoding="ascii") as stream:
                rows += parse_tcp_listeners(stream.read())
        except FileNotFoundError:  # a kernel without IPv6
            continue
    if ports is not None:
        rows = [row for row in rows if row["port"] in ports]
    owners = socket_owners({row["inode"] for row in rows}, proc=proc)
    result = []
    for row in sorted(rows, key=lambda row: (row["port"], row["address"])):
        process = Process(owners[row["inode"]], proc=proc) if row["inode"] in owners else None
        result.append(
            {
                "address": row["address"],
                "port": row["port"],
                "inode": row["inode"],
                "pid": process.pid if process else None,
                "user": user_name(row["uid"]),
                "command": process.program if process else "",
                "unit": process.unit if process else "",
            }
        )
    return result


# ---------------------------------------------------------------------------------------------- engine processes


def _weights_of(process: Process, argv: list[str], cwd: str) -> list[str]:
    """Model files of an engine process: what it maps, and what its command line and environment name."""
    named = [
        argv[i + 1] for i, word in enumerate(argv[:-1]) if word in ("-m", "--model", "--mtp", "--dspark", "--base")
    ]
    named += process.environment("DS4_DSPARK_MODEL").values()
    paths = {os.path.join(cwd or "/", path) for path in named if path}
    return sorted(paths | {path.removesuffix(" (deleted)") for path in process.mapped_files(".gguf")})


def _file_bytes(paths: list[str]) -> int:
    """Size of all of ``paths`` that exist, each file once: a name may be a link to what is mapped."""
    sizes = {}
    for path in paths:
        try:
            stat = os.stat(path)
        except OSError:
            continue
        sizes[stat.st_dev, stat.st_ino] = stat.st_size
    return sum(sizes.values())


def ds4_processes(*, proc: str = "/proc") -> list[dict[str, Any]]:
    """Running programs of the engine, recognised by argv[0] or by the executable's name.

    Returns:
        ``[{pid, started_ticks, user, program, argv, cwd, exe, unit, manager, cgroup, deployment, weights,
        weights_bytes, resident_kib, port}]``. ``manager`` is the service that would start it again (``""``: nobody, as
        with the public installer's nohup), ``deployment`` is ``DS4_DEPLOYMENT`` of its environment (``""`` when not
        ours or not readable), ``weights`` the model files it maps or names, ``weights_bytes`` their size (files that are gone
        count nothing), ``resident_kib`` its own memory without mapped files, ``port`` what ``--port`` says (engine's
        default 8000; 0 for programs that do not serve).
    """
    found = []
    for pid in _pids(proc):
        process = Process(pid, proc=proc)
        argv = process.argv
        exe = process.executable
        names = [os.path.basename(argv[0]) if argv else "", os.path.basename(exe.removesuffix(" (deleted)"))]
        program = next((name for name in names if name in ENGINE_PROGRAMS), "")
        if not program or not process.alive:
            continue
        cwd = process.cwd
        weights = _weights_of(process, argv, cwd)
        found.append(
            {
                "pid": pid,
                "started_ticks": process.started_ticks,
                "user": process.user,
                "program": program,
                "argv": argv,
                "cwd": cwd,
                "exe": exe,
                "unit": process.unit,
                "manager": process.manager,
                "cgroup": process.cgroup,
                "deployment": process.environment("DS4_DEPLOYMENT").get("DS4_DEPLOYMENT", ""),
                "weights": weights,
                "weights_bytes": _file_bytes(weights),
                "resident_kib": process.status_kib("RssAnon") + process.status_kib("RssShmem"),
                "port": _port_of(argv) if program == "ds4-server" else 0,
            }
        )
    return found


def _port_of(argv: list[str]) -> int:
    port = 8000  # ds4-server's default
    for index, word in enumerate(argv[:-1]):
        if word == "--port" and is_number(argv[index + 1]):  # the last occurrence wins, as in the engine
            port = int(argv[index + 1])
    return port


def cuda_processes(*, proc: str = "/proc") -> list[dict[str, Any]]:
    """Processes that hold CUDA memory or could: those with ``/dev/nvidia-uvm`` open. Needs root to see all.

    What the driver allocated for them is in no resident set, so they are the first to look at when memory is short.
    """
    found = []
    for pid in _pids(proc):
        process = Process(pid, proc=proc)
        if any(target == "/dev/nvidia-uvm" for _number, target in process.descriptors()):
            found.append({"pid": pid, "user": process.user, "command": process.program, "unit": process.unit})
    return found


def running_programs(names: Sequence[str], *, proc: str = "/proc") -> list[dict[str, Any]]:
    """Processes whose program bears one of ``names``."""
    found = []
    for pid in _pids(proc):
        process = Process(pid, proc=proc)
        if process.name in names:
            found.append({"pid": pid, "user": process.user, "command": process.program, "unit": process.unit})
    return found


# --------------------------------------------------------------------------------------------------------- locks


class LockHolder(NamedTuple):
    """Who holds a lock on a file. ``pid`` is 0 when the holder cannot be seen from here."""

    pid: int
    kind: str  # FLOCK, POSIX or OFDLCK
    user: str
    command: str
    unit: str


def parse_locks(text: str) -> list[tuple[str, int, int, int, int]]:
    """Granted locks of ``/proc/locks``: (kind, pid, major, minor, inode). Waiters (``->``) hold nothing."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->":
            continue
        major, minor, inode = fields[5].split(":")
        found.append((fields[1], int(fields[4]), int(major, 16), int(minor, 16), int(inode)))
    return found


def lock_holders(path: str = ENGINE_LOCK, *, proc: str = "/proc") -> list[LockHolder]:
    """Processes that hold a lock (flock or fcntl) on ``path``; empty when nobody does or the file is absent.

    Reads /proc only: trying the lock would make an engine that starts at that moment refuse. A holder is confirmed
    by its open descriptor, since on overlay file systems the device number in /proc/locks differs from stat's.
    """
    try:
        stat = os.stat(path)
        with open(f"{proc}/locks", encoding="ascii", errors="replace") as stream:
            rows = parse_locks(stream.read())
    except OSError:
        return []
    holders: dict[int, LockHolder] = {}
    for kind, pid, major, minor, inode in rows:
        if inode != stat.st_ino:
            continue
        same_device = (major, minor) == (os.major(stat.st_dev), os.minor(stat.st_dev))
        # flock belongs to the open file: the process that took it may be gone while a child keeps it.
        owners = [p for p in ([pid] if pid > 0 else []) if _has_open(Process(p, proc=proc), stat)]
        owners = owners or [p for p in _pids(proc) if _locks_descriptor(Process(p, proc=proc), stat)]
        if not owners and not same_device:
            continue
        for owner in owners or [max(pid, 0)]:
            process = Process(owner, proc=proc)
            holders[owner] = LockHolder(owner, kind, process.user, process.program if owner else "", process.unit)
    return [holders[pid] for pid in sorted(holders)]


def _same(path: str, stat: os.stat_result) -> bool:
    try:
        other = os.stat(path)
    except OSError:
        return False
    return (other.st_dev, other.st_ino) == (stat.st_dev, stat.st_ino)


def _has_open(process: Process, stat: os.stat_result) -> bool:
    return any(_same(f"{process.directory}/fd/{number}", stat) for number, _target in process.descriptors())


def _locks_descriptor(process: Process, stat: os.stat_result) -> bool:
    for number, target in process.descriptors():
        if target.startswith("/") and _same(f"{process.directory}/fd/{number}", stat):
            try:
                with open(f"{process.directory}/fdinfo/{number}", encoding="ascii", errors="replace") as stream:
                    if "lock:" in stream.read():
                        return True
            except OSError:
                continue
    return False
