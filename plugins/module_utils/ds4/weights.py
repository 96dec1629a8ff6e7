# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Weights on a host: what is wanted, what is there, and the service that brings the difference.

Doors: the module ``ds4_weights`` (plan, start, attach, follow, clean) and ``python3 -m ds4.weights`` (``check`` before
every start of the engine, ``adopt`` before every fetch, ``exchange`` in a switch that deletes before it fetches).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import adoption, fetch, generations, records, space
from .command import run
from .errors import Ds4Error
from .files import (
    MARKER_LINE,
    existing_parent,
    human_bytes,
    is_ours,
    mark,
    read_json,
    read_text,
    write_atomic,
    write_json,
)
from .host import ds4_processes
from .plan import Plan, PlanFile, errors, load, source_urls
from .progress import duration
from .progress import line as progress_line
from .service import Service, State, parse_show
from .systemd_text import exec_line

UNIT = "ds4-fetch.service"
ROOM = "weights"
POLL_SECONDS = 0.25
EXCHANGE = "exchange.json"  # what the switch has to delete before it fetches
HUB = "huggingface.co"


class Layout(NamedTuple):
    """Where things are: absolute paths.

    Attributes:
        directory: verified files and their records; belongs to the service user.
        state: what root writes: the plan, the mount, the memory of earlier looks.
        lib: where ``python3 -m ds4.…`` finds the mechanism.
        bin: where ``ds4-fetch`` goes.
        units: where systemd reads local units.
    """

    directory: str
    state: str
    lib: str
    bin: str
    units: str = "/etc/systemd/system"

    @property
    def plan(self) -> str:
        return os.path.join(self.state, "plan.json")

    @property
    def status(self) -> str:
        return os.path.join(self.directory, ".fetch", "status.json")

    @property
    def unit(self) -> str:
        return os.path.join(self.units, UNIT)

    @property
    def command(self) -> str:
        return os.path.join(self.bin, "ds4-fetch")

    @property
    def judged(self) -> str:
        return os.path.join(self.state, "judged.json")

    @property
    def exchange(self) -> str:
        return os.path.join(self.state, EXCHANGE)

    @property
    def mount(self) -> str:
        return os.path.join(self.state, "mount.json")


class Care(NamedTuple):
    """How old generations are treated.

    Attributes:
        policy: one of :data:`ds4.generations.POLICIES`.
        rollback_waived: what a return to the previous deployment needs may go too.
        paths: directories and files outside our own that the operator named.
        known: entries of all manifests: generation, role, file, bytes, sha256.
        deployments, current, state: where deployments lie, the link to the active one, and their history.
    """

    policy: str = generations.KEEP
    rollback_waived: bool = False
    paths: tuple[str, ...] = ()
    known: tuple[Mapping[str, Any], ...] = ()
    deployments: str = "/opt/ds4/deployments"
    current: str = "/opt/ds4/current"
    state: str = "/var/lib/ds4/state"


class Wanted(NamedTuple):
    """What the role asks for.

    Attributes:
        plan: complete but for what depends on the host's state (mount, guest, discovered files).
        guest: ``auto``, ``always`` or ``never``: be considerate to a live engine.
        memory_floor_kib: for a guest.
        extra_needs: room that other parts of the same run will use.
        mount_change_accepted: the weights may lie on another file system than last time.
        adopt_running: also look at the files of engines that run on this host.
        adopt_move: take adopted files instead of sharing them.
    """

    plan: Plan
    layout: Layout
    guest: str = "auto"
    memory_floor_kib: int = 0
    extra_needs: tuple[space.Need, ...] = ()
    mount_change_accepted: bool = False
    adopt_running: bool = True
    adopt_move: bool = False
    care: Care = Care()


class Look(NamedTuple):
    """What is there and what is not. Bytes.

    Attributes:
        good: role → record of a file that needs nothing.
        missing: role → why not.
        candidates: role → files that may be adopted.
        to_fetch: bytes that would come over the wire, as far as lengths are known.
        needs: room that the difference takes.
    """

    good: dict[str, dict[str, Any]]
    missing: dict[str, str]
    candidates: dict[str, list[str]]
    to_fetch: int
    needs: list[space.Need]


