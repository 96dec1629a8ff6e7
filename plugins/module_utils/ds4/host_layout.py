# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What every other room stands on: the system user and our directories, each bearing our marker."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .command import Ran, run
from .errors import Ds4Error
from .files import FRESH_DISK, MARKER_NAME, is_ours, read_json, write_json

GECOS = "ds4-fleet service account"  # our marker of an account
NO_LOGIN = "/usr/sbin/nologin"

Runner = Callable[..., Ran]


class Directory(NamedTuple):
    """A directory of ours. ``mode`` is a number; ``owner`` and ``group`` are names.

    ``contents`` says what of its content goes when everything of ours is removed: ``all``, ``marked`` (folders that bear
    our marker) or ``keep``.
    """

    path: str
    owner: str
    group: str
    mode: int
    purpose: str
    contents: str = "keep"


class Plan(NamedTuple):
    """What ``apply`` would do: account names to create, and directories with their state before and after."""

    group: str
    user: str
    directories: list[tuple[Directory, dict[str, str]]]

    @property
    def changed(self) -> bool:
        return bool(self.group or self.user or self.directories)


def parse_directories(rows: Sequence[dict[str, Any]]) -> list[Directory]:
    """Typed rows of module parameters; parents come before what lies in them.

    Raises:
        Ds4Error: a path is not absolute, a mode is not octal, or one path is listed twice.
    """
    found: list[Directory] = []
    wrong = []
    for row in rows:
        path = os.path.normpath(str(row["path"]))
        try:
            mode = int(str(row["mode"]), 8)
        except ValueError:
            wrong.append(f"{path}: mode {row['mode']!r} is not octal")
            continue
        if not os.path.isabs(path) or path == "/":
            wrong.append(f"{row['path']!r} is not an absolute path below /")
        if any(path == other.path for other in found):
            wrong.append(f"{path} is listed twice")
        contents = str(row.get("contents") or "keep")
        found.append(Directory(path, str(row["owner"]), str(row["group"]), mode, str(row["purpose"]), contents))
    if wrong:
        raise Ds4Error(
            "The directories of the layout are not usable",
            found="; ".join(wrong),
            required="absolute paths, each once, modes such as '0755'",
            cure="correct ds4_root, ds4_data_dir or host_base_directories",
        )
    return sorted(found, key=lambda directory: directory.path)


def plan(user: str, group: str, directories: Sequence[Directory]) -> Plan:
    """Compare the host with what is wanted.

    Args:
        user: system user that builds, fetches and serves.
        group: its primary group; an existing one is used as it is.
        directories: see ``parse_directories``.

    Raises:
        Ds4Error: something bears one of our names and is not ours. All such things are in one message.
    """
    problems = _account_problems(user, group)
    changes = []
    for directory in directories:
        before = _state(directory.path)
        problem = _directory_problem(directory.path)
        if problem:
            problems.append(problem)
        elif before != _wanted(directory):
            changes.append((directory, before))
    if problems:
        raise Ds4Error(
            "What bears our names on this host is not ours",
            found="; ".join(problems),
            required="nothing there, an empty directory, or one that ds4-fleet made",
            cure="move it away, or choose other names with ds4_user, ds4_group, ds4_root and ds4_data_dir",
            evidence={"problems": problems},
        )
    return Plan(group if not _known_group(group) else "", user if not _known_user(user) else "", changes)


def apply(wanted: Plan, user: str, group: str, home: str, *, runner: Runner = run) -> None:
    """Make the host agree with ``plan``. ``home`` is the home directory of a user that has to be created.

    Raises:
        Ds4Error: an account could not be created.
    """
    if wanted.group:
        _checked(runner(["groupadd", "--system", group]), f"The group {group} could not be created")
    if wanted.user:
        arguments = ["--system", "--gid", group, "--home-dir", home, "--no-create-home", "--shell", NO_LOGIN]
        _checked(runner(["useradd", *arguments, "--comment", GECOS, user]), f"The user {user} could not be created")
    for directory, _before in wanted.directories:
        _make(directory)


