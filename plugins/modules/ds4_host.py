#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.host_layout and ds4.mechanism."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_host
short_description: User, directories and mechanism that every other step stands on
description:
  - Creates the system user and the directories of ds4-fleet, each bearing its marker, and installs the mechanism (the
    Python package C(ds4)) that systemd units enter.
  - Never takes over something of the same name that ds4-fleet did not make. All such things are reported in one message.
  - Adopts an empty directory, as a freshly mounted file system is.
  - Removes all of that again, and nothing else, with O(state=absent).
options:
  state:
    description:
      - V(absent) removes the directories as far as their O(directories[].contents) allow, and the user when nothing of ours
        is left. Directories that were adopted stay, with the owner and mode that they had.
    type: str
    choices: [present, absent]
    default: present
  user:
    description: System user that builds, fetches and serves.
    type: str
    required: true
  group:
    description: Primary group of O(user). An existing group is used as it is.
    type: str
    required: true
  home:
    description: Home directory for O(user) when it has to be created. The directory itself comes from O(directories).
    type: str
    required: true
  directories:
    description: Directories to have.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path. Missing parents are made with mode 0755.
        type: str
        required: true
      owner:
        description: Owner of the directory. What lies in it is left alone.
        type: str
        default: root
      group:
        description: Group of the directory.
        type: str
        default: root
      mode:
        description: Octal mode.
        type: str
        default: '0755'
      purpose:
        description: What the directory is for. It is written into the marker.
        type: str
        required: true
      contents:
        description:
          - What of its content goes with O(state=absent). V(marked) is folders that bear our marker, and links to them.
          - A directory with content that stays is left.
        type: str
        choices: [all, marked, keep]
        default: keep
  lib_dir:
    description: Which of O(directories) holds the versions of the mechanism. Units use its link C(current).
    type: str
    required: true
attributes:
  check_mode:
    description: Predicts every change and finds everything that is not ours.
    support: full
  diff_mode:
    description: Accounts, directories and the version of the mechanism, one line each.
    support: full
  platform:
    description: Linux with useradd and groupadd.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Remove what was made, but not the conversations
  ds4_host:
    state: absent
    user: ds4
    group: ds4
    home: /var/lib/ds4
    lib_dir: /opt/ds4/lib
    directories:
      - {path: /opt/ds4, purpose: everything that can be made again, contents: marked}
      - {path: /opt/ds4/lib, purpose: versions of the mechanism, contents: marked}
      - {path: /var/lib/ds4/kv, purpose: conversations kept by the engine, contents: keep}

- name: Prepare the host
  ds4_host:
    user: ds4
    group: ds4
    home: /var/lib/ds4
    lib_dir: /opt/ds4/lib
    directories:
      - {path: /opt/ds4, purpose: everything that can be made again}
      - {path: /opt/ds4/lib, purpose: versions of the mechanism}
      - {path: /var/lib/ds4, purpose: everything that cannot}
      - {path: /var/lib/ds4/kv, owner: ds4, group: ds4, mode: '0700', purpose: conversations kept by the engine}
  register: host_base_result
"""

RETURN = r"""
user:
  description: Name, uid and gid of the system user. Uid and gid are -1 in check mode while it does not exist.
  returned: O(state=present)
  type: dict
  sample: {name: ds4, uid: 996, gid: 996}
mechanism:
  description: Version (a hash of the sources) and the folder for PYTHONPATH.
  returned: O(state=present)
  type: dict
  sample: {version: 3f2b9c0d11aa, path: /opt/ds4/lib/current}
removed:
  description: Paths that were (or would be) removed.
  returned: O(state=absent)
  type: list
  elements: str
left:
  description: Directories that stay, with the reason.
  returned: O(state=absent)
  type: list
  elements: str
ds4_summary:
  description: Line for the table at the end.
  returned: always
  type: dict
  sample: {room: host_base, state: ok, text: prepared, mechanism 3f2b9c0d11aa}
"""

import pwd
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import host_layout, mechanism
from ansible.module_utils.ds4.errors import Ds4Error

ROOM = "host_base"


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
        "ds4_summary": {"room": ROOM, "state": state, "text": text},
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
        "ds4_summary": {"room": ROOM, "state": state, "text": text},
    }


def main() -> None:
    """Entry point."""
    directory = {
        "path": {"type": "str", "required": True},
        "owner": {"type": "str", "default": "root"},
        "group": {"type": "str", "default": "root"},
        "mode": {"type": "str", "default": "0755"},
        "purpose": {"type": "str", "required": True},
        "contents": {"type": "str", "choices": ["all", "marked", "keep"], "default": "keep"},
    }
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "user": {"type": "str", "required": True},
            "group": {"type": "str", "required": True},
            "home": {"type": "str", "required": True},
            "directories": {"type": "list", "elements": "dict", "required": True, "options": directory},
            "lib_dir": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        door = prepare if module.params["state"] == "present" else take_away
        result = door(module.params, module.check_mode)
    except Ds4Error as error:
        summary = {"room": ROOM, "state": "failed", "text": error.what}
        module.fail_json(**error.result(), ds4_summary=summary)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
