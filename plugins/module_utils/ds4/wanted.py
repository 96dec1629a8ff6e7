# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Weights that are wanted on a host, and a look at what is there of them."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import accounts, adoption, journal, policies, records, space
from .errors import Ds4Error
from .fetch_unit import Layout
from .files import existing_parent, read_json
from .host import ds4_processes
from .plan import Plan, PlanFile, errors, segment_size, source_urls
from .plan import token_hosts as default_token_hosts

ROOM = "weights"


class Care(NamedTuple):
    """How old generations are treated.

    Attributes:
        policy: one of :data:`ds4.policies.POLICIES`.
        rollback_waived: what a return to the previous deployment needs may go too.
        paths: directories and files outside our own that the operator named.
        known: entries of all manifests: generation, role, file, bytes, sha256.
        deployments, current, state: where deployments lie, the link to the active one, and their history.
    """

    policy: str = policies.KEEP
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
        candidates: role → files that may be adopted: known by their content, or at least of the right name.
        doubtful: role → files of the right length that have another name; only reading them tells.
        closed: files that cost a copy for the one reason that the service user may not read them.
        in_place: roles whose file has its final name and has to be read.
        to_fetch: bytes that would come over the wire, as far as lengths are known.
        needs: room that the difference takes.
    """

    good: dict[str, dict[str, Any]]
    missing: dict[str, str]
    candidates: dict[str, list[str]]
    doubtful: dict[str, list[str]]
    closed: list[str]
    in_place: list[str]
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
    token_hosts: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    **settings: Any,
) -> Plan:
    """A plan from what the operator's variables say.

    Args:
        files: ``{role, file, repo, revision, bytes, sha256, sources}``; ``sources`` of a file go before the general ones.
        sources: see :func:`ds4.plan.source_urls`.
        known: entries of all manifests: ``{generation, role, sha256}``.
        token_hosts: hosts that get the token; empty: see :func:`ds4.plan.token_hosts`.
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
        token_hosts=sorted(token_hosts) or default_token_hosts(sources),
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
    plan, who = wanted.plan, accounts.future_account(wanted.plan.user) if os.geteuid() == 0 else None
    judged = adoption.Judged(wanted.layout.judged)
    found = Look({}, {}, {}, {}, [], [], 0, [])
    to_fetch = 0
    for item in plan.files:
        path, size = plan.path(item), item.bytes or 0
        record = records.read(path)
        problem = records.quick_check(path, item.sha256)
        shared = bool(problem) or not records.quick_check(path, item.sha256, who)
        if record is not None and not problem and shared:
            found.good[item.role] = record
            continue
        found.missing[item.role] = problem or f"{item.target} cannot be read by {plan.user}"
        if not shared:  # its owner closed it: a copy of our own
            found.in_place.append(item.role)
            found.closed.append(path)
            found.needs.append(space.Need(plan.directory, size, item.role))
            continue
        if _worth_reading(path, item, record, judged):
            found.in_place.append(item.role)
            continue
        sure, doubtful = _candidates(plan, item, judged)
        if sure:
            found.candidates[item.role] = sure
        mover = None if wanted.adopt_move else who  # root moves what the service user may not read yet
        if any(_shareable(one, plan.directory, mover) for one in sure):
            continue
        found.closed.extend(one for one in sure if _shareable(one, plan.directory, None))
        if doubtful:
            found.doubtful[item.role] = doubtful
        to_fetch += 0 if sure else max(size - _present(plan, item), 0)
        found.needs.append(space.Need(plan.directory, size - space.credit(plan.part(item), size), item.role))
    return found._replace(to_fetch=to_fetch)


def _worth_reading(path: str, item: PlanFile, record: Mapping[str, Any] | None, judged: adoption.Judged) -> bool:
    """A file of the right length that nobody has found damaged, and nobody has found to be another one."""
    if not os.path.isfile(path) or item.bytes not in (None, os.stat(path).st_size):
        return False
    if record and record.get("damaged"):
        return False
    known = "" if record is None or records.quick_check(path) else str(record["sha256"])
    hashed = judged.get(path)
    known = known or (hashed.sha256 if hashed else "")
    return not known or not item.sha256 or known == item.sha256


def _candidates(plan: Plan, item: PlanFile, judged: adoption.Judged) -> tuple[list[str], list[str]]:
    """Files that can be counted on, and those of which only the length fits: both base files have the same one."""
    sure, doubtful = [], []
    for path in adoption.candidates(item, plan.adopt, plan.directory):
        hashed = judged.get(path)
        if hashed is not None and item.sha256:
            sure += [path] if hashed.sha256 == item.sha256 else []
        elif os.path.basename(path) == os.path.basename(item.file):
            sure.append(path)
        else:
            doubtful.append(path)
    return sure, doubtful


def _shareable(path: str, directory: str, who: accounts.Account | None) -> bool:
    """Can it get a second name here, without a copy?"""
    same_disk = os.stat(os.path.dirname(path)).st_dev == os.stat(existing_parent(directory)).st_dev
    return same_disk and (who is None or accounts.readable(os.stat(path), who))


def _present(plan: Plan, item: PlanFile) -> int:
    """Bytes of a partial file that its journal vouches for."""
    size = item.bytes or 0
    segment = plan.segment_bytes or segment_size(size)
    loaded = journal.load(plan.part(item) + ".journal", journal.identity(item.sha256, size, segment))
    return sum(min(segment, size - number * segment) for number in loaded.segments)


def is_guest(wanted: Wanted, engines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether somebody has to be considered."""
    return wanted.guest == "always" or (wanted.guest == "auto" and bool(engines))


def complete(wanted: Wanted) -> Wanted:
    """Fill in what depends on the host now: a live engine, its files, the mount.

    Raises:
        Ds4Error: the disk that held the weights is not there.
    """
    plan = wanted.plan
    engines = ds4_processes()
    guest = is_guest(wanted, engines)
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


class Outcome(NamedTuple):
    """``state`` is planned, running, deferred or done; ``result`` is what the module returns."""

    state: str
    result: dict[str, Any]


def result_of(wanted: Wanted, found: Look, status: Mapping[str, Any] | None = None) -> dict[str, Any]:
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
    received = int((status or {}).get("bytes_received") or 0)
    seconds = float((status or {}).get("elapsed_seconds") or 0.0)
    return {
        "weights": {
            "generation": plan.generation,
            "directory": plan.directory,
            "files": files,
            "bytes_fetched": received,
            "bytes_to_fetch": found.to_fetch,
            "seconds": seconds,
            "mib_per_second": round(received / 1024**2 / seconds, 1) if seconds else 0.0,
            "source": ", ".join(sorted({place(source) for source in sources})),
            "adopted": [
                {"role": role, "path": record["source"], "how": record["how"]}
                for role, record in found.good.items()
                if record["how"] != "fetched"
            ],
        }
    }


def place(source: str) -> str:
    """Host of an address, or folder of a path."""
    parts = urllib.parse.urlsplit(source)
    return parts.hostname or os.path.dirname(parts.path)