def describe(wanted: Plan) -> tuple[list[str], list[str]]:
    """Lines of a diff: what is there now, and what will be."""
    before, after = [], []
    if wanted.group:
        after.append(f"group {wanted.group}")
    if wanted.user:
        after.append(f"user {wanted.user} ({GECOS})")
    for directory, state in wanted.directories:
        if state:
            before.append(_line(directory.path, state))
        after.append(_line(directory.path, _wanted(directory)))
    return before, after


def _line(path: str, state: dict[str, str]) -> str:
    return f"{path} {state['owner']}:{state['group']} {state['mode']} {'ours' if state['marked'] else 'not marked'}"


def _account_problems(user: str, group: str) -> list[str]:
    entry = _known_user(user)
    if not entry:
        return []
    if entry.pw_gecos.split(",")[0] != GECOS:
        return [f"user {user} (uid {entry.pw_uid}, comment {entry.pw_gecos!r}) was not made by ds4-fleet"]
    own_group = _known_group(group)
    if not own_group or own_group.gr_gid != entry.pw_gid:
        return [f"user {user} has the primary group {_group_name(entry.pw_gid)}, not {group}"]
    return []


def _known_user(name: str) -> Any:
    import pwd

    try:
        return pwd.getpwnam(name)
    except KeyError:
        return None


def _known_group(name: str) -> Any:
    import grp

    try:
        return grp.getgrnam(name)
    except KeyError:
        return None


def _directory_problem(path: str) -> str:
    if not os.path.lexists(path):
        above = os.path.dirname(path)
        while not os.path.lexists(above):
            above = os.path.dirname(above)
        return "" if os.path.isdir(above) else f"{path}: {above} is not a directory"
    if not os.path.isdir(path):
        return f"{path} is not a directory"
    entries = set(os.listdir(path)) - FRESH_DISK
    if entries and not is_ours(path):
        return f"{path} was not made by ds4-fleet and holds {len(entries)} entries ({', '.join(sorted(entries)[:3])})"
    return ""


def _state(path: str) -> dict[str, str]:
    """Owner, group, mode and marker of a directory; empty when there is none."""
    from .process import user_name

    try:
        status = os.stat(path)
    except OSError:
        return {}
    return {
        "owner": user_name(status.st_uid),
        "group": _group_name(status.st_gid),
        "mode": f"{stat.S_IMODE(status.st_mode):04o}",
        "marked": MARKER_NAME if is_ours(path) else "",
    }


def _wanted(directory: Directory) -> dict[str, str]:
    mode = f"{directory.mode:04o}"
    return {"owner": directory.owner, "group": directory.group, "mode": mode, "marked": MARKER_NAME}