def build_plan(
    *,
    generation: str,
    files: Iterable[Mapping[str, Any]],
    sources: Sequence[str],
    layout: Layout,
    user: str,
    known: Iterable[Mapping[str, Any]] = (),
    allowed_hosts: Sequence[str] = (),
    **settings: Any,
) -> Plan:
    """A plan from what the operator's variables say.

    Args:
        files: ``{role, file, repo, revision, bytes, sha256, sources}``; ``sources`` of a file go before the general ones.
        sources: see :func:`ds4.plan.source_urls`.
        known: entries of all manifests: ``{generation, role, sha256}``.
        settings: further fields of :class:`ds4.plan.Plan`.

    Raises:
        Ds4Error: the plan cannot be used; all reasons at once.
    """
    wanted = []
    for entry in files:
        repo, revision, file = (str(entry.get(key) or "") for key in ("repo", "revision", "file"))
        wanted.append(
            PlanFile(
                role=str(entry["role"]),
                file=file,
                target=os.path.basename(file),
                bytes=int(entry["bytes"]) if entry.get("bytes") else None,
                sha256=str(entry.get("sha256") or "").lower(),
                sources=source_urls([*(entry.get("sources") or []), *sources], repo, revision, file),
                repo=repo,
                revision=revision,
            )
        )
    plan = Plan(
        generation=generation,
        directory=layout.directory,
        user=user,
        files=wanted,
        status_file=layout.status,
        known={str(e["sha256"]): f"{e['generation']} {e['role']}" for e in known if e.get("sha256")},
        allowed_hosts=sorted(allowed_hosts),
        **settings,
    )
    found = errors(plan)
    if not wanted:
        found.append(f"generation {generation or '(none)'} has no files; describe it in ds4_weights_extra")
    if found:
        raise Ds4Error(
            "The weights cannot be planned",
            found="; ".join(found),
            cure="correct the weights_ and ds4_weights variables",
        )
    return plan


def look(wanted: Wanted) -> Look:
    """Compare what is wanted with what is there; reads records, never a weights file."""
    plan, who = wanted.plan, adoption.account(wanted.plan.user) if os.geteuid() == 0 else None
    good: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    found: dict[str, list[str]] = {}
    to_fetch = 0
    needs: list[space.Need] = []
    for item in plan.files:
        path = plan.path(item)
        problem = records.quick_check(path, item.sha256)
        if not problem and who is not None and not adoption.readable(os.stat(path), who):
            problem = f"{item.target} cannot be read by {plan.user}"
        record = records.read(path)
        if not problem and record is not None:
            good[item.role] = record
            continue
        missing[item.role] = problem
        size = item.bytes or 0
        if os.path.isfile(path) and os.stat(path).st_size == size:
            continue  # to be hashed where it is
        found[item.role] = adoption.candidates(item, plan.adopt, plan.directory)
        if any(_shareable(one, plan.directory, who) for one in found[item.role]):
            continue
        there = _present(plan, item)
        to_fetch += 0 if found[item.role] else max(size - there, 0)
        needs.append(space.Need(plan.directory, size - space.credit(plan.part(item), size), item.role))
    return Look(good, missing, {role: paths for role, paths in found.items() if paths}, to_fetch, needs)


def _shareable(path: str, directory: str, who: adoption.Account | None) -> bool:
    status = os.stat(path)
    on = os.stat(directory if os.path.isdir(directory) else existing_parent(directory)).st_dev
    return status.st_dev == on and (who is None or adoption.readable(status, who))


def _present(plan: Plan, item: PlanFile) -> int:
    """Bytes of a partial file that the journal vouches for."""
    from .assembly import segment_size
    from .journal import identity, load

    size = item.bytes or 0
    segment = plan.segment_bytes or segment_size(size)
    loaded = load(plan.part(item) + ".journal", identity(item.sha256, size, segment))
    return sum(min(segment, size - number * segment) for number in loaded.segments)


def complete(wanted: Wanted) -> Wanted:
    """Fill in what depends on the host now: a live engine, its files, the mount.

    Raises:
        Ds4Error: the disk that held the weights is not there.
    """
    plan = wanted.plan
    engines = ds4_processes()
    guest = wanted.guest == "always" or (wanted.guest == "auto" and bool(engines))
    running = [path for engine in engines for path in engine["weights"]] if wanted.adopt_running else []
    plan = dataclasses.replace(
        plan,
        adopt=list(
            dict.fromkeys([*plan.adopt, *(path for path in running if os.path.dirname(path) != plan.directory)])
        ),
        drop_cache=guest,
        memory_floor_kib=wanted.memory_floor_kib if guest else 0,
        mount=_mount(wanted),
    )
    return wanted._replace(plan=plan)


