# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a machine is: releases, firmware, disks, sessions, packages and names. Readers only; nothing judges."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import stat
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional

from .command import Ran, run, which
from .files import MARKER_LINE, existing_parent, is_ours, link_target, read_text
from .process import user_name
from .space import mount_of

UNIT_PATHS = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
DMI = "/sys/class/dmi/id"
_SYNCHRONIZED_BELOW = 16_000_000  # µs; the limit that timedatectl uses
_COUNT_LIMIT = 50000  # files looked at when a folder is measured: a build has hundreds

Runner = Callable[..., Ran]


def parse_shell_values(text: str) -> dict[str, str]:
    """``KEY="value"`` lines of os-release and dgx-release. A repeated key keeps its last value: OTA updates append."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if not equals or not key.isidentifier():
            continue
        try:
            values[key] = "".join(shlex.split(value))
        except ValueError:  # an unbalanced quote: keep what is there
            values[key] = value.strip("\"' ")
    return values


def releases(root: str = "/") -> dict[str, dict[str, str]]:
    """``os`` (id, version, name) and ``dgx`` (name, version, ota_version, platform); unknown values are ``""``.

    ``version`` of ``dgx`` is the newest one: the last OTA update if there was any, else the factory image.
    """
    system = parse_shell_values(read_text(os.path.join(root, "etc/os-release")))
    dgx = parse_shell_values(read_text(os.path.join(root, "etc/dgx-release")))
    return {
        "os": {
            "id": system.get("ID", ""),
            "version": system.get("VERSION_ID", ""),
            "name": system.get("PRETTY_NAME", ""),
        },
        "dgx": {
            "name": dgx.get("DGX_NAME", ""),
            "platform": dgx.get("DGX_PLATFORM", ""),
            "image_version": dgx.get("DGX_SWBUILD_VERSION", ""),
            "ota_version": dgx.get("DGX_OTA_VERSION", ""),
            "version": dgx.get("DGX_OTA_VERSION") or dgx.get("DGX_SWBUILD_VERSION", ""),
        },
    }


def firmware(directory: str = DMI) -> dict[str, str]:
    """BIOS and product as the kernel shows them; ``""`` where it does not. Serial numbers are left alone."""
    names = ("bios_vendor", "bios_version", "bios_date", "board_vendor", "product_name", "sys_vendor")
    return {name: read_text(os.path.join(directory, name)).strip() for name in names}


# ------------------------------------------------------------------------------------------------------ disks


def disk(path: str, *, mountinfo: str | None = None) -> dict[str, Any]:
    """The file system that ``path`` lies on, or would: that of its nearest existing parent.

    Returns:
        ``{path, exists, parent, device, mount, filesystem, source, total_bytes, free_bytes, read_only}``. ``device``
        is the same for two paths exactly when they share a file system; ``free_bytes`` is what an ordinary user can
        write.
    """
    parent = existing_parent(path)
    figures = os.statvfs(parent)
    device = os.stat(parent).st_dev
    mount = mount_of(parent, mountinfo)
    return {
        "path": path,
        "exists": os.path.lexists(path),
        "parent": parent,
        "device": f"{os.major(device)}:{os.minor(device)}",
        "mount": mount["path"],
        "filesystem": mount["type"],
        "source": mount["source"],
        "total_bytes": figures.f_blocks * figures.f_frsize,
        "free_bytes": figures.f_bavail * figures.f_frsize,
        "read_only": bool(figures.f_flag & os.ST_RDONLY),
    }


def is_mount(path: str, *, mountinfo: str | None = None) -> bool:
    """Is a file system mounted right there? A link to a mount point is one, and so is a bind mount of the same disk."""
    return os.path.isdir(path) and mount_of(path, mountinfo)["path"] == os.path.realpath(path)


def present_bytes(path: str) -> int:
    """Bytes on disk of a file, or of all files below a folder on the same file system; 0 when absent.

    Allocated bytes, not the length: a sparse partial file has less than its size. A link counts as what it points to.
    """
    try:
        top = os.stat(path)
    except OSError:
        return 0
    if not stat.S_ISDIR(top.st_mode):
        return min(top.st_size, top.st_blocks * 512)
    total, seen, folders = 0, 0, [path]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if seen > _COUNT_LIMIT:
                return total
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode) and info.st_dev == top.st_dev:
                folders.append(entry.path)
            elif stat.S_ISREG(info.st_mode):
                total += min(info.st_size, info.st_blocks * 512)
    return total


# ------------------------------------------------------------------------------------------------------ names


def account(name: str, gecos: str) -> dict[str, Any]:
    """Is there an account of that name, and is it ours (its comment field is ``gecos``)?"""
    import pwd

    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return {"name": name, "exists": False, "ours": False, "found": ""}
    return {
        "name": name,
        "exists": True,
        "ours": entry.pw_gecos.split(",")[0] == gecos,
        "found": f"uid {entry.pw_uid}, comment {entry.pw_gecos!r}, home {entry.pw_dir}",
    }


def directory(path: str) -> dict[str, Any]:
    """Is there something at ``path``, and is it ours (it bears our marker)? An empty folder is nobody's."""
    row: dict[str, Any] = {"path": path, "exists": os.path.lexists(path), "ours": False, "empty": False, "found": ""}
    if not row["exists"]:
        return row
    if not os.path.isdir(path):
        return {**row, "found": "not a directory"}
    try:
        names = set(os.listdir(path)) - {"lost+found"}  # the root of a fresh file system is empty to us
    except OSError as error:
        return {**row, "found": str(error.strerror)}
    owner = user_name(os.stat(path).st_uid)
    return {**row, "ours": is_ours(path), "empty": not names, "found": f"owner {owner}, {len(names)} entries"}


