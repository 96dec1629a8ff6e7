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

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import rooms
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=rooms.BASE_OPTIONS, supports_check_mode=True)
    try:
        door = rooms.prepare if module.params["state"] == "present" else rooms.take_away
        result = door(module.params, module.check_mode)
    except Ds4Error as error:
        summary = {"room": rooms.BASE, "state": "failed", "text": error.what}
        module.fail_json(**error.result(), ds4_summary=summary)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
