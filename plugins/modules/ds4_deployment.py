#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.staging, ds4.door and ds4.transaction: deployments of the engine on one host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_deployment
short_description: Stage, activate, roll back, prune and query deployments of the ds4 engine
description:
  - A deployment is build + weights + settings + rendered files, immutable, named by a hash of what the process consumes.
  - O(state=staged) writes one beside whatever serves and tells whether the host must be switched. One round trip does it, or none where
    the action plugin is given what C(ds4_look) found to stand there, and that is what would be staged.
  - O(state=active), O(state=proven) and O(state=rolled_back) run the switch as a transaction of C(ds4-switch.service) on the host, which
    goes on without this module, and follow it. The action plugin of the same name follows it to its end.
options:
  state:
    description:
      - V(staged) writes the deployment in O(deployment). V(active) has O(id) serve; V(proven) also wants it to have passed its
        questions on this host, and to start at boot. A switch that either of them needs only succeeds once it is proven.
        V(rolled_back) switches to O(id), or to the newest proven deployment that does not run. V(pruned) removes deployments and builds beyond O(keep).
        V(absent) stops the service and removes units, links and lock. V(query) only tells.
    type: str
    choices: [staged, active, proven, rolled_back, pruned, absent, query]
    default: query
  layout:
    description: Where things are on the host.
    type: dict
    required: true
    suboptions:
      deployments:
        description: Folder of the deployments.
        type: str
        required: true
      current:
        description: Link to the active one.
        type: str
        required: true
      unit_path:
        description: The unit file.
        type: str
        required: true
      launcher:
        description: The launcher for people.
        type: str
        required: true
      state:
        description: Folder of transactions, evidence and policy.
        type: str
        required: true
      lib:
        description: Folder of the installed mechanism.
        type: str
        required: true
  deployment:
    description: What to stage. Nothing of it is logged on the host, since the environment may hold secrets.
    type: dict
    no_log: true
    suboptions:
      release:
        description: Release tag.
        type: str
        required: true
      profile:
        description: Profile of settings, for people.
        type: str
        default: standard
      build:
        description: Build record (id, path, version, commit, binaries).
        type: dict
        required: true
      weights:
        description: Weights record (generation, files).
        type: dict
        required: true
      args:
        description: Arguments of the server.
        type: list
        elements: str
        required: true
      env:
        description: Environment of the server.
        type: dict
        required: true
      files:
        description: File name to text; C(@DEPLOYMENT@) and C(@HOST_GROUPS@) are filled in.
        type: dict
        required: true
      host:
        description: Address it listens on.
        type: str
        required: true
      port:
        description: TCP port.
        type: int
        required: true
      context:
        description: Served context in tokens.
        type: int
        required: true
      speculation:
        description: A drafter or MTP head is configured, so the smoke test wants drafts.
        type: bool
        default: false
      user:
        description: Account of the service.
        type: str
        required: true
      memory_required_kib:
        description: MemAvailable in KiB that must be there before a start.
        type: int
        required: true
  device_groups:
    description: Groups of GPU devices; those the host has are given to the service.
    type: list
    elements: str
    default: []
  policy:
    description: Limits in seconds (C(limits)), C(memory_residue_gib), C(desktop_programs), C(keep_records) and smoke questions (C(smoke)), kept on the host for the switch.
    type: dict
    default: {}
  helpers:
    description: Further units, file name to text.
    type: dict
    default: {}
  warn:
    description: Warnings about the settings, shown again.
    type: list
    elements: str
    default: []
  id:
    description: Deployment to switch to.
    type: str
    default: ""
  wanted:
    description: Its manifest, for check mode, in which it may not be on the host yet.
    type: dict
    default: {}
  adopt:
    description: Take over an engine that somebody else started.
    type: bool
    default: false
  busy:
    description: Requests in flight. V(wait) waits for them (bounded), V(skip) leaves the host alone, V(cut) ends them.
    type: str
    choices: [wait, skip, cut]
    default: wait
  wait_seconds:
    description: How long one call follows a switch before it answers with C(running=true).
    type: int
    default: 0
  steps_seen:
    description: Answer as soon as more steps than this are finished.
    type: int
    default: 0
  run:
    description: Name of the run that asks; it begins one switch at most, also when the answer that told of it was lost.
    type: str
    default: ""
  transaction:
    description: Id of the switch to follow; empty starts one, or attaches to the open one.
    type: str
    default: ""
  builds_dir:
    description: Folder of the builds, for O(state=pruned).
    type: str
    default: /opt/ds4/builds
  build:
    description: Folder of the build that O(id) needs, for O(state=pruned); in check mode that deployment may not be staged yet.
    type: str
    default: ""
  keep:
    description: How many proven deployments stay; the one that a rollback would take stays in any case.
    type: int
    default: 3
  stop_seconds:
    description: How long the engine may take to stop, for O(state=absent).
    type: int
    default: 300
