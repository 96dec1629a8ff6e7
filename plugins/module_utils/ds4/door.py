# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What ``ds4_deployment`` does on the host, as plain functions: stage, activate, roll back, prune, query."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import deployment as store
from . import foreign, gate, probe, switch, systemd_text
from .command import run
from .deployment import Layout, Wanted
from .errors import Ds4Error
from .files import MARKER_LINE, read_json, read_text, write_atomic, write_json
from .process import Process
from .service import Service

UNITS = "/etc/systemd/system"


def install_helpers(units: Mapping[str, str], *, check: bool = False) -> list[str]:
    """Units of ours that are not part of a deployment: written, and enabled when they can be. Returns what changed.

    Whether one is enabled is asked, since a run may have been killed after it wrote the text.

    Raises:
        Ds4Error: a unit of that name is not ours.
    """
    changed = []
    for name, text in units.items():
        path = os.path.join(UNITS, name)
        old = read_text(path)
        if old == text and ("[Install]" not in text or Service(name).state().enabled):
            continue
        if os.path.lexists(path) and MARKER_LINE not in old:
            raise Ds4Error(f"{path} is not ours", found="no marker of ds4-fleet in it", cure="move it away")
        changed.append(name)
        if not check:
            write_atomic(path, text)
    if changed and not check:
        run(["systemctl", "daemon-reload"], timeout_seconds=60)
        for name in changed:
            if "[Install]" in units[name]:
                run(["systemctl", "enable", name], timeout_seconds=60)
    return changed


def keep_policy(layout: Layout, policy: Mapping[str, Any], *, check: bool = False) -> bool:
    """Limits and smoke questions, where the switch and the gate find them when no controller is there."""
    path = os.path.join(layout.state, "policy.json")
    wanted = {"schema": 1, "layout": layout._asdict(), **policy}
    if read_json(path) == wanted:
        return False
    if not check:
        write_json(path, wanted)
    return True


def describe(layout: Layout, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A deployment and what it would take to serve it: ``needs_switch`` with the reasons, what runs, what is proven."""
    state = Service(layout.unit).state()
    reasons = store.drift(manifest, layout, state)
    if not reasons and manifest["id"] not in store.proven(layout):
        reasons = [f"deployment {manifest['id']} runs, but is not proven"]
    if not reasons and not state.enabled:
        reasons = ["it does not start at boot"]  # being proven anew enables it; nothing is restarted
    if switch.open_record(layout) is not None:
        reasons.append("a switch of this host is unfinished")
    return {
        "id": manifest["id"],
        "release": manifest["release"],
        "path": layout.directory(manifest["id"]),
        "url": f"http://{manifest['service']['host']}:{manifest['service']['port']}",
        "needs_switch": bool(reasons),
        "reasons": reasons,
        "current": store.running_deployment(state) if state.running else "",
        "proven": store.proven(layout),
        "drop_ins": [path for path in state.drop_ins if f"/{layout.unit}.d/" in path],
    }


def stage(
    wanted: Wanted,
    layout: Layout,
    groups: list[str],
    policy: Mapping[str, Any],
    helpers: Mapping[str, str],
    *,
    check: bool = False,
) -> tuple[dict[str, Any], list[str], store.Staged]:
    """Write the deployment, the policy and the helper units beside what serves.

    Returns:
        The deployment as ``describe`` tells it, what changed, and the staged texts.
    """
    staged = store.stage(wanted, layout, groups, check=check)
    changed = install_helpers(helpers, check=check)
    if keep_policy(layout, policy, check=check):
        changed.append("policy")
    if staged.changed:
        changed.insert(0, "deployment")
    if not check:
        refresh(staged.manifest, layout)
    return describe(layout, staged.manifest), changed, staged


def refresh(manifest: Mapping[str, Any], layout: Layout) -> None:
    """Carry a new comment into the installed unit of a deployment that runs already, and let systemd read it.

    What systemd acts on is the same, so nothing is restarted.
    """
    installed, staged = (
        read_text(layout.unit_path),
        read_text(os.path.join(layout.directory(manifest["id"]), layout.unit)),
    )
    service = Service(layout.unit)
    same = installed and systemd_text.directives(installed) == systemd_text.directives(staged)
    if same and installed != staged:
        write_atomic(layout.unit_path, staged)
        service.reload_manager()
    elif same and service.state().needs_reload:
        service.reload_manager()


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
) -> dict[str, Any] | None:
    """Start or follow the switch to ``manifest``; None when the host serves it already, proven.

    Args:
        options: ``adopt``, ``busy``, and ``run``: what the caller calls this run. A run begins one switch at most, also when
            the answer that told of it was lost.
        transaction: id of the switch that is being followed, empty at first.
        seen: steps that the caller knows.

    Returns:
        The transaction record; ``outcome`` is empty while it goes on.
    """
    record = switch.find_record(layout, transaction) if transaction else None
    if transaction and record is None:
        raise Ds4Error(
            "The switch that was followed is gone from the host; no other one was begun",
            found=f"no record {transaction}",
            cure="run again, which looks anew",
        )
    record = record or switch.record_of_run(layout, str(options.get("run") or ""))
    if record is None:
        if switch.open_record(layout) is None and not describe(layout, manifest)["needs_switch"]:
            return None
        record = switch.attach_or_request(layout, manifest["id"], options, reason)
    elif not record.closed:
        switch.start_runner()  # heals a runner that was ended; harmless while it runs
    record = switch.wait(record, wait_seconds, seen)
    crashed = "" if record.closed else switch.runner_failure()
    if crashed:
        raise Ds4Error(
            f"{switch.RUNNER} crashed and was given up; its switch is unfinished",
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
    current = switch.open_record(layout)
    if current is not None and not current.closed:
        raise Ds4Error(
            "A switch is in progress on this host; nothing was removed",
            found=f"to deployment {current.data['to']}",
            cure=f"wait for it (journalctl -fu {switch.RUNNER}), then run again",
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
    if not os.path.islink(path):
        return False
    target = os.path.join(os.path.dirname(path), os.readlink(path))
    return os.path.normpath(target).startswith((layout.current + "/", layout.deployments + "/"))


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
