# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The rooms of staging, each with its options: entered by a module of its own, or by ``ds4_look`` when all are asked at once."""

from __future__ import annotations

import os
import pwd
from typing import Any

from . import build, exchange, fetch_unit, host_layout, mechanism, weights
from .plan import load
from .space import Need
from .wanted import Care, Outcome, Wanted, build_plan

MIB, GIB = 1024**2, 1024**3
BASE, BUILD = "host_base", "cuda_build"

_DIRECTORY: dict[str, dict[str, Any]] = {
    "path": {"type": "str", "required": True},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str", "default": "root"},
    "mode": {"type": "str", "default": "0755"},
    "purpose": {"type": "str", "required": True},
    "contents": {"type": "str", "choices": ["all", "marked", "keep"], "default": "keep"},
}
BASE_OPTIONS: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "user": {"type": "str", "required": True},
    "group": {"type": "str", "required": True},
    "home": {"type": "str", "required": True},
    "directories": {"type": "list", "elements": "dict", "required": True, "options": _DIRECTORY},
    "lib_dir": {"type": "str", "required": True},
}
BUILD_OPTIONS: dict[str, dict[str, Any]] = {
    "repository": {"type": "str", "default": "https://github.com/Entrpi/ds4.git"},
    "release": {"type": "str", "required": True},
    "commit": {"type": "str", "default": ""},
    "builds_dir": {"type": "path", "required": True},
    "state_dir": {"type": "path", "required": True},
    "lib_dir": {"type": "path", "required": True},
    "user": {"type": "str", "required": True},
    "cuda_home": {"type": "str", "default": ""},
    "nvcc": {"type": "str", "default": ""},
    "cuobjdump": {"type": "str", "default": ""},
    "arch": {"type": "str", "default": "sm_121"},
    "make_target": {"type": "str", "choices": ["cuda-spark", "cuda"], "default": "cuda-spark"},
    "expected_binaries": {"type": "list", "elements": "str", "required": True},
    "expected_sass": {"type": "str", "required": True},
    "jobs": {"type": "int", "default": 0},
    "memory_floor_mib": {"type": "int", "required": True},
    "memory_per_job_mib": {"type": "int", "required": True},
    "timeout_seconds": {"type": "int", "required": True},
    "environment": {"type": "dict", "default": {}, "no_log": True},
    "check_tag_always": {"type": "bool", "default": False},
    "wait_seconds": {"type": "int", "default": 0},
    "following": {"type": "bool", "default": False},
    "unreachable_seconds": {"type": "int", "default": 300},
    "force": {"type": "bool", "default": False},
}
# Options of a build that are no part of its plan.
_ELSEWHERE = ("lib_dir", "check_tag_always", "wait_seconds", "following", "unreachable_seconds")

