#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.weights."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_weights
short_description: Weights of one generation on a host, verified by sha256
description:
  - Compares what is wanted with the records of what was verified. When nothing is missing it reads nothing else and
    changes nothing.
  - Otherwise it writes a plan and starts C(ds4-fetch.service) on the host, or attaches to the one at work. The service
    needs no connection and goes on after a reboot.
  - An action plugin of the same name shows the progress of O(state=followed) on the controller.
options:
  state:
    description:
      - V(present) plans, starts or attaches, and stays for O(wait_seconds) at most.
      - V(followed) follows the fetch that V(present) started.
      - V(clean) looks after old generations once the new service has passed its questions.
      - V(absent) takes the service, the command and the plan away, and with O(remove_files) the weights.
    type: str
    choices: [present, followed, clean, absent]
    default: present
  generation:
    description: Name of the generation, for example V(0731). Required for O(state=present).
    type: str
    default: ""
  files:
    description: Files of the generation.
    type: list
    elements: dict
    default: []
    suboptions:
      role:
        description: What the engine uses it for, V(base), V(drafter) or V(mtp).
        type: str
        required: true
      file:
        description: Name in the repository. The last part is the name on the host.
        type: str
        required: true
      repo:
        description: Repository, C(OWNER/NAME).
        type: str
        default: ""
      revision:
        description: Commit of the repository, 40 hex digits.
        type: str
        default: ""
      bytes:
        description: Length in bytes. 0 when nobody knows it.
        type: int
        default: 0
      sha256:
        description: Hash of the whole file. Empty when nobody knows it; the first use records it and says so.
        type: str
        default: ""
      sources:
        description: Sources of this file alone, tried before O(sources).
        type: list
        elements: str
        default: []
  known:
    description: Files of all generations that are ours, each with C(generation), C(role), C(bytes) and C(sha256).
    type: list
    elements: dict
    default: []
  sources:
    description:
      - Where files come from, in the order in which they are tried.
      - An endpoint such as C(https://huggingface.co), an address with C({repo}), C({revision}), C({file}) or C({name}) in it,
        or an absolute directory on the host.
    type: list
    elements: str
    default: [https://huggingface.co]
  directory:
    description: Where verified files and their records lie.
    type: path
    required: true
  state_directory:
    description: Where the plan lies. Only root writes there.
    type: path
    required: true
  library_directory:
    description: Where the mechanism package is installed.
    type: path
    default: /opt/ds4/lib/current
  bin_directory:
    description: Where the command C(ds4-fetch) goes.
    type: path
    default: /usr/local/bin
  python:
    description: Interpreter of the service.
    type: path
    default: /usr/bin/python3
  user:
    description: Account that owns the files and runs the service.
    type: str
    default: ds4
  group:
    description: Group of the files.
    type: str
    default: ds4
  fetch:
    description: V(false) only verifies what is there.
    type: bool
    default: true
  adopt_paths:
    description: Files and directories on the host that may hold the wanted content already.
    type: list
    elements: path
    default: []
  adopt_running:
    description: Also look at the files of engines that run on the host.
    type: bool
    default: true
  adopt_move:
    description: Move adopted files instead of sharing them.
    type: bool
    default: false
  connections:
    description: Connections at once, 1 to 64.
    type: int
    default: 8
  segment_bytes:
    description: What a crash can cost, in bytes. 0 chooses by the length of the file.
    type: int
    default: 0
  stall_seconds:
    description: A connection silent for so many seconds is given up.
    type: float
    default: 30.0
  stall_bytes_per_second:
    description: A connection slower than this over O(stall_seconds) is given up.
    type: float
    default: 4096.0
  retries:
    description: Failures in a row without any progress before a source is given up.
    type: int
    default: 10
  backoff_seconds:
    description: First pause in seconds; doubles up to O(backoff_limit_seconds).
    type: float
    default: 1.0
  backoff_limit_seconds:
    description: Longest pause in seconds between two tries.
    type: float
    default: 60.0
  deadline_seconds:
    description: Total limit in seconds. 0 for none.
    type: float
    default: 0.0
  bandwidth_mib_per_second:
    description: Limit for all connections together in MiB per second. 0 for none.
    type: float
    default: 0.0
  proxy_url:
    description: Forward proxy, C(http://host:port).
    type: str
    default: ""
  proxy_credentials_file:
    description: File on the host, mode 0600, with one line C(user:password).
    type: str
    default: ""
  no_proxy:
    description: Hosts reached directly, separated by commas.
    type: str
    default: ""
  ca_file:
    description: PEM file on the host with further authorities.
    type: str
    default: ""
  token_file:
    description: File on the host, mode 0600, with the token of the hub.
    type: str
    default: ""
    no_log: false
  token_hosts:
    description: Hosts that get the token. Empty for the hub among O(sources).
    type: list
    elements: str
    default: []
  allowed_hosts:
    description: Hosts to which a mirror may redirect.
    type: list
    elements: str
    default: []
  guest:
    description: Be considerate to a live engine. V(auto) when one runs.
    type: str
    choices: [auto, always, never]
    default: auto
  memory_floor_gib:
    description: A guest waits while MemAvailable is below this many GiB.
    type: float
    default: 0.0
  margin_gib:
    description: Room in GiB that must remain free on every file system.
    type: float
    default: 5.0
  extra_needs:
    description: What other parts of the same run will write.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where.
        type: path
        required: true
      bytes:
        description: How much.
        type: int
        required: true
      what:
        description: For whom, for the message.
        type: str
        required: true
      present:
        description: Directories that hold some of it already.
        type: list
        elements: path
        default: []
  mount_change_accepted:
    description: The weights may lie on another file system than at the first run.
    type: bool
    default: false
  old_generation:
    description:
      - What happens to files of other generations.
      - V(keep) reports them. V(remove_after_smoke) removes them once the new service has passed its questions.
      - V(remove_before_fetch) does the same, and where both do not fit on the disk it lets the switch delete the old files
        before it fetches the new ones.
    type: str
    choices: [keep, remove_after_smoke, remove_before_fetch]
    default: keep
  rollback_waived:
    description: What a return to the previous deployment needs may be removed too.
    type: bool
    default: false
  clean_paths:
    description: Directories and files outside O(directory) from which old files may be removed.
    type: list
    elements: path
    default: []
  deployments_directory:
    description: Where deployments lie. What the served one and a rollback need is kept.
    type: path
    default: /opt/ds4/deployments
  current_link:
    description: The link to the active deployment.
    type: path
    default: /opt/ds4/current
  deployments_state_directory:
    description: Where the history of deployments lies.
    type: path
    default: /var/lib/ds4/state
  remove_files:
    description: With O(state=absent), also remove the weights and records in O(directory).
    type: bool
    default: false
  wait_seconds:
    description: How many seconds to stay with the fetch.
    type: float
    default: 5.0
  started:
    description: For the action plugin. The result of O(state=present); one that is not running is returned as it is.
    type: dict
  quiet:
    description: For the action plugin. Show no progress lines.
    type: bool
    default: false
  unreachable_seconds:
    description: For the action plugin. How many seconds the host may be unreachable while its fetch goes on.
    type: int
    default: 300
attributes:
  check_mode:
    description: Says how many bytes would move, from where, and what would be adopted.
    support: full
  diff_mode:
    description: Files of this size have no useful difference.
    support: none
  platform:
    description: Linux with systemd and Python 3.9 or newer.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Bring the weights
  ds4_weights:
    generation: "0731"
    files:
      - role: drafter
        repo: bleysg/DeepSeek-V4-Flash-DSpark-drafter-GGUF
        revision: 81c6fdd38f9582da45ba27f0ed7b63bcd3ea3b62
        file: DSpark-drafter-Q2K-Q8-0731.gguf
        bytes: 6971241504
        sha256: 8fa269560dc76fd73e4233ad9b1938b5f65dd363381fd9b1a5c6183f7d12d686
    directory: /var/lib/ds4/weights
    state_directory: /var/lib/ds4/state/weights
  register: started

- name: Follow the fetch
  ds4_weights:
    state: followed
    directory: /var/lib/ds4/weights
    state_directory: /var/lib/ds4/state/weights
    started: "{{ started }}"
"""

RETURN = r"""
state:
  description: V(done), V(running), V(planned), or V(deferred) when the exchange is left to the switch.
  returned: success
  type: str
  sample: done
weights:
  description: Where the files are and what they are.
  returned: success
  type: dict
  sample:
    generation: "0731"
    directory: /var/lib/ds4/weights
    files:
      drafter: {path: /var/lib/ds4/weights/DSpark-drafter-Q2K-Q8-0731.gguf, sha256: 8fa2…, bytes: 6971241504}
    bytes_fetched: 6971241504
    bytes_to_fetch: 0
    seconds: 11.2
    mib_per_second: 593.6
    source: huggingface.co
    adopted: []
plan:
  description: What would be done.
  returned: in check mode, when something is missing
  type: dict
  sample: {bytes_to_fetch: 6971241504, missing: {drafter: no such file}, adopt: {}, write: []}
progress:
  description: One line for people.
  returned: while it runs
  type: str
  sample: base 42 %  36.5/80.8 GiB  612 MiB/s  eta 1m12s
status:
  description: Last word of the fetcher.
  returned: when it was started
  type: dict
  sample: {state: running, bytes_received: 1048576}
old_unread:
  description: Files of a known length that only reading could judge. O(state=clean) reads each of them once.
  returned: for O(state=present)
  type: int
  sample: 0
bytes_deletable:
  description: Bytes of old files that the settings will let go after the next switch.
  returned: for O(state=present)
  type: int
  sample: 90527713888
bytes_for_return:
  description: Bytes of old files that stay for a return to the previous deployment.
  returned: for O(state=present)
  type: int
  sample: 0
served:
  description: The wanted weights are served, and the service has passed its questions.
  returned: for O(state=clean)
  type: bool
  sample: true
old:
  description: Files that the wanted generation does not need, and why one may not be removed.
  returned: for O(state=present)
  type: list
  elements: dict
  sample: [{path: /var/lib/ds4/weights/x.gguf, called: legacy base, bytes: 86720111488, sha256: efc7…, kept_for: ""}]
exchange:
  description: What the switch will delete before it fetches.
  returned: when the state is deferred
  type: dict
  sample: {delete: [], bytes_freed: 90527713888, bytes_to_fetch: 93691352992}
removed:
  description: Files that were removed, or in check mode would be.
  returned: for O(state=clean) and O(state=absent)
  type: list
  elements: raw
  sample: []
kept:
  description: Old files that stay.
  returned: for O(state=clean)
  type: list
  elements: dict
  sample: []
bytes_freed:
  description: What the removal gave back, in bytes.
  returned: for O(state=clean)
  type: int
  sample: 90527713888
ds4_summary:
  description: One line for the table at the end.
  returned: always
  type: dict
  sample: {room: weights, state: ok, text: "0731: base + drafter verified, nothing to fetch", files: 2}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import rooms
from ansible.module_utils.ds4.errors import Ds4Error
from ansible.module_utils.ds4.wanted import ROOM


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=rooms.WEIGHTS_OPTIONS, supports_check_mode=True)
    try:
        outcome = rooms.have_weights(module.params, module.check_mode)
    except Ds4Error as error:
        module.fail_json(ds4_summary={"room": ROOM, "state": "failed", "text": error.what}, **error.result())
    for text in outcome.result.pop("warnings", []):
        module.warn(text)
    module.exit_json(state=outcome.state, **outcome.result)


if __name__ == "__main__":
    main()
