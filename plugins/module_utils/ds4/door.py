# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What ``ds4_deployment`` does on the host, beyond staging, as plain functions: activate, roll back, tell, take away."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import deployment as store
from . import foreign, gate, probe
from . import transaction as transactions
from .command import run
from .deployment import Layout
from .errors import Ds4Error
from .files import MARKER_LINE, read_text
from .process import Process
from .service import Service
from .staging import UNITS, describe, takes_switch


def wanted_manifest(layout: Layout, deployment: str) -> dict[str, Any]:
    """Manifest of a staged deployment.

    Raises:
        Ds4Error: there is none of that id.
    """
    manifest = layout.manifest(deployment)
    if manifest is None:
        known = ", ".join(store.proven(layout)) or "none"
        raise Ds4Error(
            f"Deployment {deployment or '(none)'} is not on this host",
            found=f"proven deployments: {known}",
            cure="run site.yml with the tag stage, or name one of them",
        )
    return manifest


def rollback_target(layout: Layout, deployment: str) -> dict[str, Any]:
    """The deployment to go back to: the named one, or the newest proven one that does not run now.

    Raises:
        Ds4Error: there is none, or its build or weights are gone; nothing was stopped.
    """
    running = store.running_deployment(Service(layout.unit).state())
    if deployment:
        manifest = wanted_manifest(layout, deployment)
        gone = store.problems(manifest)
        if gone:
            raise Ds4Error(
                f"Deployment {deployment} cannot be gone back to; nothing was stopped",
                found="; ".join(gone),
                required="its build and its weights",
                cure="set ds4_release (and weights_generation) to it and run site.yml, which builds and fetches again",
            )
        return manifest
    back = store.returnable(layout, running)
    if back:
        return back[0]
    others = [name for name in store.proven(layout) if name != running]
    detail = [
        f"{name}: {'; '.join(store.problems(m))}" if (m := layout.manifest(name)) else f"{name}: removed"
        for name in others
    ]
    raise Ds4Error(
        "There is no deployment to go back to; nothing was stopped",
        found=" / ".join(detail) or "no other deployment was ever proven here",
        required="a proven deployment with its build and its weights",
        cure="set ds4_release to the release you want and run site.yml",
    )


def activate(
    layout: Layout,
    manifest: Mapping[str, Any],
    options: Mapping[str, Any],
    reason: str,
    *,
    wait_seconds: float,
    seen: int,
    transaction: str = "",
    served: bool = False,
) -> dict[str, Any] | None:
    """Start or follow the switch to ``manifest``; None when there is nothing to switch.

    Args:
        options: ``adopt``, ``busy``, and ``run``: what the caller calls this run. A run begins one switch at most, also when
            the answer that told of it was lost.
        transaction: id of the switch that is being followed, empty at first.
        seen: steps that the caller knows.
        served: content with a deployment that serves, proven or not; a switch that is needed ends proven all the same.

    Returns:
        The transaction record; ``outcome`` is empty while it goes on.
    """
    record = transactions.find_record(layout, transaction) if transaction else None
    if transaction and record is None:
        raise Ds4Error(
            "The switch that was followed is gone from the host; no other one was begun",
            found=f"no record {transaction}",
            cure="run again, which looks anew",
        )
    record = record or transactions.record_of_run(layout, str(options.get("run") or ""))
    if record is None:
        due = takes_switch(describe(layout, manifest), served=served)
        if transactions.open_record(layout) is None and not due:
            return None
        record = transactions.attach_or_request(layout, manifest["id"], options, reason)
    elif not record.closed:
        transactions.start_runner()  # heals a runner that was ended; harmless while it runs
    record = transactions.wait(record, wait_seconds, seen)
    crashed = "" if record.closed else transactions.runner_failure()
    if crashed:
        raise Ds4Error(
            f"{transactions.RUNNER} crashed and was given up; its switch is unfinished",
            found=crashed[-1500:],
            required="a switch that ends",
            cure="run again, which takes it up; if it crashes again, report these lines",
        )
    return record.data


