# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Run another program: bounded, in the C locale, never through a shell."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

# Non-interactive PATHs often lack sbin, where systemctl's friends and nft live.
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Ran(NamedTuple):
    """Outcome of a command. ``rc`` is 127 when the program is absent and 124 when it ran past its limit."""

    rc: int
    out: str
    err: str

    @property
    def timed_out(self) -> bool:
        return self.rc == 124


def which(name: str) -> str | None:
    """Path of a program on the caller's PATH or in the standard folders, or None."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":" + SEARCH_PATH)


def run(
    argv: Sequence[str],
    *,
    timeout_seconds: float = 30.0,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    stdin: str | None = None,
    user: str | None = None,
    log: IO[bytes] | None = None,
) -> Ran:
    """Run ``argv`` and return what it said. Never raises for a failing, absent or hanging program.

    Args:
        timeout_seconds: limit; the whole process group is killed past it.
        env: variables added to a clean environment (PATH, HOME, LC_ALL=C.UTF-8); nothing is inherited otherwise.
        cwd: working directory.
        stdin: text for standard input; /dev/null when None.
        user: run as this account (root only), with its groups and home.
        log: file that receives both outputs as they come; ``out`` and ``err`` stay empty then.
    """
    full_env = {
        "PATH": os.environ.get("PATH", "") + ":" + SEARCH_PATH,
        "LC_ALL": "C.UTF-8",
        "HOME": os.path.expanduser("~"),
    }
    kwargs: dict[str, object] = {}
    if user is not None:
        import grp
        import pwd

        entry = pwd.getpwnam(user)
        full_env.update(HOME=entry.pw_dir, USER=user, LOGNAME=user)
        if os.geteuid() != entry.pw_uid:
            kwargs["user"] = entry.pw_uid
            kwargs["group"] = entry.pw_gid
            kwargs["extra_groups"] = [g.gr_gid for g in grp.getgrall() if user in g.gr_mem]
    full_env.update(env or {})
    program = argv[0] if "/" in argv[0] else shutil.which(argv[0], path=full_env["PATH"])
    if program is None:
        return Ran(127, "", f"{argv[0]}: command not found")
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE if log is None else log,
            stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
            env=full_env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
            **kwargs,  # type: ignore[call-overload]
        )
    except OSError as error:
        return Ran(127, "", f"{program}: {error.strerror}")
    try:
        out, err = process.communicate(stdin, timeout=timeout_seconds)
        return Ran(process.returncode, out or "", err or "")
    except subprocess.TimeoutExpired:
        _kill_group(process)
        try:
            out, err = process.communicate(timeout=5)
        except subprocess.TimeoutExpired:  # stuck in the kernel (a wedged driver): leave it behind rather than hang
            out, err = "", ""
        return Ran(124, out or "", (err or "") + f"\n{program}: no answer within {timeout_seconds:g} s")


def _kill_group(process: subprocess.Popen[str]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