attributes:
  check_mode:
    description: Nothing is written; tells what would be staged, switched or removed.
    support: full
  diff_mode:
    description: Unit, environment, catalogue, launcher and command line against the active deployment's.
    support: full
  platform:
    description: Linux with systemd 250 or newer.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Which deployment runs, and which are proven
  ds4_deployment:
    layout: "{{ __engine_service_layout }}"
  register: __engine_service_now

- name: Switch to the staged deployment, unless it serves and has passed its questions
  ds4_deployment:
    state: proven
    layout: "{{ __engine_service_layout }}"
    id: "{{ engine_service_result.deployment.id }}"
  register: engine_service_switch_result
"""

RETURN = r"""
deployment:
  description: The deployment and what it would take to serve it.
  returned: when there is one
  type: dict
  sample:
    id: 5f0c7ad1b2e3
    release: v0.6.5
    path: /opt/ds4/deployments/5f0c7ad1b2e3
    url: http://127.0.0.1:8000
    serves: false
    needs_switch: true
    reasons: ["the process 4711 runs deployment 0a1b2c3d4e5f, wanted 5f0c7ad1b2e3"]
    current: 0a1b2c3d4e5f
    proven: [0a1b2c3d4e5f]
    drop_ins: []
wanted:
  description: Manifest of the staged deployment, see docs/schemas/deployment.schema.json; values of secrets are hidden.
  returned: state staged
  type: dict
transaction:
  description: Record of the switch, see docs/schemas/transaction.schema.json.
  returned: when a switch was requested, followed or queried
  type: dict
running:
  description: The switch goes on; call again to follow it.
  returned: state active, proven or rolled_back
  type: bool
  sample: false
skipped_busy:
  description: The host was left alone, since requests were in flight and O(busy=skip).
  returned: when so
  type: bool
  sample: true
history:
  description: Deployments proven on this host, newest first.
  returned: state query
  type: list
  elements: dict
service:
  description: What serves now, read from the process itself, and a few of its metrics.
  returned: state query
  type: dict
  sample:
    state: active
    enabled: true
    pid: 4711
    deployment: 5f0c7ad1b2e3
    version: v0.6.5
    answers: true
    metrics: {ds4_banks_total: 6, ds4_requests_inflight: 0}
manifest:
  description:
    - Manifest of the deployment that serves, or of the one that is linked, see docs/schemas/deployment.schema.json; values of
      secrets are hidden.
  returned: state query, when there is one
  type: dict
problems:
  description: What is missing of that deployment on disk.
  returned: state query, when there is one
  type: list
  elements: str
  sample: []
removed:
  description: Paths that were (in check mode, would be) removed, by kind.
  returned: state pruned or absent
  type: dict
  sample: {deployments: [], builds: [/opt/ds4/builds/v0.6.3-1a2b3c4d]}
ds4_summary:
  description: One line for the table.
  returned: always, except state pruned
  type: dict
  sample: {room: engine_service, state: changed, text: v0.6.5 serves; down 4.1 s}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import deployment as store
from ansible.module_utils.ds4 import door, staging, transaction
from ansible.module_utils.ds4.deployment import Layout
from ansible.module_utils.ds4.errors import Ds4Error
from ansible.module_utils.ds4.service import Service