def _group_name(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _make(directory: Directory) -> None:
    """Make or adopt the directory. Its marker tells ``remove`` how to leave things as they were."""
    path = directory.path
    if not is_ours(path):
        above, made = path, []
        while not os.path.lexists(above):
            made.append(above)
            above = os.path.dirname(above)
        os.makedirs(path, mode=0o755, exist_ok=True)
        before = {} if made else {"adopted": _figures(path)}
        write_json(
            os.path.join(path, MARKER_NAME),
            {"managed_by": "ds4-fleet", "purpose": directory.purpose, "parents_made": made[1:], **before},
        )
    shutil.chown(path, directory.owner, directory.group)
    os.chmod(path, directory.mode)


def _figures(path: str) -> dict[str, int]:
    status = os.stat(path)
    return {"uid": status.st_uid, "gid": status.st_gid, "mode": stat.S_IMODE(status.st_mode)}


# ------------------------------------------------------------------------------------------------------ removing it all


class Removal(NamedTuple):
    """Paths that go, what stays with its reason, and the account that goes (``""``: none)."""

    gone: list[str]
    left: list[str]
    user: str

    @property
    def changed(self) -> bool:
        return bool(self.gone or self.user)


def plan_removal(user: str, directories: Sequence[Directory], *, planned: bool = False) -> Removal:
    """What ``remove`` would take away: only what bears our marker, nothing that somebody else put beside it.

    Args:
        planned: it is only told; what still runs will have been stopped by then.

    Raises:
        Ds4Error: the account still runs something.
    """
    entry = _known_user(user)
    ours = entry is not None and entry.pw_gecos.split(",")[0] == GECOS
    if ours:
        running = _processes_of(entry.pw_uid)
        if running and not planned:
            raise Ds4Error(
                f"The user {user} still runs programs; nothing was removed",
                found=", ".join(running),
                cure="stop the service first (`systemctl stop ds4`)",
            )
    gone: list[str] = []
    left: list[str] = []
    named = {directory.path for directory in directories}
    for directory in sorted(directories, key=lambda directory: directory.path, reverse=True):
        if not is_ours(directory.path):
            if os.path.lexists(directory.path):
                left.append(f"{directory.path} (not ours)")
            continue
        inside = [os.path.join(directory.path, name) for name in sorted(set(os.listdir(directory.path)) - FRESH_DISK)]
        marker = os.path.join(directory.path, MARKER_NAME)
        goes = [path for path in inside if path not in named and path != marker and _goes(path, directory, gone)]
        gone += goes
        stays = set(inside) - set(goes) - set(gone) - {marker}
        if stays:
            left.append(
                f"{directory.path} ({len(stays)} entries: {', '.join(sorted(map(os.path.basename, stays))[:3])})"
            )
        else:
            gone.append(directory.path)
    return Removal(gone, left, user if ours and not left else "")


def _goes(path: str, directory: Directory, gone: Sequence[str]) -> bool:
    if directory.contents == "all":
        return True
    if directory.contents != "marked":
        return False
    if os.path.islink(path):  # lib/current, and what else points into what goes
        target = os.path.realpath(path)
        return any(target == other or target.startswith(other + os.sep) for other in _with_siblings(path, gone))
    return is_ours(path) or os.path.basename(path) == ".lock"


def _with_siblings(path: str, gone: Sequence[str]) -> list[str]:
    """What goes, and the marked folders beside a link."""
    folder = os.path.dirname(path)
    return [*gone, *(entry.path for entry in os.scandir(folder) if not entry.is_symlink() and is_ours(entry.path))]


def _processes_of(uid: int, proc: str = "/proc") -> list[str]:
    from .process import Process, is_number

    found = []
    for name in filter(is_number, os.listdir(proc)):
        try:
            if os.stat(os.path.join(proc, name)).st_uid == uid:
                found.append(f"{Process(int(name), proc=proc).program} (pid {name})")
        except FileNotFoundError:
            continue
    return found


def remove(removal: Removal, group: str, *, runner: Runner = run) -> None:
    """Take away what ``plan_removal`` listed. An adopted directory stays, as it was; a mount point stays, empty.

    Raises:
        Ds4Error: the account could not be removed.
    """
    for path in removal.gone:
        marker = read_json(os.path.join(path, MARKER_NAME)) or {}
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
        elif set(os.listdir(path)) - {MARKER_NAME} - FRESH_DISK:
            shutil.rmtree(path)
        else:
            _give_back(path, marker)
    if removal.user:
        _checked(runner(["userdel", removal.user]), f"The user {removal.user} could not be removed")
        entry = _known_group(group)  # userdel takes the group along on most systems
        if group == removal.user and entry is not None and not entry.gr_mem:
            _checked(runner(["groupdel", group]), f"The group {group} could not be removed")


def _give_back(path: str, marker: dict[str, Any]) -> None:
    """An empty directory of ours goes, with the parents made for it; an adopted one gets its owner and mode back."""
    if os.path.lexists(os.path.join(path, MARKER_NAME)):
        os.unlink(os.path.join(path, MARKER_NAME))
    adopted = marker.get("adopted")
    if adopted:
        os.chown(path, adopted["uid"], adopted["gid"])
        os.chmod(path, adopted["mode"])
        return
    for folder in [path, *marker.get("parents_made", [])]:
        try:
            os.rmdir(folder)
        except OSError:  # a mount point, or somebody uses the parent too
            return


def _checked(ran: Ran, what: str) -> None:
    if ran.rc:
        raise Ds4Error(
            what, found=(ran.err or ran.out).strip() or f"exit code {ran.rc}", cure="see /etc/passwd and /etc/group"
        )