_FILE: dict[str, dict[str, Any]] = {
    "role": {"type": "str", "required": True},
    "file": {"type": "str", "required": True},
    "repo": {"type": "str", "default": ""},
    "revision": {"type": "str", "default": ""},
    "bytes": {"type": "int", "default": 0},
    "sha256": {"type": "str", "default": ""},
    "sources": {"type": "list", "elements": "str", "default": []},
}
_NEED: dict[str, dict[str, Any]] = {
    "path": {"type": "path", "required": True},
    "bytes": {"type": "int", "required": True},
    "what": {"type": "str", "required": True},
    "present": {"type": "list", "elements": "path", "default": []},
}
WEIGHTS_OPTIONS: dict[str, dict[str, Any]] = {
    "state": {"type": "str", "choices": ["present", "followed", "clean", "absent"], "default": "present"},
    "generation": {"type": "str", "default": ""},
    "files": {"type": "list", "elements": "dict", "default": [], "options": _FILE},
    "known": {"type": "list", "elements": "dict", "default": []},
    "sources": {"type": "list", "elements": "str", "default": ["https://huggingface.co"]},
    "directory": {"type": "path", "required": True},
    "state_directory": {"type": "path", "required": True},
    "library_directory": {"type": "path", "default": "/opt/ds4/lib/current"},
    "bin_directory": {"type": "path", "default": "/usr/local/bin"},
    "python": {"type": "path", "default": "/usr/bin/python3"},
    "user": {"type": "str", "default": "ds4"},
    "group": {"type": "str", "default": "ds4"},
    "fetch": {"type": "bool", "default": True},
    "adopt_paths": {"type": "list", "elements": "path", "default": []},
    "adopt_running": {"type": "bool", "default": True},
    "adopt_move": {"type": "bool", "default": False},
    "connections": {"type": "int", "default": 8},
    "segment_bytes": {"type": "int", "default": 0},
    "stall_seconds": {"type": "float", "default": 30.0},
    "stall_bytes_per_second": {"type": "float", "default": 4096.0},
    "retries": {"type": "int", "default": 10},
    "backoff_seconds": {"type": "float", "default": 1.0},
    "backoff_limit_seconds": {"type": "float", "default": 60.0},
    "deadline_seconds": {"type": "float", "default": 0.0},
    "bandwidth_mib_per_second": {"type": "float", "default": 0.0},
    "proxy_url": {"type": "str", "default": ""},
    "proxy_credentials_file": {"type": "str", "default": ""},
    "no_proxy": {"type": "str", "default": ""},
    "ca_file": {"type": "str", "default": ""},
    "token_file": {"type": "str", "default": "", "no_log": False},
    "token_hosts": {"type": "list", "elements": "str", "default": []},
    "allowed_hosts": {"type": "list", "elements": "str", "default": []},
    "guest": {"type": "str", "choices": ["auto", "always", "never"], "default": "auto"},
    "memory_floor_gib": {"type": "float", "default": 0.0},
    "margin_gib": {"type": "float", "default": 5.0},
    "extra_needs": {"type": "list", "elements": "dict", "default": [], "options": _NEED},
    "mount_change_accepted": {"type": "bool", "default": False},
    "old_generation": {
        "type": "str",
        "choices": ["keep", "remove_after_smoke", "remove_before_fetch"],
        "default": "keep",
    },
    "rollback_waived": {"type": "bool", "default": False},
    "clean_paths": {"type": "list", "elements": "path", "default": []},
    "deployments_directory": {"type": "path", "default": "/opt/ds4/deployments"},
    "current_link": {"type": "path", "default": "/opt/ds4/current"},
    "deployments_state_directory": {"type": "path", "default": "/var/lib/ds4/state"},
    "remove_files": {"type": "bool", "default": False},
    "wait_seconds": {"type": "float", "default": 5.0},
    "started": {"type": "dict"},
    "quiet": {"type": "bool", "default": False},
    "unreachable_seconds": {"type": "int", "default": 300},
}
# Settings that the plan carries under the name of the option.
_PLAN_SETTINGS = (
    "group", "fetch", "connections", "segment_bytes", "stall_seconds", "stall_bytes_per_second", "retries",
    "backoff_seconds", "backoff_limit_seconds", "deadline_seconds", "proxy_url", "proxy_credentials_file", "no_proxy",
    "ca_file", "token_file",
)  # fmt: skip


