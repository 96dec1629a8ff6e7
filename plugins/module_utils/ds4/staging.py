# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Puts a deployment beside whatever serves, with the policy and the units of the switch, and tells whether it takes a switch.

Most runs change nothing. So a host tells what stands there (``standing``) together with everything else it is asked, and the
controller, which renders the texts anyway, sees by one fingerprint whether that is what it would stage (``stands``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import deployment as store
from . import systemd_text, transaction
from .command import run
from .deployment import Layout, Wanted
from .errors import Ds4Error
from .files import MARKER_LINE, digest, is_ours, is_written, read_json, read_text, write_atomic, write_json
from .service import Service, State

UNITS = "/etc/systemd/system"
ROOM = "engine_service"

LAYOUT_OPTIONS: dict[str, dict[str, Any]] = {name: {"type": "str", "required": True} for name in Layout._fields}
DEPLOYMENT_OPTIONS: dict[str, dict[str, Any]] = {
    "release": {"type": "str", "required": True},
    "profile": {"type": "str", "default": "standard"},
    "build": {"type": "dict", "required": True},
    "weights": {"type": "dict", "required": True},
    "args": {"type": "list", "elements": "str", "required": True},
    "env": {"type": "dict", "required": True},
    "files": {"type": "dict", "required": True},
    "host": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "context": {"type": "int", "required": True},
    "speculation": {"type": "bool", "default": False},
    "user": {"type": "str", "required": True},
    "memory_required_kib": {"type": "int", "required": True},
}
# What staging needs of a task.
OPTIONS: dict[str, dict[str, Any]] = {
    "layout": {"type": "dict", "required": True, "options": LAYOUT_OPTIONS},
    "deployment": {"type": "dict", "options": DEPLOYMENT_OPTIONS, "no_log": True},
    "device_groups": {"type": "list", "elements": "str", "default": []},
    "policy": {"type": "dict", "default": {}},
    "helpers": {"type": "dict", "default": {}},
}
# What a host is asked that shall tell what stands there.
STANDING_OPTIONS: dict[str, dict[str, Any]] = {
    "layout": OPTIONS["layout"],
    "device_groups": OPTIONS["device_groups"],
    "helpers": {"type": "list", "elements": "str", "default": []},
}


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
        if is_written(path, text) and ("[Install]" not in text or Service(name).state().enabled):
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
    wanted = _policy_record(layout, policy)
    if read_json(_policy_path(layout)) == wanted:
        return False
    if not check:
        write_json(_policy_path(layout), wanted)
    return True


def _policy_path(layout: Layout) -> str:
    return os.path.join(layout.state, "policy.json")


def _policy_record(layout: Layout, policy: Mapping[str, Any]) -> dict[str, Any]:
    return {"schema": 1, "layout": layout._asdict(), **policy}


def describe(layout: Layout, manifest: Mapping[str, Any], state: State | None = None) -> dict[str, Any]:
    """A deployment and what it would take to have it ``proven``: ``needs_switch`` with the reasons, what runs, what is proven."""
    state = state or Service(layout.unit).state()
    reasons = store.drift(manifest, layout, state)
    unfinished = transaction.open_record(layout) is not None
    serves = not reasons and not unfinished
    if not reasons and manifest["id"] not in store.proven(layout):
        reasons = [f"deployment {manifest['id']} runs, but is not proven"]
    if not reasons and not state.enabled:
        reasons = ["it does not start at boot"]  # being proven anew enables it; nothing is restarted
    if unfinished:
        reasons.append("a switch of this host is unfinished")
    return {
        "id": manifest["id"],
        "release": manifest["release"],
        "path": layout.directory(manifest["id"]),
        "url": f"http://{manifest['service']['host']}:{manifest['service']['port']}",
        "serves": serves,
        "needs_switch": bool(reasons),
        "reasons": reasons,
        "current": store.running_deployment(state) if state.running else "",
        "proven": store.proven(layout),
        "drop_ins": [path for path in state.drop_ins if f"/{layout.unit}.d/" in path],
    }


def takes_switch(told: Mapping[str, Any], *, served: bool = False) -> bool:
    """Whether a deployment, as ``describe`` tells it, must be switched to; with ``served`` it need not be proven."""
    return bool(told["needs_switch"]) and not (served and told["serves"])


def have_staged(params: Mapping[str, Any], warn: list[str], *, check: bool) -> dict[str, Any]:
    """Write the deployment, the policy and the helper units beside what serves, and tell.

    Args:
        params: as in ``OPTIONS``.
        warn: about the settings, to be shown again.
        check: only tell what would change.

    Raises:
        Ds4Error: what stands in the way.
    """
    layout, wanted = _asked(params)
    staged = store.stage(wanted, layout, params["device_groups"], check=check)
    changed = ["deployment"] if staged.changed else []
    changed += install_helpers(params["helpers"], check=check)
    if keep_policy(layout, params["policy"], check=check):
        changed.append("policy")
    changed += refresh(staged.manifest, staged.texts[layout.unit], layout, check=check)
    told = describe(layout, staged.manifest)
    diff = [
        {
            "before_header": f"active: {name}",
            "after_header": f"{told['id']}: {name}",
            "before": staged.before[name],
            "after": staged.after[name],
        }
        for name in sorted(staged.after)
    ]
    shown = store.shown(staged.manifest, layout.manifest(layout.current_id()))
    return {**_answer(layout, told, warn, changed, check=check), "wanted": shown, "diff": diff if changed else []}


def standing(params: Mapping[str, Any]) -> dict[str, Any]:
    """What stands on the host, for ``stands``; nothing when it needs a hand in any case. Params as in ``STANDING_OPTIONS``."""
    layout = Layout(**params["layout"])
    manifest = layout.manifest(layout.current_id())
    if manifest is None or not is_ours(layout.directory(manifest["id"])):
        return {}
    state = Service(layout.unit).state()
    told = describe(layout, manifest, state)
    texts = {name: read_text(os.path.join(told["path"], name)) for name in manifest["files"]}
    if (
        told["needs_switch"]
        or store.worn(layout, manifest, texts)
        or refresh(manifest, texts[layout.unit], layout, check=True)
    ):
        return {}
    helpers = {name: read_text(os.path.join(UNITS, name)) for name in params["helpers"]}
    if not all(is_written(os.path.join(UNITS, name), text) for name, text in helpers.items()):
        return {}
    if any("[Install]" in text and not Service(name).state().enabled for name, text in helpers.items()):
        return {}
    policy = read_json(_policy_path(layout))
    return {
        "deployment": told,
        "groups": store.existing_groups(params["device_groups"]),
        "fingerprint": digest(manifest, texts, helpers, policy),
    }


def stands(params: Mapping[str, Any], warn: list[str], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``have_staged`` would return when ``found`` (by ``standing``) is just what would be staged, else None."""
    layout, wanted = _asked(params)
    manifest, texts = store.compose(wanted, layout.unit, str(found.get("groups", "")))
    if digest(manifest, texts, params["helpers"], _policy_record(layout, params["policy"])) != found.get("fingerprint"):
        return None
    answer = _answer(layout, dict(found["deployment"]), warn, [], check=False)
    return {**answer, "wanted": store.shown(manifest, manifest), "diff": []}


def _asked(params: Mapping[str, Any]) -> tuple[Layout, Wanted]:
    given = dict(params["deployment"])
    given["env"] = {name: str(value) for name, value in given["env"].items()}
    return Layout(**params["layout"]), Wanted(**given)


def _answer(
    layout: Layout, told: dict[str, Any], warn: list[str], changed: list[str], *, check: bool
) -> dict[str, Any]:
    warnings = list(warn)
    if told["drop_ins"]:
        warnings.append(f"{layout.unit} has drop-ins that are not ours and stay: {', '.join(told['drop_ins'])}")
    if told["needs_switch"]:
        text = f"{told['release']} staged as {told['id']}; to switch: {told['reasons'][0]}"
    else:
        text = f"{told['release']} serves as {told['id']}"
    state = ("planned" if check else "changed") if changed else "ok"
    return {
        "changed": bool(changed),
        "changes": changed,
        "deployment": told,
        "warnings": warnings,
        "ds4_summary": {"room": ROOM, "state": state, "text": text},
    }


def refresh(manifest: Mapping[str, Any], unit: str, layout: Layout, *, check: bool = False) -> list[str]:
    """Put right what needs no restart on a host whose unit is the deployment's already: returns what.

    A new comment, owner or mode is given to the installed unit, systemd reads it, and links lead there again. Nothing while a
    switch is open: what is installed is its matter then.

    Args:
        unit: text that the installed unit should have.
    """
    installed = read_text(layout.unit_path)
    service = Service(layout.unit)
    same = installed and systemd_text.directives(installed) == systemd_text.directives(unit)
    if not same or transaction.open_record(layout) is not None:
        return []
    changed = store.link(manifest, layout, check=check)
    if not is_written(layout.unit_path, unit):
        changed.append(layout.unit_path)
        if not check:
            write_atomic(layout.unit_path, unit)
    elif service.state().needs_reload:
        changed.append("daemon-reload")
    if changed and not check:
        service.reload_manager()
    return changed