def text_file(path: str, *, links: bool = True) -> dict[str, Any]:
    """Is there a file at ``path``, and is it ours: it bears our marker line or, with ``links``, is a link into a folder of ours?"""
    exists = os.path.lexists(path)
    found = os.path.realpath(path) if exists else ""
    ours = MARKER_LINE in read_text(path)[:65536] or (links and _leads_into_ours(path))
    return {"path": path, "exists": exists, "ours": ours, "found": found}


def _leads_into_ours(path: str) -> bool:
    """True for a link of which one step, whether it leads to something or not, stays below a marked folder."""
    folder = link_target(path)
    while folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
        if is_ours(folder):
            return True
    return False


def unit(name: str, paths: Sequence[str] = UNIT_PATHS) -> dict[str, Any]:
    """The unit file of that name that systemd would use, and whether it is ours."""
    for path in (os.path.join(folder, name) for folder in paths):
        if os.path.lexists(path):
            return {**text_file(path, links=False), "name": name}
    return {"name": name, "path": "", "exists": False, "ours": False, "found": ""}


# --------------------------------------------------------------------------------------------------- programs


def missing_commands(names: Iterable[str]) -> list[str]:
    """Those of ``names`` that are on no PATH of root."""
    return [name for name in names if which(name) is None]


def missing_packages(names: Sequence[str], *, runner: Runner = run) -> list[str] | None:
    """Those of ``names`` that are not installed; None when dpkg cannot be asked (not a Debian family system)."""
    if not names:
        return []
    answer = runner(
        ["dpkg-query", "--show", "--showformat=${Package}\\t${db:Status-Status}\\n", *names], timeout_seconds=30
    )
    if answer.rc not in (0, 1):  # 1: some are unknown
        return None
    installed = {line.split("\t")[0] for line in answer.out.splitlines() if line.endswith("\tinstalled")}
    return [name for name in names if name not in installed]


def systemd_state(*, runner: Runner = run, directory_path: str = "/run/systemd/system") -> dict[str, Any]:
    """``{running, state, version}``: is systemd the init, what does it think of itself, which version is it."""
    if not os.path.isdir(directory_path):
        return {"running": False, "state": "", "version": ""}
    answer = runner(["systemctl", "show", "--property=Version", "--property=SystemState"], timeout_seconds=10)
    values = parse_shell_values(answer.out)
    return {"running": True, "state": values.get("SystemState", ""), "version": values.get("Version", "")}


def display(*, runner: Runner = run) -> bool | None:
    """Does a display manager run (a login screen counts)? None when systemd does not say."""
    answer = runner(["systemctl", "show", "--property=ActiveState", "display-manager.service"], timeout_seconds=10)
    state = parse_shell_values(answer.out).get("ActiveState", "")
    return state in ("active", "activating", "reloading") if state else None


def clock(
    *, adjtimex: Callable[[], Optional[int]] | None = None, now: Callable[[], float] = time.time
) -> dict[str, Any]:
    """``{epoch, utc, ntp_synchronized}``: seconds since 1970, the same as text, and True, False or None (unknown)."""
    error = (adjtimex or _maximum_error)()
    epoch = now()
    return {
        "epoch": round(epoch),
        "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch)),
        "ntp_synchronized": None if error is None else error < _SYNCHRONIZED_BELOW,
    }


def _maximum_error() -> Optional[int]:
    """The kernel's estimate of the clock's error (µs), which time synchronisation keeps small; None when it is not told.

    adjtimex(2) with no mode set only reads. ``struct timex`` begins with modes, offset, freq, maxerror. Asking
    ``timedatectl`` for the same would start a service on the host.
    """
    buffer = (ctypes.c_long * 64)()
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else int(buffer[3])


# --------------------------------------------------------------------------------------------------- sessions


def parse_sessions(text: str) -> list[dict[str, Any]]:
    """Blocks of ``loginctl show-session``: ``[{id, user, type, graphical, remote, active, service}]``, people only.

    The login screen (class ``greeter``) and service managers (class ``manager``) are nobody's session.
    """
    sessions = []
    for block in text.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if not values.get("Class", "").startswith("user"):
            continue
        sessions.append(
            {
                "id": values.get("Id", ""),
                "user": values.get("Name", ""),
                "type": values.get("Type", ""),
                "graphical": values.get("Type", "") in ("x11", "wayland", "mir"),
                "remote": values.get("Remote", "") == "yes",
                "active": values.get("State", "") == "active",
                "service": values.get("Service", ""),
            }
        )
    return sessions


def sessions(*, runner: Runner = run) -> list[dict[str, Any]] | None:
    """Login sessions of people; None when logind cannot be asked."""
    listed = runner(["loginctl", "list-sessions", "--no-legend", "--no-pager"], timeout_seconds=10)
    if listed.rc != 0:
        return None
    ids = [line.split()[0] for line in listed.out.splitlines() if line.strip()]
    if not ids:
        return []
    names = ("Id", "Name", "Type", "Class", "State", "Remote", "Service")
    # A session can end between the two questions: what could be shown counts.
    answer = runner(["loginctl", "show-session", *ids, *(f"--property={name}" for name in names)], timeout_seconds=10)
    return parse_sessions(answer.out)


def describe(*, runner: Runner = run) -> dict[str, Any]:
    """What needs no parameters: architecture, kernel, python, effective user, releases, firmware, systemd, clock, display, sessions."""
    return {
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": {"version": platform.python_version(), "executable": sys.executable or ""},
        "euid": os.geteuid(),
        **releases(),
        "firmware": firmware(),
        "systemd": systemd_state(runner=runner),
        "clock": clock(),
        "display": display(runner=runner),
        "sessions": sessions(runner=runner),
    }