def _mount(wanted: Wanted) -> dict[str, str]:
    found = space.mount_of(wanted.plan.directory)
    now = {"path": found["path"], "uuid": found["uuid"]}
    before = read_json(wanted.layout.mount)
    if not isinstance(before, dict) or wanted.mount_change_accepted or before.get("directory") != wanted.plan.directory:
        return now
    if before["path"] != now["path"] or (before["uuid"] and now["uuid"] and before["uuid"] != now["uuid"]):
        raise Ds4Error(
            f"The disk that holds {wanted.plan.directory} is not mounted",
            found=f"it would lie on {now['path']} ({now['uuid'] or found['source'] or found['type']})",
            required=f"the file system mounted at {before['path']} ({before['uuid'] or 'any'}), as at the first run",
            cure=f"mount {before['path']}; or accept the new place with weights_mount_change_accepted: true",
        )
    return now


def unit_text(wanted: Wanted, python: str) -> str:
    """ds4-fetch.service: works without anybody connected, and goes on after a reboot while there is something to do."""
    plan, layout = wanted.plan, wanted.layout
    credentials = [
        f"LoadCredential={name}:{path}"
        for name, path in (
            (fetch.TOKEN_CREDENTIAL, plan.token_file),
            (fetch.PROXY_CREDENTIAL, plan.proxy_credentials_file),
        )
        if path
    ]
    # "+": as root, since only an owner or root may hard-link somebody's file.
    adopt = [python, "-m", "ds4.weights", "adopt", "--plan", layout.plan, "--state", layout.state]
    lines = [
        f"# {MARKER_LINE}",
        "[Unit]",
        "Description=Fetch and verify the weights of DeepSeek-V4-Flash",
        "Wants=network-online.target",
        "After=network-online.target",
        f"RequiresMountsFor={plan.directory} {layout.state}",
        f"ConditionPathExists={plan.unfinished}",
        "StartLimitIntervalSec=3600",
        "StartLimitBurst=10",
        "",
        "[Service]",
        "Type=exec",
        f"User={plan.user}",
        f"Environment=PYTHONPATH={layout.lib} PYTHONDONTWRITEBYTECODE=1",
        *credentials,
        "ExecStartPre=+" + exec_line(adopt + (["--move"] if wanted.adopt_move else [])),
        "ExecStart=" + exec_line([python, "-m", "ds4.fetch", "--plan", layout.plan, "run"]),
        "Restart=on-failure",
        "RestartSec=5",
        f"RestartPreventExitStatus={fetch.EXIT_FINAL}",
        "TimeoutStartSec=infinity",
        "TimeoutStopSec=30",
        "Nice=10",
        "IOSchedulingClass=idle",
        "UMask=0022",
        "CapabilityBoundingSet=",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "NoNewPrivileges=yes",
        "PrivateDevices=yes",
        "PrivateTmp=yes",
        "ProtectClock=yes",
        "ProtectControlGroups=yes",
        "ProtectHome=read-only",
        "ProtectHostname=yes",
        "ProtectKernelLogs=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelTunables=yes",
        "ProtectSystem=strict",
        f"ReadWritePaths={plan.directory}",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def command_text(layout: Layout, python: str) -> str:
    """The command ``ds4-fetch`` for people."""
    return (
        "#!/bin/sh\n"
        f"# {MARKER_LINE}\n"
        f'PYTHONPATH="{layout.lib}" exec "{python}" -m ds4.fetch --plan "{layout.plan}" "$@"\n'
    )


def install(wanted: Wanted, python: str, *, check: bool) -> list[str]:
    """Write what is not as it should be: unit, command, plan. Returns the paths that were, or would be, written.

    Raises:
        Ds4Error: a file of the same name is somebody else's.
    """
    layout, plan = wanted.layout, wanted.plan
    changed = []
    texts = {layout.unit: unit_text(wanted, python), layout.command: command_text(layout, python)}
    for path, text in texts.items():
        found = read_text(path)
        if found == text:
            continue
        if os.path.lexists(path) and MARKER_LINE not in found:
            raise Ds4Error(
                f"{path} is not ours",
                found="a file without our marker",
                required=f"no such file, or one with the line '{MARKER_LINE}'",
                cure=f"rename or remove {path}",
            )
        changed.append(path)
        if not check:
            write_atomic(path, text, mode=0o755 if path == layout.command else 0o644)
    with contextlib.suppress(Ds4Error):
        if load(layout.plan).id == plan.id:
            return changed
    return [*changed, layout.plan]


class Unit(NamedTuple):
    """The fetch service as systemd sees it. ``queued``: a start is on its way."""

    state: State
    queued: bool

    @property
    def busy(self) -> bool:
        return self.queued or self.state.active in ("active", "activating", "reloading", "deactivating")


def unit_now() -> Unit:
    """Ask systemd once."""
    text = run(["systemctl", "show", UNIT]).out
    jobs = [line for line in text.splitlines() if line.startswith("Job=") and line not in ("Job=", "Job=0")]
    return Unit(parse_show(text), bool(jobs))


class Outcome(NamedTuple):
    """``state`` is planned, running, done or failed; ``result`` is what the module returns."""

    state: str
    result: dict[str, Any]


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
    generations.require_consistent(
        care.policy, fetch=wanted.plan.fetch, rollback_waived=care.rollback_waived, paths=care.paths
    )
    wanted = complete(wanted)
    layout = wanted.layout
    _refuse_foreign(layout)
    found = look(wanted)
    changes = install(wanted, python, check=check)
    if not found.missing:
        if changes and not check:
            _store(wanted, changes)
        there = {**_weights(wanted, found), **_old(wanted), **_summary_there(wanted, found, changes)}
        return Outcome("done", {"changed": bool(changes), **there})
    tight = _tight(wanted, found.needs)
    if tight:
        return _replace_later(wanted, found, tight, changes, check=check)
    if check:
        return Outcome("planned", _planned(wanted, found, changes))
    unit = unit_now()
    attached = unit.busy and layout.plan not in changes
    if not attached:
        if unit.busy:  # another plan: what it fetched so far is kept by its journal
            Service(UNIT).stop(60)
        _store(wanted, changes)
        _start(wanted)
    return follow(wanted, wait_seconds, changed=not attached)


def _refuse_foreign(layout: Layout) -> None:
    if os.path.isdir(layout.directory) and os.listdir(layout.directory) and not is_ours(layout.directory):
        raise Ds4Error(
            f"{layout.directory} is not ours",
            found="a directory with files and without our marker",
            required="an empty or absent directory, or one made by ds4-fleet",
            cure="choose another weights_directory, and name this one in weights_adopt_paths",
        )


def _tight(wanted: Wanted, needs: Sequence[space.Need], freed: Mapping[int, int] | None = None) -> list[space.Room]:
    """File systems on which something does not fit, after ``freed`` bytes (by device) were given back."""
    rooms = space.rooms([*needs, *wanted.extra_needs], wanted.plan.margin_bytes)
    rooms = [room._replace(free=room.free + (freed or {}).get(room.device, 0)) for room in rooms]
    return [room for room in rooms if room.missing]


def _no_room(tight: Sequence[space.Room], more: str = "") -> Ds4Error:
    return Ds4Error(
        "There is not enough room on disk",
        found="; ".join(room.text() for room in tight) + more,
        required="; ".join(f"{human_bytes(room.missing)} more on {room.path}" for room in tight),
        cure="free room; move weights_directory; or see weights_old_generation in docs/weights.md",
        evidence={"missing_bytes": {room.path: room.missing for room in tight}},
    )


def old_files(
    wanted: Wanted, *, read: bool = False, note: Callable[[str], None] = lambda text: None
) -> list[generations.Old]:
    """What the wanted generation does not need; see :func:`ds4.generations.find`."""
    care, plan = wanted.care, wanted.plan
    open_paths = [path for engine in ds4_processes() for path in engine["weights"]]
    return generations.find(
        plan.directory,
        care.known,
        {item.target: item.sha256 for item in plan.files},
        generations.uses(care.deployments, care.current, care.state, open_paths),
        adoption.Judged(wanted.layout.judged),
        paths=care.paths,
        rollback_waived=care.rollback_waived,
        read=read,
        note=note,
    )


def _replace_later(
    wanted: Wanted, found: Look, tight: Sequence[space.Room], changes: Sequence[str], *, check: bool
) -> Outcome:
    """No room beside the old files: leave the exchange to the switch, where that was asked for.

    Raises:
        Ds4Error: it was not asked for, or would not be enough.
    """
    olds = old_files(wanted, read=not check)
    if wanted.care.policy != generations.BEFORE_FETCH:
        more = (
            f"; old files take {human_bytes(sum(old.bytes for old in olds))} ({generations.describe(olds)})"
            if olds
            else ""
        )
        raise _no_room(tight, more)
    freed: dict[int, int] = {}
    for old in olds:  # whatever serves now will have stopped by then
        device = os.stat(old.path).st_dev
        freed[device] = freed.get(device, 0) + old.bytes
    still = _tight(wanted, found.needs, freed)
    if still:
        raise _no_room(still, f", after removing {generations.describe(olds)}")
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
        _store(wanted, changes)
        write_json(wanted.layout.exchange, {"schema": 1, "plan": wanted.plan.id, **exchange})
    summary = {"room": ROOM, "state": "planned", "text": text, "bytes_to_fetch": found.to_fetch}
    result = _weights(wanted, found)
    result["weights"]["deferred"] = True
    state = "planned" if check else "deferred"
    return Outcome(
        state, {"changed": bool(changes), "msg": text, "exchange": exchange, **result, "ds4_summary": summary}
    )


def exchange(plan_path: str, state: str, wait_seconds: float) -> str:
    """The part of ``remove_before_fetch`` that belongs to a host's switch: delete what was planned, then fetch.

    Called by the switch after the old service has stopped. May be repeated: what is gone is gone, what was fetched stays.

    Returns:
        One line about what was done; empty when nothing was planned.

    Raises:
        Ds4Error: a file is in use after all, or the fetch failed.
    """
    path = os.path.join(state, EXCHANGE)
    planned, plan = read_json(path), load(plan_path)
    if not isinstance(planned, dict) or planned.get("plan") != plan.id:
        return ""
    opened = {os.path.realpath(name) for engine in ds4_processes() for name in engine["weights"]}
    olds = [generations.Old(**entry)._replace(kept_for="") for entry in planned["delete"]]
    for old in olds:
        if os.path.realpath(old.path) in opened:
            raise Ds4Error(
                f"{old.path} is in use by a running engine",
                required="no engine at all: a mapped file frees nothing when it is deleted",
                cure="stop the engine that `ss -ltnp` or `systemctl status ds4` shows, then switch again",
            )
    removed = generations.remove(olds)
    for old in removed:
        print(f"removed {old.path} ({old.called})", file=sys.stderr, flush=True)
    wanted = Wanted(plan, Layout(plan.directory, state, "", ""))
    _start(wanted)
    outcome = follow(wanted, wait_seconds)
    if outcome.state != "done":
        raise Ds4Error(
            "The weights did not arrive in time",
            found=str(outcome.result["progress"]),
            required=f"an end within {wait_seconds:.0f} s",
            cure="raise the limit of the switch; the fetch goes on, and what is there is kept",
        )
    os.unlink(path)
    return f"deleted {generations.describe(olds)}; {outcome.result['ds4_summary']['text']}"


def clean(wanted: Wanted, *, check: bool) -> Outcome:
    """After the new service passed its questions: report old generations, and remove them if that was asked for.

    Raises:
        Ds4Error: contradictory settings, or a file that cannot be removed.
    """
    care = wanted.care
    generations.require_consistent(
        care.policy, fetch=wanted.plan.fetch, rollback_waived=care.rollback_waived, paths=care.paths
    )
    notes: list[str] = []
    removing = care.policy != generations.KEEP
    olds = old_files(wanted, read=removing, note=notes.append)
    used = generations.uses(care.deployments, care.current, care.state, [])
    needed = {item.sha256 for item in wanted.plan.files if item.sha256}
    if removing and not (used.proven and needed <= used.served):
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
        "ds4_summary": summary,
    }
    return Outcome("done", result)