def prepare(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Compare, apply unless ``check``, and tell."""
    user, group, home = params["user"], params["group"], params["home"]
    wanted = host_layout.plan(user, group, host_layout.parse_directories(params["directories"]))
    before, after = host_layout.describe(wanted)
    if not check:
        host_layout.apply(wanted, user, group, home)
    installed = mechanism.install(params["lib_dir"], check=check)
    if installed.changed:
        before += [f"mechanism {installed.before}"] if installed.before else []
        after.append(f"mechanism {installed.after}")
    changed = wanted.changed or installed.changed
    state = "ok" if not changed else "planned" if check else "changed"
    text = f"prepared, mechanism {installed.after}"
    if changed:
        count = len(after)
        text = (
            f"{'would make' if check else 'made'} {count} change{'s' if count > 1 else ''}, mechanism {installed.after}"
        )
    try:
        entry = pwd.getpwnam(user)
        ids = (entry.pw_uid, entry.pw_gid)
    except KeyError:
        ids = (-1, -1)
    return {
        "changed": changed,
        "user": {"name": user, "uid": ids[0], "gid": ids[1]},
        "mechanism": {"version": installed.after, "path": installed.path},
        "diff": {"before": "".join(f"{line}\n" for line in before), "after": "".join(f"{line}\n" for line in after)},
        "ds4_summary": {"room": BASE, "state": state, "text": text},
    }


def take_away(params: dict[str, Any], check: bool) -> dict[str, Any]:
    """Remove what is ours, unless ``check``, and tell."""
    directories = host_layout.parse_directories(params["directories"])
    removal = host_layout.plan_removal(params["user"], directories, planned=check)
    if not check:
        host_layout.remove(removal, params["group"])
    before = [*removal.gone, *([f"user {removal.user}"] if removal.user else [])]
    state = "ok" if not removal.changed else "planned" if check else "changed"
    text = f"{'would remove' if check else 'removed'} {len(before)} things" if before else "nothing of ours is left"
    if removal.left:
        text += f", left: {'; '.join(removal.left)}"
    return {
        "changed": removal.changed,
        "removed": removal.gone,
        "left": removal.left,
        "diff": {"before": "".join(f"{line}\n" for line in before), "after": ""},
        "ds4_summary": {"room": BASE, "state": state, "text": text},
    }


def build_wanted(options: dict[str, Any]) -> build.Wanted:
    """What the options ask for."""
    params = {name: value for name, value in options.items() if name not in _ELSEWHERE}
    params["environment"] = {name: str(value) for name, value in params["environment"].items()}
    return build.Wanted(**params)


def have_build(options: dict[str, Any], check: bool) -> dict[str, Any]:
    """Have the build, or predict it.

    Raises:
        Ds4Error: what stands in the way. RunningError: it goes on.
    """
    lib = os.path.join(options["lib_dir"], "current")
    outcome = build.ensure(
        build_wanted(options),
        check=check,
        check_tag_always=options["check_tag_always"],
        following=options["following"],
        make=lambda wanted: build.Job(wanted, lib)(options["wait_seconds"], following=options["following"]),
    )
    path = outcome.record.get("path", "")
    appears = outcome.changed and not os.path.exists(path) if outcome.planned else outcome.changed
    state = "planned" if outcome.planned else "changed" if outcome.changed else "ok"
    return {
        "changed": outcome.changed,
        "warnings": outcome.warnings,
        "build": outcome.record,
        "diff": {"before": "", "after": f"{path}\n" if appears else ""},
        "ds4_summary": {
            "room": BUILD,
            "state": state,
            "text": outcome.text,
            "seconds": outcome.record.get("seconds", 0.0) if outcome.changed else 0.0,
        },
    }


def _layout_of(params: dict[str, Any]) -> fetch_unit.Layout:
    """Where things are."""
    return fetch_unit.Layout(
        params["directory"], params["state_directory"], params["library_directory"], params["bin_directory"]
    )


def _wanted_of(params: dict[str, Any]) -> Wanted:
    """What the parameters ask for.

    Raises:
        Ds4Error: it cannot be used.
    """
    layout = _layout_of(params)
    if params["state"] == "followed":
        return Wanted(load(layout.plan), layout)
    plan = build_plan(
        generation=params["generation"],
        files=params["files"],
        sources=params["sources"],
        layout=layout,
        user=params["user"],
        known=params["known"],
        token_hosts=params["token_hosts"],
        allowed_hosts=params["allowed_hosts"],
        adopt=params["adopt_paths"],
        bandwidth_bytes_per_second=params["bandwidth_mib_per_second"] * MIB,
        margin_bytes=int(params["margin_gib"] * GIB),
        **{key: params[key] for key in _PLAN_SETTINGS},
    )
    return Wanted(
        plan,
        layout,
        guest=params["guest"],
        memory_floor_kib=int(params["memory_floor_gib"] * MIB),
        extra_needs=tuple(
            Need(need["path"], need["bytes"], need["what"], tuple(need["present"])) for need in params["extra_needs"]
        ),
        mount_change_accepted=params["mount_change_accepted"],
        adopt_running=params["adopt_running"],
        adopt_move=params["adopt_move"],
        care=Care(
            policy=params["old_generation"],
            rollback_waived=params["rollback_waived"],
            paths=tuple(params["clean_paths"]),
            known=tuple(params["known"]),
            deployments=params["deployments_directory"],
            current=params["current_link"],
            state=params["deployments_state_directory"],
        ),
    )


def have_weights(params: dict[str, Any], check: bool) -> Outcome:
    """Do what the parameters ask for.

    Raises:
        Ds4Error: what stands in the way.
    """
    if params["state"] == "absent":
        return weights.absent(_layout_of(params), remove_files=params["remove_files"], check=check)
    wanted = _wanted_of(params)
    if params["state"] == "present":
        return weights.present(wanted, params["python"], check=check, wait_seconds=params["wait_seconds"])
    if params["state"] == "clean":
        return exchange.clean(wanted, check=check)
    return weights.follow(wanted, params["wait_seconds"])


def settled_base(params: dict[str, Any]) -> dict[str, Any] | None:
    """What :func:`prepare` would return, when it has nothing to do; changes nothing."""
    found = prepare(params, True)
    return None if found["changed"] else found


def settled_build(params: dict[str, Any]) -> dict[str, Any] | None:
    """What :func:`have_build` would return, when it has nothing to do; changes nothing and asks no server."""
    if params["check_tag_always"] or not (params["commit"] or build.recorded_commit(build_wanted(params))):
        return None
    found = have_build(params, True)
    return None if found["changed"] else found


def settled_weights(params: dict[str, Any]) -> dict[str, Any] | None:
    """What :func:`have_weights` would return, when it has nothing to do; changes nothing."""
    outcome = have_weights(params, True)
    left = os.path.exists(_layout_of(params).exchange)  # of an exchange that is not needed any more
    return None if outcome.state != "done" or outcome.result["changed"] or left else outcome.result
