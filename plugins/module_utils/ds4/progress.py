# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A status of the fetcher as people read it: ``base 42 %  36.5/80.8 GiB  612 MiB/s  eta 1m12s``."""

from __future__ import annotations

from typing import Any

GIB = 1024**3
MIB = 1024**2


def duration(seconds: float) -> str:
    """``72`` → ``1m12s``; ``4000`` → ``1h06m``."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _pair(done: int, total: int) -> str:
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    return f"{done / unit:.1f}/{total / unit:.1f} {name}"


def remaining(status: dict[str, Any]) -> int:
    """Bytes that still have to arrive, as far as lengths are known."""
    return sum(max((row.get("bytes") or 0) - row.get("done", 0), 0) for row in status.get("files", []))


def line(status: dict[str, Any]) -> str:
    """One line about a status file's content; never empty."""
    state = status.get("state")
    if not state:
        return "no fetch has been started"
    if state == "done":
        return "done"
    if state == "failed":
        return f"failed: {status.get('detail', '')}"
    row = next((row for row in status.get("files", []) if row["state"] in ("fetching", "verifying")), None)
    if row is None:
        return str(status.get("detail") or "starting")
    total = row.get("bytes") or 0
    if not total:
        return f"{row['role']} asking for its size"
    if row["state"] == "verifying":
        return f"{row['role']} verifying {100 * row['hashed'] // total} %  {_pair(row['hashed'], total)}"
    text = f"{row['role']} {100 * row['done'] // total} %  {_pair(row['done'], total)}"
    if state == "paused":
        return f"{text}  paused: {status.get('detail', '')}"
    rate = status.get("rate_bytes_per_second") or 0
    text += f"  {rate / MIB:.0f} MiB/s" if rate >= 10 * MIB else f"  {rate / MIB:.1f} MiB/s"
    return text + (f"  eta {duration(remaining(status) / rate)}" if rate else "")