def _store(wanted: Wanted, changes: Sequence[str]) -> None:
    """Directories, plan and unit on disk."""
    layout, plan = wanted.layout, wanted.plan
    who = adoption.account(plan.user)
    os.makedirs(layout.state, mode=0o755, exist_ok=True)
    made = not os.path.isdir(layout.directory)
    os.makedirs(layout.directory, mode=0o755, exist_ok=True)
    if not is_ours(layout.directory):
        mark(layout.directory, "weights")
    folder = os.path.join(layout.directory, ".fetch")
    os.makedirs(folder, mode=0o755, exist_ok=True)
    for path in [folder, *([layout.directory] if made or os.stat(layout.directory).st_uid == 0 else [])]:
        os.chown(path, who.uid, who.gid)
    plan.write(layout.plan)
    write_atomic(layout.mount, json.dumps({"directory": plan.directory, **plan.mount}) + "\n")
    if layout.unit in changes or unit_now().state.needs_reload:
        Service(UNIT).reload_manager()


def _start(wanted: Wanted) -> None:
    """Start the service and do not wait; it is enabled so that a reboot goes on with the work."""
    plan, layout = wanted.plan, wanted.layout
    for stale in (layout.status,):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stale)
    write_atomic(plan.unfinished, plan.id + "\n")
    service = Service(UNIT)
    if not service.state().enabled:
        service.enable()
    run(["systemctl", "reset-failed", UNIT])
    started = run(["systemctl", "start", "--no-block", UNIT])
    if started.rc:
        raise Ds4Error(f"{UNIT} cannot be started", found=started.err.strip(), cure=f"see `systemctl status {UNIT}`")


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
        **_weights(wanted, look(wanted)),
        "ds4_summary": summary,
    }
    return Outcome("running", result)


