# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What serving mode says to people: findings, notes, the line of the table, the diff. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from . import serving_mode_settings as settings_of
from .errors import Ds4Error
from .files import human_bytes
from .serving_mode_host import Request
from .serving_mode_plan import DISPLAY_GROUP, Plan
from .serving_mode_reach import People
from .serving_mode_snapshot import DEFAULT_TARGET

ROOM = "serving_mode"
DEAD_MAN_OUTCOME = "dead man's switch"


def finding(identity: str, what: str, found: str, required: str, cure: str) -> dict[str, str]:
    """One finding, in the form that every room uses."""
    return {
        "id": f"{ROOM}_{identity}",
        "phase": "switch",
        "what": what,
        "found": found,
        "required": required,
        "cure": cure,
        "allow": "",
    }


def findings(plan: Plan, people: People, request: Request, root: str, available_kib: int) -> list[dict[str, str]]:
    """Everything that speaks against a strip."""
    cure = "remove it from serving_mode_extra_units"
    found = [finding("never", f"{unit} is never taken away", why, "", own or cure) for unit, why, own in plan.refused]
    display = ", ".join(item.unit.id for item in plan.stops(DISPLAY_GROUP))
    if display and not request.force:
        force = "serving_mode_force: true for this host (the sessions end)"
        if people.own:
            what = f"The playbook runs inside the graphical session that {display} carries"
            cure = f"run it from another machine or from a text console, or set {force}"
            found.append(finding("own_session", what, people.own, "a run from outside", cure))
        others = [text for text in people.graphical if text != people.own]
        if others:
            what = f"A graphical session would be cut off: {display} would stop"
            cure = f"let them log out, or set {force}"
            found.append(finding("session", what, "; ".join(others), "nobody at the desktop", cure))
        if people.remote_desktops:
            what = f"A remote desktop would be cut off: {display} would stop"
            text = ", ".join(people.remote_desktops)
            found.append(finding("remote_desktop", what, text, "no remote desktop running", f"stop it, or set {force}"))
    tight = settings_of.swap_does_not_fit(available_kib, root) if request.swap == "off" else ""
    if tight:
        what = "Swap cannot be switched off: what is in it does not fit into memory"
        cure = "set serving_mode_swap: low_swappiness, or end what was swapped out"
        found.append(finding("swap", what, tight, "used swap ≤ MemAvailable", cure))
    return found


def stopped(plan: Plan, result: Mapping[str, Any]) -> Ds4Error:
    """All findings in one message; what would happen and be cut off is in the evidence."""
    lines = [f"{f['what']}. Found: {f['found']}. Cure: {f['cure']}." for f in result["findings"]]
    cut = [f"{row['unit']} of {row['user']} ({row['state']})" for row in result["would_cut_off"]]
    if cut and plan.stops(DISPLAY_GROUP):
        lines.append(f"With the desktop would also fall: {', '.join(cut)}.")
    return Ds4Error(
        f"Serving mode stops here and has changed nothing, {len(result['findings'])} finding(s)",
        found=" ".join(f"({number}) {line}" for number, line in enumerate(lines, 1)).rstrip("."),
        evidence={key: result[key] for key in ("findings", "units", "would_cut_off", "sessions", "falls_at_boot")},
    )


def notes(plan: Plan, people: People, force: bool, last: Mapping[str, Any] | None) -> list[str]:
    """What a forced run cuts off, what the next boot lacks, and how an earlier time in serving mode ended.

    Args:
        last: last line of the newest archived journal, None while something is held.
    """
    found = []
    cut = people.graphical + people.remote_desktops
    if force and plan.stops(DISPLAY_GROUP) and cut:
        found.append(f"serving_mode_force cuts off {', '.join(cut)}.")
    if plan.falls:
        found.append(
            f"After a reboot, {plan.default_target} also leaves out what only the present default target starts: "
            f"{', '.join(plan.falls)}. These run on until then."
        )
    if last and last.get("outcome") == DEAD_MAN_OUTCOME:
        found.append(f"The dead man's switch gave the desktop back at {last['at']}: nobody confirmed in time.")
    return found


def planned(plan: Plan, result: Mapping[str, Any]) -> str:
    """The line of the table for what would change."""
    running = [item for item in plan.strips() if "stop" in item.steps]
    memory = held(sum(item.unit.memory_bytes for item in running))
    text = f"would take away {len(plan.strips())} units, {len(running)} of them running{memory}"
    text += f", give back {len(plan.gives_back())}" if plan.gives_back() else ""
    text += f", boot into {plan.default_target}" if plan.default_target else ""
    return text + (f"; stopped by: {'; '.join(f['what'] for f in result['findings'])}" if result["findings"] else "")


def nothing_to_do(plan: Plan, result: Mapping[str, Any]) -> str:
    """The line of the table for a run that changes nothing."""
    gained = result["gained_kib"]
    text = f"serving; {len(plan.goes())} units off"
    return text + (f", {signed(gained)} MemAvailable when stripped" if gained else "")


def diff(
    rows: Iterable[Mapping[str, Any]], target: Mapping[str, str], settings: settings_of.Settings, root: str
) -> dict[str, str]:
    """Before and after, as text."""
    before, after = [], []
    for row in rows:
        if row["steps"]:
            before.append(f"{row['unit']}: {row['now']}")
            after.append(f"{row['unit']}: {row['then']}")
    if target["now"] != target["then"]:
        before.append(f"{DEFAULT_TARGET}: {target['now']}")
        after.append(f"{DEFAULT_TARGET}: {target['then']}")
    for path, text in settings.write.items():
        after += [f"{path}:", *(f"  {line}" for line in text.splitlines())]
    before += [f"{path}: present" for path in settings.remove]
    if settings.swappiness is not None:
        before.append(f"vm.swappiness: {settings_of.swappiness(root)}")
        after.append(f"vm.swappiness: {settings.swappiness}")
    return {"before": "".join(f"{line}\n" for line in before), "after": "".join(f"{line}\n" for line in after)}


def held(count: int) -> str:
    """What units hold by their control groups; nothing where those do not count memory."""
    return f" ({human_bytes(count)} in their control groups)" if count else ""


def signed(kib: int) -> str:
    """``+11.8 GiB``."""
    return f"{'+' if kib >= 0 else '-'}{human_bytes(abs(kib) * 1024)}"