SPEC = {
    "state": {
        "type": "str",
        "choices": ["staged", "active", "proven", "rolled_back", "pruned", "absent", "query"],
        "default": "query",
    },
    **staging.OPTIONS,
    "warn": {"type": "list", "elements": "str", "default": []},
    "id": {"type": "str", "default": ""},
    "wanted": {"type": "dict", "default": {}},
    "adopt": {"type": "bool", "default": False},
    "busy": {"type": "str", "choices": ["wait", "skip", "cut"], "default": "wait"},
    "wait_seconds": {"type": "int", "default": 0},
    "steps_seen": {"type": "int", "default": 0},
    "run": {"type": "str", "default": ""},
    "transaction": {"type": "str", "default": ""},
    "builds_dir": {"type": "str", "default": "/opt/ds4/builds"},
    "build": {"type": "str", "default": ""},
    "keep": {"type": "int", "default": 3},
    "stop_seconds": {"type": "int", "default": 300},
}


def summary(state: str, text: str, **numbers: Any) -> dict[str, Any]:
    return {"room": staging.ROOM, "state": state, "text": text, **numbers}


def switched(module: AnsibleModule, layout: Layout) -> dict[str, Any]:
    params = module.params
    served = params["state"] == "active"
    followed = transaction.find_record(layout, params["transaction"]) if params["transaction"] else None
    followed = followed or transaction.record_of_run(
        layout, params["run"]
    )  # the answer that named it may have been lost
    if followed is not None and params["state"] == "rolled_back":
        # Once it runs, the newest proven deployment that does not run is another one.
        manifest, reason = door.wanted_manifest(layout, followed.data["to"]), "rollback"
    elif params["state"] == "rolled_back":
        manifest, reason = door.rollback_target(layout, params["id"]), "rollback"
    elif module.check_mode and layout.manifest(params["id"]) is None and params["wanted"]:
        manifest, reason = params["wanted"], "activate"
    else:
        manifest, reason = door.wanted_manifest(layout, params["id"]), "activate"
    if module.check_mode:
        told = staging.describe(layout, manifest)
        due = staging.takes_switch(told, served=served)
        text = f"would switch to {told['release']} ({told['id']})" if due else "serves already"
        others, lost = door.would_adopt(layout, manifest) if params["adopt"] else ("", [])
        if others:
            text += f", taking over {others}"
        if lost:
            module.warn("The engine that would be taken over has settings that ours has not: " + ", ".join(lost))
        return {
            "changed": due,
            "running": False,
            "deployment": told,
            "ds4_summary": summary("planned" if due else "ok", text),
        }
    record = door.activate(
        layout,
        manifest,
        {"adopt": params["adopt"], "busy": params["busy"], "run": params["run"]},
        reason,
        wait_seconds=params["wait_seconds"],
        seen=params["steps_seen"],
        transaction=params["transaction"],
        served=served,
    )
    told = staging.describe(layout, manifest)
    if record is None:
        text = f"{told['release']} serves as {told['id']}"
        return {"changed": False, "running": False, "deployment": told, "ds4_summary": summary("ok", text)}
    if not record["outcome"]:
        return {"changed": True, "running": True, "deployment": told, "transaction": record}
    return judged(module, layout, manifest, told, record)


