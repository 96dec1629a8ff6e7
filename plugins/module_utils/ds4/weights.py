# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Weights on a host: what is wanted, what is there, and the service that brings the difference.

Doors: the module ``ds4_weights`` (plan, start, attach, follow, clean) and ``python3 -m ds4.weights`` (``adopt``
before every fetch, ``exchange`` in a switch that deletes before it fetches).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import adoption, exchange, fetch_state, fetch_unit, generations, guest, policies, records
from .errors import Ds4Error
from .fetch_unit import UNIT, Layout, Unit, unit_now
from .files import FRESH_DISK, human_bytes, is_ours, read_json
from .plan import PlanFile, load
from .progress import duration
from .progress import line as progress_line
from .wanted import ROOM, Look, Outcome, Wanted, complete, look, place, result_of

POLL_SECONDS = 0.25


def present(wanted: Wanted, python: str, *, check: bool, wait_seconds: float) -> Outcome:
    """Bring the files: nothing when they are there, else write the plan and start, or attach to, the service.

    Args:
        python: interpreter for the unit.
        check: only say what would happen.
        wait_seconds: how long to stay for the end; the work goes on without us.

    Raises:
        Ds4Error: what stands in the way.
    """
    care = wanted.care
    policies.require_consistent(
        care.policy, fetch=wanted.plan.fetch, rollback_waived=care.rollback_waived, paths=care.paths
    )
    wanted = complete(wanted)
    layout = wanted.layout
    _refuse_foreign(layout)
    found = look(wanted)
    changes = fetch_unit.install(wanted.plan, layout, python, move=wanted.adopt_move, check=check)
    if not found.missing:
        if not check:
            exchange.forget(layout)
        if changes and not check:
            fetch_unit.store(wanted.plan, layout, changes)
        report = exchange.report(wanted)
        summary = _summary_there(wanted, found, changes, report["old"])
        return Outcome("done", {"changed": bool(changes), **result_of(wanted, found), **report, **summary})
    fetch_state.Secrets.of(wanted.plan)  # a file that is missing or open to others is better found now
    tight = exchange.tight_rooms(wanted, found.needs)
    if (
        tight and found.doubtful and not check
    ):  # before anything is refused, or deleted: is it there under another name?
        exchange.read_doubtful(wanted, found)
        found = look(wanted)
        tight = exchange.tight_rooms(wanted, found.needs)
    if tight:
        if changes and not check and care.policy == policies.BEFORE_FETCH:
            fetch_unit.store(wanted.plan, layout, changes)
        return exchange.leave_to_switch(wanted, found, tight, changes, check=check)
    if check:
        return Outcome("planned", _planned(wanted, found, changes))
    exchange.forget(layout)
    unit = unit_now()
    attached = unit.busy and layout.plan not in changes
    if not attached:
        if unit.busy:  # another plan: what it fetched so far is kept by its journal
            fetch_unit.stop()
        fetch_unit.store(wanted.plan, layout, changes)
        fetch_unit.start(wanted.plan, layout)
    outcome = follow(wanted, wait_seconds, changed=not attached)
    return outcome._replace(result={**outcome.result, **exchange.report(wanted)})


def _refuse_foreign(layout: Layout) -> None:
    if (
        os.path.isdir(layout.directory)
        and set(os.listdir(layout.directory)) - FRESH_DISK
        and not is_ours(layout.directory)
    ):
        raise Ds4Error(
            f"{layout.directory} is not ours",
            found="a directory with files and without our marker",
            required="an empty or absent directory, or one made by ds4-fleet",
            cure="choose another weights_directory, and name this one in weights_adopt_paths",
        )


def follow(wanted: Wanted, wait_seconds: float, *, changed: bool = False) -> Outcome:
    """Stay with a fetch for a while.

    Raises:
        Ds4Error: it failed.
    """
    end = time.monotonic() + wait_seconds
    while True:
        unit = unit_now()
        value = read_json(wanted.layout.status)
        status: dict[str, Any] = value if isinstance(value, dict) else {}
        if not unit.busy:
            return _ended(wanted, unit, status, changed)
        if time.monotonic() >= end:
            break
        time.sleep(POLL_SECONDS)
    if status.get("state") in (None, "done", "failed"):  # of an earlier start: this one has not said anything yet
        status = {**status, "state": "running"}
    text = progress_line(status)
    summary = {"room": ROOM, "state": "changed", "text": text, "files": len(wanted.plan.files)}
    result = {
        "changed": changed,
        "progress": text,
        "status": status,
        **result_of(wanted, look(wanted)),
        "ds4_summary": summary,
    }
    return Outcome("running", result)


