# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What serving mode changes beside units: swap policy and the window of update timers. Every file bears our marker."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from .errors import Ds4Error
from .files import MARKER_LINE, human_bytes, read_text
from .serving_mode_apply import Hands, refuse_foreign
from .serving_mode_host import Reading, Request
from .serving_mode_plan import SWAP_GROUP, Entry
from .serving_mode_snapshot import Snapshot
from .serving_mode_units import Runner

SYSCTL_FILE = "/etc/sysctl.d/90-ds4-serving-mode.conf"
DROP_IN = "90-ds4-window.conf"
SWAPPINESS = "/proc/sys/vm/swappiness"
SWAPS = "/proc/swaps"


@dataclass
class Settings:
    """What is to change: files to write (path → text) and to remove, and a value for vm.swappiness (None: as it is)."""

    write: dict[str, str] = field(default_factory=dict)
    remove: list[str] = field(default_factory=list)
    swappiness: int | None = None

    @property
    def changes(self) -> bool:
        return bool(self.write or self.remove or self.swappiness is not None)

    def check(self, root: str) -> None:
        """Raise before anything is changed when a file of that name is not ours or a value cannot be set."""
        for path in self.write:
            refuse_foreign(path)
        path = f"{root}{SWAPPINESS}"
        if self.swappiness is not None and not os.access(path, os.W_OK):
            raise _cannot_set(path, self.swappiness, "cannot be written")


def swaps(root: str = "") -> list[dict[str, Any]]:
    """Active swaps: device, used_kib, priority."""
    rows = []
    for line in read_text(f"{root}{SWAPS}").splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 5:
            device = fields[0].replace("\\040", " ")
            rows.append({"device": device, "used_kib": int(fields[3]), "priority": int(fields[4])})
    return rows


def swappiness(root: str = "") -> int:
    """Present vm.swappiness; the kernel's default where it cannot be read."""
    return int(read_text(f"{root}{SWAPPINESS}").strip() or 60)


def swap_entries(policy: str, reading: Reading) -> list[Entry]:
    """Swap units that the policy switches off. A unit that follows another is a second name of the same device."""
    if policy != "off":
        return []
    running = {u.id for u in reading.seen.units.values() if u.id.endswith(".swap") and u.running and not u.following}
    held = {key for key, entry in reading.held.items() if entry["group"] == SWAP_GROUP}
    return [Entry(name, "swap policy off") for name in sorted(running | held)]


def swap_does_not_fit(available_kib: int, root: str = "") -> str:
    """Why swap cannot be switched off, empty when it can."""
    used = sum(int(swap["used_kib"]) for swap in swaps(root))
    if used <= available_kib:
        return ""
    return f"{human_bytes(used * 1024)} swapped out, {human_bytes(available_kib * 1024)} available"


def wanted(request: Request, reading: Reading, root: str, etc: str) -> Settings:
    """What serving mode with this policy still has to change."""
    files: dict[str, str] = {}
    if request.swap == "low_swappiness":
        files[f"{root}{SYSCTL_FILE}"] = f"# {MARKER_LINE}: serving mode\nvm.swappiness = {request.swappiness}\n"
    for timer in request.window_timers if request.window else []:
        if reading.seen.unit(timer).load == "loaded":
            files[f"{etc}/{timer}.d/{DROP_IN}"] = (
                f"# {MARKER_LINE}: serving_mode_update_window\n"
                f"[Timer]\nOnCalendar=\nOnCalendar={request.window}\nRandomizedDelaySec=0\n"
            )
    snapshot = reading.snapshot or Snapshot()
    aim = request.swappiness if request.swap == "low_swappiness" else snapshot.swappiness
    return Settings(
        write={path: text for path, text in files.items() if read_text(path) != text},
        remove=[path for path in snapshot.files if path not in files and os.path.lexists(path)],
        swappiness=None if aim is None or aim == swappiness(root) else aim,
    )


def unwanted(snapshot: Snapshot, root: str) -> Settings:
    """What giving the desktop back has to change."""
    back = snapshot.swappiness
    return Settings(
        remove=[path for path in snapshot.files if os.path.lexists(path)],
        swappiness=None if back is None or back == swappiness(root) else back,
    )


def apply(settings: Settings, hands: Hands, root: str) -> list[str]:
    """Write and remove files, set vm.swappiness; returns notes.

    Raises:
        Ds4Error: a value could not be set.
    """
    for path, text in settings.write.items():
        hands.write_file(path, text)
    notes = [note for path in settings.remove if (note := hands.remove_file(path))]
    if settings.swappiness is not None:
        hands.store.journal("swappiness", value=settings.swappiness)
        path = f"{root}{SWAPPINESS}"
        try:
            with open(path, "w", encoding="ascii") as stream:
                stream.write(f"{settings.swappiness}\n")
        except OSError as error:
            raise _cannot_set(path, settings.swappiness, str(error.strerror)) from error
    return notes


def _cannot_set(path: str, value: int, why: str) -> Ds4Error:
    return Ds4Error(
        "vm.swappiness cannot be set", found=f"{path} {why}", required=str(value), cure="set serving_mode_swap: keep"
    )


def check_window(window: str, runner: Runner) -> None:
    """Raise when systemd does not understand a calendar time: a timer with it would never elapse."""
    answer = runner(["systemd-analyze", "calendar", "--", window], timeout_seconds=10) if window else None
    if answer is not None and answer.rc != 0:
        raise Ds4Error(
            "serving_mode_update_window is no calendar time",
            found=f"{window!r}: {(answer.err or answer.out).strip().splitlines()[-1] if answer.err or answer.out else ''}",
            required="systemd's form, for example Sun 03:00",
            cure="try it with `systemd-analyze calendar`",
        )


def swap_on(snapshot: Snapshot, hands: Hands, root: str) -> dict[str, str]:
    """Switch recorded swaps on again that no unit file stands behind. Returns device → why not."""
    active = {swap["device"] for swap in swaps(root)}
    failed = {}
    for swap in snapshot.swaps:
        if swap["device"] in active or not os.path.exists(swap["device"]):
            continue
        priority = ["-p", str(swap["priority"])] if swap["priority"] >= 0 else []
        answer = hands.systemd.runner(["swapon", *priority, swap["device"]], timeout_seconds=60)
        if answer.rc != 0:
            failed[swap["device"]] = answer.err.strip()
    return failed