def _ended(wanted: Wanted, unit: Unit, status: dict[str, Any], changed: bool) -> Outcome:
    found = look(wanted)
    if not found.missing:
        text = _fetched_text(status)
        summary = {"room": ROOM, "state": "changed", "text": text, "files": len(wanted.plan.files)}
        result = {"changed": changed, "status": status, **_weights(wanted, found, status), "ds4_summary": summary}
        return Outcome("done", result)
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
        evidence={"log": Service(UNIT).journal(lines=20).splitlines()},
    )


def _fetched_text(status: Mapping[str, Any]) -> str:
    count, seconds = int(status.get("bytes_received") or 0), float(status.get("elapsed_seconds") or 0)
    adopted = [row["role"] for row in status.get("files", []) if row.get("how") not in ("fetched", "")]
    parts = []
    if count:
        rate = f" ({count / seconds / 1024 / 1024:.0f} MiB/s)" if seconds > 1 else ""
        parts.append(f"fetched {human_bytes(count)} in {duration(seconds)}{rate}")
    if adopted:
        parts.append(f"{' + '.join(adopted)} were on the host")
    return ", ".join([*parts, "verified"])


def _weights(wanted: Wanted, found: Look, status: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The documented ``weights`` value."""
    plan = wanted.plan
    files = {}
    for item in plan.files:
        record = found.good.get(item.role)
        files[item.role] = {
            "path": plan.path(item),
            "sha256": record["sha256"] if record else item.sha256,
            "bytes": record["bytes"] if record else item.bytes or 0,
        }
    sources = {record["source"] for record in found.good.values()}
    return {
        "weights": {
            "generation": plan.generation,
            "directory": plan.directory,
            "files": files,
            "bytes_fetched": int((status or {}).get("bytes_received") or 0),
            "bytes_to_fetch": found.to_fetch,
            "seconds": float((status or {}).get("elapsed_seconds") or 0.0),
            "source": ", ".join(sorted({_place(source) for source in sources})),
            "adopted": [
                {"role": role, "path": record["source"], "how": record["how"]}
                for role, record in found.good.items()
                if record["how"] != "fetched"
            ],
        }
    }


def _place(source: str) -> str:
    parts = urllib.parse.urlsplit(source)
    return parts.hostname or os.path.dirname(parts.path)


def _old(wanted: Wanted) -> dict[str, Any]:
    """Old files that are known without reading any, for reports."""
    olds = old_files(wanted)
    return {
        "old": [old._asdict() for old in olds],
        "bytes_deletable": sum(old.bytes for old in olds if not old.kept_for),
    }


def _summary_there(wanted: Wanted, found: Look, changes: Sequence[str]) -> dict[str, Any]:
    roles = " + ".join(item.role for item in wanted.plan.files)
    text = f"{wanted.plan.generation}: {roles} verified, nothing to fetch"
    return {
        "ds4_summary": {"room": ROOM, "state": "changed" if changes else "ok", "text": text, "files": len(found.good)}
    }


def _planned(wanted: Wanted, found: Look, changes: Sequence[str]) -> dict[str, Any]:
    plan = wanted.plan
    fetched = [item for item in plan.files if item.role in found.missing and item.role not in found.candidates]
    parts = []
    if found.to_fetch or fetched:
        places = ", ".join(dict.fromkeys(_place(item.sources[0]) for item in fetched if item.sources))
        unknown = " and files of unknown length" if any(item.bytes is None for item in fetched) else ""
        parts.append(f"would fetch {human_bytes(found.to_fetch)} ({found.to_fetch} bytes){unknown} from {places}")
    parts += [f"would adopt {role} from {paths[0]} after verifying it" for role, paths in found.candidates.items()]
    verified = [
        role for role in found.missing if role not in found.candidates and role not in {item.role for item in fetched}
    ]
    parts += [f"would verify {role} where it is" for role in verified]
    text = "; ".join(parts)
    old = _old(wanted)
    if old["bytes_deletable"]:
        text += f"; {human_bytes(old['bytes_deletable'])} of old files could be deleted afterwards"
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
        **_weights(wanted, found),
        "ds4_summary": summary,
    }


def quick_check(entries: Iterable[Mapping[str, Any]]) -> None:
    """Stop unless every file still is the one that was verified; reads records, not weights.

    Args:
        entries: ``{role, path, sha256}`` of what is about to be used.

    Raises:
        Ds4Error: all files that are not, and why.
    """
    bad = {
        str(entry["path"]): records.quick_check(str(entry["path"]), str(entry.get("sha256") or "")) for entry in entries
    }
    found = [problem for problem in bad.values() if problem]
    if found:
        raise Ds4Error(
            "The weights are not the ones that were verified",
            found="; ".join(found),
            required="unchanged files with their records",
            cure="`sudo ds4-fetch verify --deep` reads them again and names what is bad; site.yml repairs",
        )


def adopt(plan_path: str, state: str, move: bool) -> list[dict[str, str]]:
    """The root part before a fetch: share files that are on this host already."""
    plan = load(plan_path)
    if not plan.adopt or all(not records.quick_check(plan.path(item), item.sha256) for item in plan.files):
        return []
    with fetch.locked(plan.directory) as mine:
        if not mine:
            return []
        status = fetch.Status(plan)
        last = time.monotonic()

        def progress(item: PlanFile, path: str, count: int) -> None:
            nonlocal last
            row = status.row(item)
            if row["source"] != path:
                row.update(state="verifying", source=path, bytes=os.stat(path).st_size, hashed=0)
            row["hashed"] += count
            if time.monotonic() - last > fetch.TICK_SECONDS:
                last = time.monotonic()
                status.write(0)

        judged = adoption.Judged(os.path.join(state, "judged.json"))
        adopted = adoption.Adoption(plan, judged, note=status.note, progress=progress, move=move).run()
        for row in status.value["files"]:
            row["state"] = "waiting"
        status.write(0)
        return adopted


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m ds4.weights", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="are these files still the verified ones? reads records only")
    check.add_argument("directory")
    check.add_argument("files", nargs="+", metavar="FILE[=SHA256]")
    adopting = commands.add_parser("adopt", help="share files that are on this host already (root)")
    adopting.add_argument("--plan", default=fetch.DEFAULT_PLAN)
    adopting.add_argument("--state", default=os.path.dirname(fetch.DEFAULT_PLAN))
    adopting.add_argument("--move", action="store_true")
    exchanging = commands.add_parser("exchange", help="delete the old files as planned, then fetch; part of a switch")
    exchanging.add_argument("--plan", default=fetch.DEFAULT_PLAN)
    exchanging.add_argument("--state", default=os.path.dirname(fetch.DEFAULT_PLAN))
    exchanging.add_argument("--wait-seconds", type=float, default=86400.0)
    options = parser.parse_args(argv)
    try:
        if options.command == "check":
            pairs = [name.partition("=") for name in options.files]
            quick_check({"path": os.path.join(options.directory, name), "sha256": sha256} for name, _, sha256 in pairs)
        elif options.command == "adopt":
            adopt(options.plan, options.state, options.move)
        else:
            print(exchange(options.plan, options.state, options.wait_seconds))
    except Ds4Error as error:
        print(f"ds4-weights: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
