# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Old generations in a run: no room beside them, the exchange that is left to the switch, cleaning after the smoke test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import adoption, fetch_unit, generations, guest, policies, space
from .errors import Ds4Error
from .files import human_bytes, read_json, write_json
from .host import ds4_processes
from .plan import Plan, load
from .wanted import ROOM, Look, Outcome, Wanted, is_guest, result_of

READ_WAIT_SECONDS = 900.0  # longest wait for memory while old files are read beside an engine


def tight_rooms(
    wanted: Wanted, needs: Sequence[space.Need], freed: Mapping[int, int] | None = None
) -> list[space.Room]:
    """File systems on which something does not fit, after ``freed`` bytes (by device) were given back."""
    rooms = space.rooms([*needs, *map(space.held, wanted.extra_needs)], wanted.plan.margin_bytes)
    rooms = [room._replace(free=room.free + (freed or {}).get(room.device, 0)) for room in rooms]
    return [room for room in rooms if room.missing]


def _no_room(tight: Sequence[space.Room], found: Look, more: str = "") -> Ds4Error:
    cure = "free room; move weights_directory; or see weights_old_generation in docs/weights.md"
    if found.closed:
        cure = (
            f"let the service user read {' and '.join(found.closed)} (chmod o+r), which then needs no copy; or {cure}"
        )
    return Ds4Error(
        "There is not enough room on disk",
        found="; ".join(room.text() for room in tight) + more,
        required="; ".join(f"{human_bytes(room.missing)} more on {room.path}" for room in tight),
        cure=cure,
        evidence={"missing_bytes": {room.path: room.missing for room in tight}},
    )


def read_doubtful(wanted: Wanted, found: Look) -> None:
    """Read files whose length alone fits, so that room is counted by what is in them."""
    judged = adoption.Judged(wanted.layout.judged)
    patience = _patience(wanted)
    for path in dict.fromkeys(path for paths in found.doubtful.values() for path in paths):
        with contextlib.suppress(OSError):  # gone meanwhile
            judged.read(path, progress=lambda count: patience.wait(), drop_cache=True)


def _patience(wanted: Wanted) -> guest.Patience:
    """For reading weights in this very process: step back, and wait for memory like the fetch does."""
    guest.step_back()
    return guest.Patience(wanted.memory_floor_kib if is_guest(wanted, ds4_processes()) else 0, READ_WAIT_SECONDS)


def old_files(
    wanted: Wanted,
    *,
    read: bool = False,
    note: Callable[[str], None] = lambda text: None,
    unread: Callable[[str], None] = lambda path: None,
) -> list[generations.Old]:
    """What the wanted generation does not need; see :func:`ds4.generations.find`."""
    care, plan = wanted.care, wanted.plan
    open_paths = [path for engine in ds4_processes() for path in engine["weights"]]
    patience = _patience(wanted) if read else None
    return generations.find(
        plan.directory,
        care.known,
        {item.target: item.sha256 for item in plan.files},
        generations.uses(care.deployments, care.current, care.state, open_paths),
        adoption.Judged(wanted.layout.judged),
        paths=care.paths,
        rollback_waived=care.rollback_waived,
        read=(lambda count: patience.wait()) if patience else None,
        note=note,
        unread=unread,
    )


def leave_to_switch(
    wanted: Wanted, found: Look, tight: Sequence[space.Room], changes: Sequence[str], *, check: bool
) -> Outcome:
    """No room beside the old files: leave the exchange to the switch, where that was asked for.

    Raises:
        Ds4Error: it was not asked for, or would not be enough.
    """
    asked = wanted.care.policy == policies.BEFORE_FETCH
    olds = [old for old in old_files(wanted, read=asked and not check) if old.kept_for != generations.UNKNOWN]
    doubt = "".join(
        f"; unless {' or '.join(paths)} is {role}, which only reading it tells"
        for role, paths in found.doubtful.items()
    )
    if not asked:
        raise _no_room(tight, found, (f"; old files: {generations.describe(olds)}" if olds else "") + doubt)
    freed: dict[int, int] = {}
    for old in olds:  # whatever serves now will have stopped by then
        device = os.stat(old.path).st_dev
        freed[device] = freed.get(device, 0) + old.bytes
    still = tight_rooms(wanted, found.needs, freed)
    if still:
        raise _no_room(still, found, f", after removing {generations.describe(olds)}{doubt}")
    minutes = found.to_fetch / (110 * 1024**2) / 60
    text = (
        f"{generations.describe(olds)} will be deleted in the switch, then {human_bytes(found.to_fetch)} fetched while the service "
        f"is down (about {minutes:.0f} min at 1 Gbit/s); a rollback will not be possible"
    )
    exchange = {
        "delete": [old._asdict() for old in olds],
        "bytes_freed": sum(old.bytes for old in olds),
        "bytes_to_fetch": found.to_fetch,
    }
    if not check:
        write_json(wanted.layout.exchange, {"schema": 1, "plan": wanted.plan.id, **exchange})
    summary = {"room": ROOM, "state": "planned", "text": text, "bytes_to_fetch": found.to_fetch}
    result = result_of(wanted, found)
    result["weights"]["deferred"] = True
    state = "planned" if check else "deferred"
    return Outcome(
        state, {"changed": bool(changes), "msg": text, "exchange": exchange, **result, "ds4_summary": summary}
    )