def judged(
    module: AnsibleModule, layout: Layout, manifest: dict[str, Any], told: dict[str, Any], record: dict[str, Any]
) -> dict[str, Any]:
    """A finished transaction: proven is success, a skipped host is told, everything else fails."""
    down = record["downtime_seconds"]
    numbers = {"downtime_seconds": down, "outcome": record["outcome"]}
    answer = {"running": False, "deployment": told, "transaction": record}
    if record["to"] != manifest["id"]:  # somebody else's switch has ended: now ours
        return {"changed": True, **answer, "running": True, "transaction": None}
    if record["outcome"] == "proven":
        for note in door.adopted(layout, manifest, record):
            module.warn(note)
        text = f"{manifest['release']} serves as {manifest['id']}"
        if down is not None:
            text += f"; down {down:g} s"
        return {"changed": True, **answer, "ds4_summary": summary("changed", text, **numbers)}
    if record["outcome"] == "skipped":
        told_so = summary("skipped", record["message"], **numbers)
        return {"changed": False, "skipped_busy": True, **answer, "ds4_summary": told_so}
    failure = record["failure"] or {}
    serving = record["serving"]
    if serving == "foreign":
        now = "the old process " + ("runs, but was not seen to answer" if record["outcome"] == "stopped" else "serves")
    elif serving:
        now = f"deployment {serving} serves"
    else:
        now = "no deployment serves" if record["outcome"] == "refused" else "NOTHING serves"
    message = f"{record['outcome'].upper()}: {record['message']} Now: {now}. Evidence on the host: {record['evidence']}"
    if failure.get("cure"):
        message += f" Cure: {failure['cure']}."
    module.fail_json(
        msg=message,
        error=failure,
        changed=record["stopped_at"] is not None,
        **answer,
        ds4_summary=summary("failed", f"{record['outcome']}: {record['message']}", **numbers),
    )
    raise AssertionError("fail_json returns never")


def pruned(module: AnsibleModule, layout: Layout) -> dict[str, Any]:
    params = module.params
    running = store.running_deployment(Service(layout.unit).state())
    linked = layout.current_id()
    in_use = {name for name in (running, linked, params["id"]) if name}
    plan = store.prune_plan(
        layout,
        params["builds_dir"],
        params["keep"],
        in_use,
        params["id"],
        params["build"],
        ahead=module.check_mode,
    )
    count = sum(map(len, plan.values()))
    if count and not module.check_mode:
        store.prune(layout, plan)
    return {"changed": bool(count), "removed": plan}


def taken_away(module: AnsibleModule, layout: Layout) -> dict[str, Any]:
    helpers = sorted(module.params["helpers"])
    paths = door.absent(layout, helpers, module.params["stop_seconds"], check=module.check_mode)
    verb = "would stop the service and remove" if module.check_mode else "stopped the service and removed"
    text = f"{verb} {', '.join(paths)}" if paths else "nothing of ours was installed"
    state = ("planned" if module.check_mode else "changed") if paths else "ok"
    return {"changed": bool(paths), "removed": {"files": paths}, "ds4_summary": summary(state, text)}


def queried(layout: Layout) -> dict[str, Any]:
    last = transaction.last_record(layout)
    now = door.serving(layout)
    result: dict[str, Any] = {
        "changed": False,
        "history": store.history(layout),
        "transaction": last.data if last else None,
        "service": now,
    }
    manifest = layout.manifest(now["deployment"]) or layout.manifest(layout.current_id())
    if manifest:
        result["deployment"] = staging.describe(layout, manifest)
        result["manifest"] = store.shown(manifest)
        result["problems"] = store.problems(manifest)
    text = (
        f"{now['version'] or manifest['release']} ({now['deployment']})"
        if manifest and now["deployment"]
        else now["state"]
    )
    result["ds4_summary"] = summary("ok", text)
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec=SPEC,
        supports_check_mode=True,
        required_if=[("state", "staged", ["deployment"]), ("state", "active", ["id"]), ("state", "proven", ["id"])],
    )
    layout = Layout(**module.params["layout"])
    # The engine's environment may hold secrets, so the host's log gets none of it (no_log), nor does the record of the call. In
    # results only what bears the name of a secret is hidden: Ansible would hide every "1" and "0" that some variable is set to.
    wanted, module.params["deployment"] = module.params["deployment"], None
    module.no_log_values.clear()
    try:
        if module.params["state"] == "staged":
            result = staging.have_staged(
                {**module.params, "deployment": wanted}, module.params["warn"], check=module.check_mode
            )
        elif module.params["state"] == "pruned":
            result = pruned(module, layout)
        elif module.params["state"] == "absent":
            result = taken_away(module, layout)
        elif module.params["state"] == "query":
            result = queried(layout)
        else:
            result = switched(module, layout)
    except Ds4Error as error:
        module.fail_json(**error.result(), ds4_summary=summary("failed", error.what))
    for text in result.pop("warnings", []):
        module.warn(text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
