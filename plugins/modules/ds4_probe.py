#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.probe."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_probe
short_description: Ask a served ds4 engine what it must be able to answer
description:
  - Asks the running service over HTTP, past any proxy, and judges model id, answers, finish reasons, all four APIs, a
    streamed answer, speculation, and the log of this start.
  - The deployment that serves tells address, port and whether a drafter is configured; O(host) and O(port) ask any server.
  - Changes nothing but its own transcript.
options:
  state_dir:
    description: State directory of the host. The transcript goes into C(evidence) below it.
    type: path
    default: /var/lib/ds4/state
  host:
    description: Address to ask instead of the deployment's. Log and speculation are then not judged.
    type: str
    default: ""
  port:
    description: Port to ask, with O(host).
    type: int
    default: 8000
  model:
    description: Model id that must be listed and that is asked.
    type: str
    default: deepseek-v4-flash
  questions:
    description:
      - Questions with C(name), C(api) (chat, completions, responses or messages), C(prompt), C(expect), C(finish),
        C(max_tokens), C(temperature) and C(stream).
    type: list
    elements: dict
    required: true
  timeout_seconds:
    description: Limit of one question.
    type: int
    default: 120
  total_seconds:
    description: Limit of all questions.
    type: int
    default: 300
  speculation:
    description: With a drafter configured, drafts must be counted while the questions are answered.
    type: bool
    default: true
  forbidden_log:
    description: Strings that the log of this start must not contain.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Not asked in check mode, since the service may not be there yet; says so.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Linux with systemd 250 or newer.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Ask for the capital of France
  ds4_probe:
    questions:
      - {name: capital, api: chat, prompt: "What is the capital of France?", expect: Paris}
"""

RETURN = r"""
checks:
  description: What was judged, in order.
  returned: when asked
  type: list
  elements: dict
  sample: [{name: capital of France, ok: true, text: The capital of France is Paris.}]
seconds:
  description: How long all of it took.
  returned: when asked
  type: float
  sample: 3.2
transcript:
  description: File on the host with questions and answers.
  returned: when asked about the deployment that serves
  type: path
  sample: /var/lib/ds4/state/evidence/smoke.json
ds4_summary:
  description: One line for the table.
  returned: always
  type: dict
  sample: {room: smoke_test, state: ok, text: 8 checks in 3.2 s}
"""

import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import deployment, probe
from ansible.module_utils.ds4.errors import Ds4Error
from ansible.module_utils.ds4.files import read_json, write_json
from ansible.module_utils.ds4.service import Service

SPEC = {
    "state_dir": {"type": "path", "default": "/var/lib/ds4/state"},
    "host": {"type": "str", "default": ""},
    "port": {"type": "int", "default": 8000},
    "model": {"type": "str", "default": "deepseek-v4-flash"},
    "questions": {"type": "list", "elements": "dict", "required": True},
    "timeout_seconds": {"type": "int", "default": 120},
    "total_seconds": {"type": "int", "default": 300},
    "speculation": {"type": "bool", "default": True},
    "forbidden_log": {"type": "list", "elements": "str", "default": []},
}


def served(state_dir: str) -> tuple[dict[str, Any], str]:
    """Manifest of the deployment that runs, and the log of its start.

    Raises:
        Ds4Error: nothing of ours runs.
    """
    policy = read_json(os.path.join(state_dir, "policy.json"))
    found = "nothing was ever staged here"
    if isinstance(policy, dict):
        layout = deployment.Layout(**policy["layout"])
        service = Service(layout.unit)
        state = service.state()
        manifest = layout.manifest(deployment.running_deployment(state))
        if manifest is not None:
            return manifest, service.journal(state.invocation, 5000)
        found = f"{layout.unit}: {state.describe()}"
    raise Ds4Error(
        "No deployment of ours serves on this host",
        found=found,
        required="a running service",
        cure="run site.yml; `systemctl status ds4` and `journalctl -u ds4` on the host tell more",
    )


def main() -> None:
    module = AnsibleModule(argument_spec=SPEC, supports_check_mode=True)
    params = module.params
    if module.check_mode:
        module.exit_json(
            changed=False,
            ds4_summary={"room": "smoke_test", "state": "planned", "text": f"{len(params['questions'])} questions"},
        )
    try:
        service, journal = {"host": params["host"], "port": params["port"], "speculation": False}, ""
        if not params["host"]:
            manifest, journal = served(params["state_dir"])
            service = manifest["service"]
        result = probe.smoke(
            service["host"],
            service["port"],
            model=params["model"],
            questions=params["questions"],
            timeout_seconds=params["timeout_seconds"],
            total_seconds=params["total_seconds"],
            speculation=params["speculation"] and service["speculation"],
            forbidden_log=[] if params["host"] else params["forbidden_log"],
            journal=journal,
        )
    except Ds4Error as error:
        module.fail_json(**error.result(), ds4_summary={"room": "smoke_test", "state": "failed", "text": error.what})
    answer: dict[str, Any] = {
        "checks": [check._asdict() for check in result.checks],
        "seconds": round(result.seconds, 2),
    }
    if not params["host"]:
        folder = os.path.join(params["state_dir"], "evidence")
        os.makedirs(folder, mode=0o755, exist_ok=True)
        answer["transcript"] = os.path.join(folder, "smoke.json")
        write_json(answer["transcript"], result.transcript)
    if not result.ok:
        text = "; ".join(result.failures)
        module.fail_json(
            msg=f"The service answers, but not as it must. Found: {text}. Evidence on the host: {answer.get('transcript', '')}",
            **answer,
            ds4_summary={"room": "smoke_test", "state": "failed", "text": result.failures[0]},
        )
    text = f"{len(result.checks)} checks in {result.seconds:.1f} s"
    module.exit_json(changed=False, **answer, ds4_summary={"room": "smoke_test", "state": "ok", "text": text})


if __name__ == "__main__":
    main()
