# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The supervised engine as systemd sees it: state, start, stop, journal."""

from __future__ import annotations

import os
from typing import NamedTuple

from .command import Ran, run
from .process import Process, is_number

_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "MainPID",
    "NRestarts",
    "Result",
    "ExecMainStatus",
    "InvocationID",
    "NeedDaemonReload",
    "UnitFileState",
    "DropInPaths",
)


class State(NamedTuple):
    """``systemctl show`` of a unit. ``pid`` is its main process, 0 when there is none."""

    loaded: bool
    active: str
    sub: str
    pid: int
    restarts: int
    result: str
    exit_status: int
    invocation: str
    needs_reload: bool
    enabled: bool
    drop_ins: list[str]

    @property
    def running(self) -> bool:
        """True while the main process is there and systemd neither stops nor replaces it."""
        return self.active == "active" and self.pid > 0

    @property
    def dead(self) -> bool:
        """True when the main process is gone: failed, stopped, or between two automatic restarts."""
        return self.active in ("failed", "inactive") or self.sub.startswith("auto-restart")

    def describe(self) -> str:
        """``failed (exit-code, status 1)``, for messages."""
        word = self.sub if self.sub.startswith("auto-restart") else self.active
        return word if self.result in ("", "success") else f"{word} ({self.result}, status {self.exit_status})"


def parse_show(text: str) -> State:
    """State from the ``Name=value`` lines of ``systemctl show``; what is absent reads as a unit that is not there."""
    shown = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def number(name: str) -> int:
        return int(shown.get(name) or 0)

    return State(
        loaded=shown.get("LoadState") == "loaded",
        active=shown.get("ActiveState", "inactive"),
        sub=shown.get("SubState", "dead"),
        pid=number("MainPID"),
        restarts=number("NRestarts"),
        result=shown.get("Result", ""),
        exit_status=number("ExecMainStatus"),
        invocation=shown.get("InvocationID", ""),
        needs_reload=shown.get("NeedDaemonReload") == "yes",
        enabled=shown.get("UnitFileState") == "enabled",
        drop_ins=shown.get("DropInPaths", "").split(),
    )


class Service:
    """One unit of the system manager, for example ``ds4.service``."""

    def __init__(self, unit: str) -> None:
        self.unit = unit

    def _systemctl(self, *arguments: str, timeout_seconds: float = 60) -> Ran:
        return run(["systemctl", "--no-ask-password", *arguments], timeout_seconds=timeout_seconds)

    def state(self) -> State:
        """The unit now."""
        return parse_show(self._systemctl("show", self.unit, "--property=" + ",".join(_PROPERTIES)).out)

    def reload_manager(self) -> Ran:
        """Make systemd read unit files again."""
        return self._systemctl("daemon-reload")

    def enable(self) -> Ran:
        """Start at boot."""
        return self._systemctl("enable", self.unit)

    def disable(self) -> Ran:
        """Do not start at boot."""
        return self._systemctl("disable", self.unit)

    def start(self, timeout_seconds: float) -> Ran:
        """Start with a fresh restart counter; returns when the engine was executed (after its gate) or could not be."""
        self._systemctl("reset-failed", self.unit)
        return self._systemctl("start", self.unit, timeout_seconds=timeout_seconds)

    def stop(self, timeout_seconds: float) -> Ran:
        """Stop gracefully (one SIGTERM: the engine drains); systemd kills at the unit's TimeoutStopSec."""
        return self._systemctl("stop", self.unit, timeout_seconds=timeout_seconds)

    def stop_later(self) -> Ran:
        """Ask for a graceful stop and return at once."""
        return self._systemctl("stop", "--no-block", self.unit)

    def kill(self) -> Ran:
        """SIGKILL every process of this unit."""
        return self._systemctl("kill", "--signal=SIGKILL", self.unit)

    def process(self) -> Process | None:
        """Main process, or None."""
        pid = self.state().pid
        return Process(pid) if pid else None

    def journal(self, invocation: str = "", lines: int = 200) -> str:
        """Last lines that one run of the unit wrote (``invocation``), or the unit in general when empty."""
        match = [f"_SYSTEMD_INVOCATION_ID={invocation}"] if invocation else ["--unit", self.unit]
        argv = ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={lines}", *match]
        return run(argv, timeout_seconds=30).out


def mapping_pids(path: str, *, proc: str = "/proc") -> list[int]:
    """Processes that map the file at ``path``, under whatever name: whoever does holds the weights in memory.

    Mapped names are compared as files, since a hard link has another name and an overlay another device number.
    """
    suffix = os.path.splitext(path)[1]
    pids = sorted(int(name) for name in os.listdir(proc) if is_number(name))
    return [pid for pid in pids if any(_same_file(path, name) for name in Process(pid, proc=proc).mapped_files(suffix))]


def _same_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False