def forget(layout: fetch_unit.Layout) -> None:
    """Everything fits after all: nothing is left to the switch."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(layout.exchange)


def coming(plan_path: str, state: str) -> frozenset[str]:
    """Contents (sha256) that arrive only in the switch, once the old files are gone; empty when nothing was left to it."""
    planned = read_json(os.path.join(state, fetch_unit.EXCHANGE))
    if not isinstance(planned, dict):
        return frozenset()
    plan = load(plan_path)
    return (
        frozenset(item.sha256 for item in plan.files if item.sha256) if planned.get("plan") == plan.id else frozenset()
    )


def clean(wanted: Wanted, *, check: bool) -> Outcome:
    """After the new service passed its questions: report old generations, and remove them if that was asked for.

    Raises:
        Ds4Error: contradictory settings, or a file that cannot be removed.
    """
    care = wanted.care
    policies.require_consistent(
        care.policy, fetch=wanted.plan.fetch, rollback_waived=care.rollback_waived, paths=care.paths
    )
    notes: list[str] = []
    removing = care.policy != policies.KEEP
    olds = old_files(wanted, read=removing, note=notes.append)
    used = generations.uses(care.deployments, care.current, care.state, [])
    needed = {item.sha256 for item in wanted.plan.files if item.sha256}
    served = used.proven and needed <= used.served
    if removing and not served:
        olds = [
            old._replace(kept_for=old.kept_for or "the new service has not passed its questions yet") for old in olds
        ]
    free = [old for old in olds if not old.kept_for] if removing else []
    kept = [old for old in olds if old not in free]
    removed = free if check else generations.remove(free)
    parts = []
    if removed:
        parts.append(f"{'would remove' if check else 'removed'} {generations.describe(removed)}")
    reasons = ", ".join(dict.fromkeys(old.kept_for for old in kept if old.kept_for)) or "weights_old_generation: keep"
    if kept:
        parts.append(f"{generations.describe(kept)} kept for {reasons}")
    text = "; ".join(parts) or "no old weights"
    summary = {"room": ROOM, "state": "planned" if check and free else "changed" if removed else "ok", "text": text}
    result = {
        "changed": bool(removed),
        "removed": [old._asdict() for old in removed],
        "kept": [old._asdict() for old in kept],
        "notes": notes,
        "bytes_freed": sum(old.bytes for old in removed),
        "served": served,
        "ds4_summary": summary,
    }
    return Outcome("done", result)


def report(wanted: Wanted) -> dict[str, Any]:
    """Old files that are known without reading any, for reports, and what the settings will let go after the next switch."""
    unread: list[str] = []
    olds = old_files(wanted, unread=unread.append)
    for_return = [old for old in olds if old.kept_for not in ("", generations.UNKNOWN)]
    if wanted.care.rollback_waived:  # what serves now is only what a return would need then
        later, for_return = [old for old in olds if old.kept_for != generations.UNKNOWN], []
    else:
        later = [old for old in olds if not old.kept_for]
    return {
        "old": [old._asdict() for old in olds],
        "old_unread": len(unread),
        "bytes_deletable": sum(old.bytes for old in later),
        "bytes_for_return": sum(old.bytes for old in for_return),
    }


def delete(plan: Plan, layout: fetch_unit.Layout) -> str:
    """Delete what :func:`leave_to_switch` planned, after the old service has stopped. May be repeated.

    Returns:
        What was deleted; empty when nothing was planned for this plan.

    Raises:
        Ds4Error: an engine still uses a file, or something else lies at its path by now; nothing was deleted.
    """
    planned = read_json(layout.exchange)
    if not isinstance(planned, dict) or planned.get("plan") != plan.id:
        return ""
    open_paths = [name for engine in ds4_processes() for name in engine["weights"]]
    opened = generations.identities(open_paths)
    judged = adoption.Judged(layout.judged)
    olds = [generations.Old(**entry)._replace(kept_for="") for entry in planned["delete"]]
    for old in olds:
        changed = generations.changed(old, plan.directory, judged)
        if changed:
            raise Ds4Error(
                f"{old.path} is not what was to be deleted",
                found=changed,
                required=f"the {old.called} that was there when the run planned its removal",
                cure="run site.yml again, which looks anew",
            )
        if generations.identities([old.path]) & opened:
            raise Ds4Error(
                f"{old.path} is in use by a running engine",
                required="no engine at all: a mapped file frees nothing when it is deleted",
                cure="stop the engine that `ss -ltnp` or `systemctl status ds4` shows, then switch again",
            )
    generations.remove(olds)
    return generations.describe(olds)
