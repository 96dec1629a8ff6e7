# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What every other room stands on: the system user and our directories, each bearing our marker."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .command import Ran, run
from .errors import Ds4Error
from .files import FRESH_DISK, MARKER_NAME, is_ours, mark

GECOS = "ds4-fleet service account"  # our marker of an account
NO_LOGIN = "/usr/sbin/nologin"

Runner = Callable[..., Ran]


class Directory(NamedTuple):
    """A directory of ours. ``mode`` is a number; ``owner`` and ``group`` are names."""

    path: str
    owner: str
    group: str
    mode: int
    purpose: str


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
        found.append(Directory(path, str(row["owner"]), str(row["group"]), mode, str(row["purpose"])))
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
    import shutil

    os.makedirs(directory.path, mode=0o755, exist_ok=True)
    if not is_ours(directory.path):
        mark(directory.path, directory.purpose)
    shutil.chown(directory.path, directory.owner, directory.group)
    os.chmod(directory.path, directory.mode)


def _checked(ran: Ran, what: str) -> None:
    if ran.rc:
        raise Ds4Error(
            what, found=(ran.err or ran.out).strip() or f"exit code {ran.rc}", cure="see /etc/passwd and /etc/group"
        )