def absent(layout: Layout, helpers: list[str], stop_seconds: float, *, check: bool = False) -> list[str]:
    """Stop the service and remove what this room wrote outside its folders: units, links, lock. Returns the paths.

    Raises:
        Ds4Error: a switch is in progress, or the engine does not end; nothing was removed.
    """
    current = transactions.open_record(layout)
    if current is not None and not current.closed:
        raise Ds4Error(
            "A switch is in progress on this host; nothing was removed",
            found=f"to deployment {current.data['to']}",
            cure=f"wait for it (journalctl -fu {transactions.RUNNER}), then run again",
        )
    paths = [path for path in [layout.unit_path, *(os.path.join(UNITS, name) for name in helpers)] if _is_ours(path)]
    paths += [path for path in (layout.launcher, layout.current) if _links_to_ours(path, layout)]
    if not check and paths:
        _stop_and_disable(layout, helpers, stop_seconds)
        for path in paths:
            os.unlink(path)
        run(["systemctl", "daemon-reload"], timeout_seconds=60)
        run(["systemctl", "reset-failed", layout.unit, *helpers], timeout_seconds=60)
    return paths


def _is_ours(path: str) -> bool:
    return MARKER_LINE in read_text(path)


def _links_to_ours(path: str, layout: Layout) -> bool:
    """True for the links that activation makes; a launcher of somebody else stays."""
    return store.leads_into(path, layout.current, layout.deployments)


def _stop_and_disable(layout: Layout, helpers: list[str], stop_seconds: float) -> None:
    for unit in (*helpers, layout.unit):
        service = Service(unit)
        service.stop(stop_seconds + 60)
        service.disable()
    state = Service(layout.unit).state()
    if state.pid:
        raise Ds4Error(
            "The engine does not end; nothing was removed",
            found=f"process {state.pid}",
            cure="reboot the host, run again",
        )
    served = layout.manifest(layout.current_id())
    if served:
        gate.remove_own_lock(served["service"]["user"])


_SHOWN_METRICS = (
    "ds4_uptime_seconds",
    "ds4_banks_total",
    "ds4_banks_live",
    "ds4_requests_inflight",
    "ds4_queue_depth",
    "ds4_spec_accept_ratio",
    "ds4_decode_tok_s",
)


def serving(layout: Layout) -> dict[str, Any]:
    """What serves now, asked from the process itself: no note is believed."""
    state = Service(layout.unit).state()
    process = Process(state.pid)
    running = store.running_deployment(state)
    manifest = layout.manifest(running)
    found: dict[str, Any] = {
        "state": state.describe(),
        "enabled": state.enabled,
        "pid": state.pid,
        "deployment": running,
        "version": "",
        "answers": False,
        "metrics": {},
    }
    if state.pid and process.user:
        # The file that runs, even when another one took its name.
        told = run([f"/proc/{state.pid}/exe", "--version"], timeout_seconds=20, user=process.user, cwd="/").out.split()
        found["version"] = told[1] if len(told) > 1 else ""
    if manifest:
        where = manifest["service"]
        found["answers"] = probe.is_ready(where["host"], where["port"])
        seen = probe.metrics(where["host"], where["port"])
        found["metrics"] = {name: seen[name] for name in _SHOWN_METRICS if name in seen}
    return found


def would_adopt(layout: Layout, manifest: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Somebody else's engine that a switch would take over, as text, and its settings that the deployment has not."""
    others = foreign.find(manifest["service"]["port"], layout.unit, [store.base_weights(manifest)])
    lost = [
        text
        for other in others
        if other["engine"]
        for text in foreign.lost_settings(foreign.running_settings(other["pid"]), manifest)
    ]
    return foreign.describe(others), lost


def adopted(layout: Layout, manifest: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What an operator should know about an engine that was taken over: settings it had, and who may start it again."""
    taken = record.get("from") or {}
    if taken.get("kind") != "foreign":
        return []
    theirs = foreign.read_record(taken["process"])
    lost = foreign.lost_settings(theirs, manifest)
    told = ["The engine that was taken over had settings that ours has not: " + ", ".join(lost)] if lost else []
    return told + [f"Take it out, or a second engine comes up: {note}" for note in theirs["supervisor"]["notes"]]