def _ended(wanted: Wanted, unit: Unit, status: dict[str, Any], changed: bool) -> Outcome:
    found = look(wanted)
    if not found.missing:
        text = _fetched_text(status)
        summary = {"room": ROOM, "state": "changed", "text": text, "files": len(wanted.plan.files)}
        result = {"changed": changed, "status": status, **result_of(wanted, found, status), "ds4_summary": summary}
        return Outcome("done", {**result, "warnings": _unpinned(status)})
    error = status.get("error")
    if status.get("state") == "failed" and isinstance(error, dict):
        raise Ds4Error(
            error["what"], found=error["found"], required=error["required"], cure=error["cure"],
            evidence={**error["evidence"], "notes": status.get("notes", [])},
        )  # fmt: skip
    raise Ds4Error(
        "The fetch of the weights ended before it was complete",
        found=f"{UNIT} is {unit.state.describe()}; {'; '.join(found.missing.values())}",
        required="all files verified",
        cure=f"see `journalctl -u {UNIT}`, then run again (what is there is kept)",
        evidence={"log": fetch_unit.log().splitlines()},
    )


def _unpinned(status: Mapping[str, Any]) -> list[str]:
    """Warnings about files whose hash stands in no manifest."""
    said = {"hub": "only the hub says its hash", records.FIRST_USE: "nobody publishes its hash; recorded at first use"}
    return [
        f"{row['file']}: {said[row['trust']]}: sha256 {row['sha256']}. Pin it in ds4_weights_extra."
        for row in status.get("files", [])
        if row.get("trust") in said
    ]


def _fetched_text(status: Mapping[str, Any]) -> str:
    count, seconds = int(status.get("bytes_received") or 0), float(status.get("elapsed_seconds") or 0)
    adopted = [row["role"] for row in status.get("files", []) if row.get("how") not in ("fetched", "")]
    parts = []
    if count:
        rate = f" ({count / seconds / 1024 / 1024:.0f} MiB/s)" if seconds > 1 else ""
        parts.append(f"fetched {human_bytes(count)} in {duration(seconds)}{rate}")
    if adopted:
        parts.append(f"{' + '.join(adopted)} were on the host")
    unpinned = [row["role"] for row in status.get("files", []) if row.get("trust") == records.FIRST_USE]
    first_use = f"; hash of {' + '.join(unpinned)} recorded at first use" if unpinned else ""
    return ", ".join([*parts, "verified"]) + first_use


