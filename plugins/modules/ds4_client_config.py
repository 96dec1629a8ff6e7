#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.clients."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_client_config
short_description: Configure coding agents for a served Spark
description:
  - Writes configuration for Codex, Claude Code (a wrapper command), opencode and Pi below a folder.
  - Merges with what is there. In files of the user's only keys of ours are touched, comments and layout stay, the file is
    backed up, and what a key of ours replaces comes back when it is removed.
  - Reads and writes files only; no client needs to be installed.
options:
  root:
    description: Folder to write below. C(~) is the home of the user that the module runs as.
    type: str
    required: true
  layout:
    description: Whether O(root) is a user's home, or a folder that holds one folder for each client.
    type: str
    choices: [home, folder]
    default: home
  provider:
    description: Id of the provider in every client. Several Sparks need several.
    type: str
    default: ds4
  state:
    description: V(absent) removes exactly what was written for O(provider).
    type: str
    choices: [present, absent]
    default: present
  label:
    description: Name that people read in the clients.
    type: str
    default: ds4
  url:
    description: Address of the service without C(/v1), such as V(http://spark.local:8000). Needed for V(present).
    type: str
    default: ""
  model:
    description: Id of the served model.
    type: str
    default: deepseek-v4-flash
  context:
    description: Served context in tokens, as C(/v1/models) reports it. Needed for V(present).
    type: int
    default: 0
  max_output:
    description: Longest answer in tokens. 0 means three quarters of the context.
    type: int
    default: 0
  catalogue:
    description: Text of the Codex catalogue that the engine serves. One is made from O(context) when empty.
    type: str
    default: ""
  instructions:
    description: Base instructions for Codex that replace those of the catalogue. Empty keeps them.
    type: str
    default: ""
  clients:
    description: Clients to configure. Files of the others are removed.
    type: list
    elements: str
    choices: [codex, claude, opencode, pi]
    default: [codex, claude, opencode, pi]
  make_default:
    description: Make this Spark what Codex, opencode and Pi use when nothing else is asked for.
    type: bool
    default: false
  codex_catalogue:
    description:
      - V(file) writes the catalogue beside Codex' configuration, which releases 0.144.1 and 0.171.0 both read.
      - V(served) lets Codex ask the engine at every start. This needs a Codex that knows C(model_catalog_url).
    type: str
    choices: [file, served]
    default: file
  backup:
    description: Keep a copy of each changed file that a user wrote in.
    type: bool
    default: true
attributes:
  check_mode:
    description: Predicts every file.
    support: full
  diff_mode:
    description: Shows what changes in every file, and of files that a user wrote no value but those of this module.
    support: full
  platform:
    description: Any POSIX system with Python 3.9 or newer.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Configure all four agents of the connected user
  ds4_client_config:
    root: "~"
    url: http://spark.local:8000
    label: ds4 on spark
    context: 524288

- name: Take it all away again
  ds4_client_config:
    root: "~"
    state: absent
"""

RETURN = r"""
files:
  description: Files of ours, or with keys of ours.
  returned: always
  type: list
  elements: str
  sample: [/home/me/.codex/config.toml]
backups:
  description: Copies of changed files that a user wrote in.
  returned: always
  type: list
  elements: str
  sample: [/home/me/.codex/config.toml.before-ds4-20261129T120000Z]
endpoint:
  description: What was written, for use on other hosts.
  returned: when O(state=present)
  type: dict
  sample: {label: ds4 on spark, url: "http://spark.local:8000", model: deepseek-v4-flash, context: 524288, max_output: 384000}
ds4_summary:
  description: One line for the table at the end of a run.
  returned: always
  type: dict
  sample: {room: agent_clients, state: changed, text: "codex, claude, opencode, pi for 524288 tokens"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import clients
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "str", "required": True},
            "layout": {"type": "str", "choices": ["home", "folder"], "default": "home"},
            "provider": {"type": "str", "default": "ds4"},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "label": {"type": "str", "default": "ds4"},
            "url": {"type": "str", "default": ""},
            "model": {"type": "str", "default": clients.MODEL_ID},
            "context": {"type": "int", "default": 0},
            "max_output": {"type": "int", "default": 0},
            "catalogue": {"type": "str", "default": ""},
            "instructions": {"type": "str", "default": ""},
            "clients": {
                "type": "list",
                "elements": "str",
                "choices": list(clients.CLIENTS),
                "default": list(clients.CLIENTS),
            },
            "make_default": {"type": "bool", "default": False},
            "codex_catalogue": {"type": "str", "choices": ["file", "served"], "default": "file"},
            "backup": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    present = wanted["state"] == "present"
    result = {}
    try:
        target = None
        if present:
            if not wanted["url"] or wanted["context"] < 1:
                raise Ds4Error(
                    "Clients cannot be configured without an address and a context",
                    found=f"url {wanted['url']!r}, context {wanted['context']}",
                    required="the address of a served Spark and its context in tokens",
                    cure="give url and context",
                )
            target = clients.endpoint(
                wanted["provider"],
                wanted["label"],
                wanted["url"],
                wanted["context"],
                max_output=wanted["max_output"],
                catalogue=wanted["catalogue"],
                instructions=wanted["instructions"],
                model=wanted["model"],
            )
            names = ("label", "url", "model", "context", "max_output", "catalogue")
            result["endpoint"] = {name: getattr(target, name) for name in names}
        result.update(
            clients.configure(
                wanted["root"],
                wanted["layout"],
                wanted["provider"],
                target,
                wanted["clients"],
                default=wanted["make_default"],
                served_catalogue=wanted["codex_catalogue"] == "served",
                backup=wanted["backup"],
                check=module.check_mode,
            )
        )
    except Ds4Error as error:
        summary = {"room": "agent_clients", "state": "failed", "text": error.what}
        module.fail_json(ds4_summary=summary, **error.result())
    except OSError as error:
        summary = {"room": "agent_clients", "state": "failed", "text": str(error)}
        module.fail_json(msg=f"Configuration of the clients cannot be written: {error}", ds4_summary=summary)
    if not module._diff:
        del result["diff"]
    state = "ok" if not result["changed"] else "planned" if module.check_mode else "changed"
    text = f"{', '.join(wanted['clients'])} for {wanted['context']} tokens" if present else "removed"
    if result["backups"]:
        text += f"; copies kept of {len(result['backups'])} changed files"
    module.exit_json(ds4_summary={"room": "agent_clients", "state": state, "text": text}, **result)


if __name__ == "__main__":
    main()