def _summary_there(
    wanted: Wanted, found: Look, changes: Sequence[str], olds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    roles = " + ".join(item.role for item in wanted.plan.files)
    text = f"{wanted.plan.generation}: {roles} verified, nothing to fetch"
    if olds:
        text += f"; {human_bytes(sum(old['bytes'] for old in olds))} of old files"
    return {
        "ds4_summary": {"room": ROOM, "state": "changed" if changes else "ok", "text": text, "files": len(found.good)}
    }


def _planned(wanted: Wanted, found: Look, changes: Sequence[str]) -> dict[str, Any]:
    plan = wanted.plan
    there = {*found.candidates, *found.in_place}
    fetched = [item for item in plan.files if item.role in found.missing and item.role not in there]
    parts = []
    if found.to_fetch or fetched:
        places = ", ".join(dict.fromkeys(place(item.sources[0]) for item in fetched if item.sources))
        unknown = " and files of unknown length" if any(item.bytes is None for item in fetched) else ""
        parts.append(f"would fetch {human_bytes(found.to_fetch)} ({found.to_fetch} bytes){unknown} from {places}")
    parts += [f"would adopt {role} from {paths[0]} after verifying it" for role, paths in found.candidates.items()]
    parts += [
        f"would first read {' and '.join(paths)} to see whether it is {role}" for role, paths in found.doubtful.items()
    ]
    parts += [f"would read {role} where it is" for role in found.in_place]
    text = "; ".join(parts)
    old = exchange.report(wanted)
    if old["bytes_deletable"]:
        text += f"; {human_bytes(old['bytes_deletable'])} of old files could be deleted afterwards"
    if old["bytes_for_return"] and wanted.care.policy != policies.KEEP:
        text += f"; {human_bytes(old['bytes_for_return'])} stay for a return, unless weights_rollback_waived: true"
    summary = {"room": ROOM, "state": "planned", "text": text, "bytes_to_fetch": found.to_fetch}
    return {
        "changed": True,
        "msg": text,
        **old,
        "plan": {
            "bytes_to_fetch": found.to_fetch,
            "missing": found.missing,
            "adopt": found.candidates,
            "write": list(changes),
        },
        **result_of(wanted, found),
        "ds4_summary": summary,
    }


def absent(layout: Layout, *, remove_files: bool, check: bool) -> Outcome:
    """Take away unit, command, plan and progress; the weights too when that was asked for, as far as our records name them."""
    paths = fetch_unit.removable(layout)
    files = generations.recorded(layout.directory) if remove_files else []
    freed = sum(os.path.getsize(path) for path in files)
    if not check:
        fetch_unit.remove(layout)
        generations.remove_recorded(layout.directory, files)
    kept = "" if remove_files else f"; weights stay in {layout.directory}"
    text = (
        f"{'would remove' if check else 'removed'} {len(paths) + len(files)} files{kept}"
        if paths or files
        else "nothing to remove"
    )
    summary = {
        "room": ROOM,
        "state": "planned" if check and (paths or files) else "changed" if paths or files else "ok",
        "text": text,
    }
    return Outcome(
        "done",
        {"changed": bool(paths or files), "removed": [*paths, *files], "bytes_freed": freed, "ds4_summary": summary},
    )


def adopt(plan_path: str, state: str, move: bool) -> list[dict[str, str]]:
    """The root part before a fetch: share files that are on this host already."""
    plan = load(plan_path)
    if os.path.islink(os.path.dirname(plan.unfinished)):  # root writes there; the service user owns the directory
        raise Ds4Error(
            f"{os.path.dirname(plan.unfinished)} is a link", required="a folder", cure="remove it, then run site.yml"
        )
    with fetch_state.locked(plan.directory) as mine:
        if not mine:
            return []
        status = fetch_state.Status(plan)
        last = time.monotonic()
        left = plan.deadline_seconds and max(plan.deadline_seconds - status.elapsed(), 1.0)
        patience = guest.Patience(plan.memory_floor_kib, left, status.note)

        def progress(item: PlanFile, path: str, count: int) -> None:
            nonlocal last
            patience.wait()
            row = status.row(item)
            if row["source"] != path:
                row.update(state="verifying", source=path, bytes=os.stat(path).st_size, hashed=0)
            row["hashed"] += count
            if time.monotonic() - last > fetch_state.TICK_SECONDS:
                last = time.monotonic()
                status.write(0)

        judged = adoption.Judged(os.path.join(state, "judged.json"))
        adopted = adoption.Adoption(plan, judged, note=status.note, progress=progress, move=move).run()
        for row in status.value["files"]:
            row["state"] = "waiting"
        status.write(0)
        return adopted


def make_exchange(plan_path: str, state: str, wait_seconds: float) -> str:
    """The part of ``remove_before_fetch`` that belongs to a host's switch: delete what was planned, then fetch.

    Called after the old service has stopped. May be repeated: what is gone is gone, what was fetched stays.

    Returns:
        One line about what was done; empty when nothing was planned.

    Raises:
        Ds4Error: a file is in use after all, or the fetch failed.
    """
    plan = load(plan_path)
    layout = Layout(plan.directory, state, "", "")
    deleted = exchange.delete(plan, layout)
    if not deleted:
        return ""
    print(f"deleted {deleted}", file=sys.stderr, flush=True)
    fetch_unit.start(plan, layout)
    outcome = follow(Wanted(plan, layout), wait_seconds)
    if outcome.state != "done":
        raise Ds4Error(
            "The weights did not arrive in time",
            found=str(outcome.result["progress"]),
            required=f"an end within {wait_seconds:.0f} s",
            cure="raise the limit of the switch; the fetch goes on, and what is there is kept",
        )
    os.unlink(layout.exchange)
    return f"deleted {deleted}; {outcome.result['ds4_summary']['text']}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m ds4.weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    adopting = commands.add_parser("adopt", help="share files that are on this host already (root)")
    adopting.add_argument("--plan", default=fetch_state.DEFAULT_PLAN)
    adopting.add_argument("--state", default=os.path.dirname(fetch_state.DEFAULT_PLAN))
    adopting.add_argument("--move", action="store_true")
    exchanging = commands.add_parser("exchange", help="delete the old files as planned, then fetch; part of a switch")
    exchanging.add_argument("--plan", default=fetch_state.DEFAULT_PLAN)
    exchanging.add_argument("--state", default=os.path.dirname(fetch_state.DEFAULT_PLAN))
    exchanging.add_argument("--wait-seconds", type=float, default=86400.0)
    options = parser.parse_args(argv)
    try:
        if options.command == "adopt":
            adopt(options.plan, options.state, options.move)
        else:
            print(make_exchange(options.plan, options.state, options.wait_seconds))
    except Ds4Error as error:
        print(f"ds4-weights: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
