#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.serving_mode."""

from __future__ import annotations

DOCUMENTATION = r"""
module: spark_serving_mode
short_description: Take the desktop away for the engine, and give it back exactly
description:
  - Stops, disables and masks the units of chosen groups, each step read back, after the state of every unit was recorded
    durably. Gives back from that record, byte for byte, also after an interruption, a reboot or other lists in between.
  - Units are changed through the links that stand for their state, so that the same links can be put back. Aliases are
    followed to the unit behind them; a unit that starts another one again goes along, and so does one that a stop takes down.
  - Nothing is isolated. What C(systemctl isolate) would stop is computed and returned in RV(ignore:falls_at_boot).
  - Whatever carries the management connection stays, found from the SSH peer's route down to the unit behind its interface.
options:
  target:
    description:
      - V(unmanaged) tells what the units of all groups hold and changes nothing.
      - V(serving) takes O(selected) away. Units held from an earlier list that are no longer in it are given back.
      - V(desktop) gives everything back and archives the record.
      - V(confirm) cancels the dead man's switch, from another connection than the one that armed it.
    type: str
    choices: [unmanaged, serving, desktop, confirm]
    required: true
  groups:
    description: >-
      Name → list of units, each a dictionary with C(unit), C(reason), and optionally C(scope) (C(system) or C(user)) and
      C(unless_active) (pattern of units that make it stay while they run). The group C(display) is what graphical sessions need.
    type: dict
    default: {}
  selected:
    description: Groups that go with O(target=serving).
    type: list
    elements: str
    default: []
  extra_units:
    description: Further units that go. One that must stay is a finding, where a group's unit is only kept.
    type: list
    elements: dict
    default: []
    options:
      unit:
        description: Full unit name.
        type: str
        required: true
      reason:
        description: Why the host can do without.
        type: str
        required: true
      scope:
        description: Whose manager runs it.
        type: str
        choices: [system, user]
        default: system
      unless_active:
        description: Pattern of units that make it stay while they run.
        type: str
        default: ''
  never:
    description: What stays whatever is listed.
    type: list
    elements: dict
    default: []
    options: &rule
      units:
        description: Unit names or shell patterns.
        type: list
        elements: str
        required: true
      reason:
        description: Why they stay.
        type: str
        required: true
      cure:
        description: What an operator can do, for the message.
        type: str
        default: ''
  keep:
    description: What stays by default; an operator can take lines out.
    type: list
    elements: dict
    default: []
    options: *rule
  remote_desktops:
    description: Patterns of units of remote-desktop programs. A running one is a finding when the display goes.
    type: list
    elements: str
    default: []
  boot_target:
    description: Target to boot into while the group C(display) is away. Empty leaves the default target alone.
    type: str
    default: multi-user.target
  reached_as:
    description: Name or address by which the inventory reaches the host; one in C(.local) keeps avahi.
    type: str
    default: ''
  swap:
    description: Swap while serving. V(off) is refused when used swap does not fit into MemAvailable.
    type: str
    choices: [keep, low_swappiness, 'off']
    default: keep
  swappiness:
    description: Value of C(vm.swappiness) with V(low_swappiness).
    type: int
    default: 10
  update_window:
    description: Calendar time of systemd to which O(update_timers) are moved while serving. Empty leaves them.
    type: str
    default: ''
  update_timers:
    description: Timers that O(update_window) is about.
    type: list
    elements: str
    default: []
  dead_man_seconds:
    description: >-
      Time in seconds after which the host gives the desktop back by itself unless V(confirm) came, counted from the end of
      the strip; also after a reboot in between. V(0) arms nothing.
    type: int
    default: 300
  force:
    description: End graphical and remote-desktop sessions; give back although memory is tight or a unit does not start.
    type: bool
    default: false
  stop_on_findings:
    description: Fail when something speaks against the strip. Otherwise RV(ignore:findings) only tells it; for check mode.
    type: bool
    default: true
  stop_timeout_seconds:
    description: Limit in seconds for all units together to stop, or to start.
    type: int
    default: 120
  settle_seconds:
    description: Limit in seconds for MemAvailable to come to rest before it is measured.
    type: int
    default: 30
  settle_mib:
    description: MemAvailable is at rest when three readings, a second apart, differ by no more than this (MiB).
    type: int
    default: 64
  state_dir:
    description: Directory of state; records lie in its folder C(serving-mode).
    type: path
    default: /var/lib/ds4/state
  lib_dir:
    description: Directory of the mechanism, whose link C(current) the dead man's switch and C(ds4-desktop) enter.
    type: path
    default: /opt/ds4/lib
  bin_dir:
    description: Directory for the command C(ds4-desktop), written with the first strip.
    type: path
    default: /usr/local/bin
  meminfo_path:
    description: File with the kernel's memory figures.
    type: path
    default: /proc/meminfo
attributes:
  check_mode:
    description: Lists every unit with its present and future state. Findings fail as they would in a real run.
    support: full
  diff_mode:
    description: State of each unit, the default target, and files, before and after.
    support: full
  platform:
    description: Linux booted with systemd 247 or newer; needs root.
    support: full
    platforms: posix
author: ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Take the display away, unless somebody is logged in there
  spark_serving_mode:
    target: serving
    groups:
      display:
        - {unit: gdm.service, reason: login screen}
      sleep:
        - {unit: sleep.target, reason: a sleeping host serves nobody}
    selected: [display, sleep]
    never:
      - {units: [ssh.service, ssh.socket], reason: is the way into the host}
  register: serving

- name: Tell that the host can still be reached
  spark_serving_mode:
    target: confirm
  when: serving.dead_man.armed

- name: Give the desktop back
  spark_serving_mode:
    target: desktop
"""

RETURN = r"""
units:
  description: >-
    Every unit of the policy: C(unit) (C(user/NAME) for users' units), C(group), C(now) and C(then) (as C(active, enabled)),
    C(action) (C(strip), C(keep), C(missing), C(give_back), C(none)), C(steps) still to be done, C(reason), C(memory_kib).
  type: list
  elements: dict
  returned: unless O(target=confirm)
  sample: [{unit: gdm.service, group: display, now: "active, enabled", then: "inactive, masked", action: strip,
            steps: [stop, disable, mask], reason: login screen, memory_kib: 812340}]
findings:
  description: What speaks against the strip, each with C(id), C(phase), C(what), C(found), C(required), C(cure), C(allow).
  type: list
  elements: dict
  returned: unless O(target=confirm)
  sample: []
notes:
  description: Sentences for people, for example owner's changes that were found on the way back.
  type: list
  elements: str
  returned: unless O(target=confirm)
  sample: [lightdm.service was installed meanwhile; it was never touched.]
falls_at_boot:
  description: Running units that only the old default target starts; they run on until the next boot.
  type: list
  elements: str
  returned: unless O(target=confirm)
  sample: [accounts-daemon.service, graphical.target]
default_target:
  description: Target of the next boot, C(now) and C(then).
  type: dict
  returned: unless O(target=confirm)
  sample: {now: graphical.target, then: multi-user.target}
connection:
  description: How the host is reached, with C(kind), C(peer), C(interfaces), C(managers), C(wireless), C(units).
  type: dict
  returned: always
  sample: {kind: ssh, peer: 10.0.0.9, interfaces: [enP7s7], managers: [NetworkManager.service], wireless: false}
sessions:
  description: Graphical sessions, running remote desktops, and the graphical session that the playbook runs in.
  type: dict
  returned: unless O(target=confirm)
  sample: {graphical: ["alice (wayland, session 3, gdm-password)"], remote_desktops: [], own: ""}
would_cut_off:
  description: Units of users that live only with a graphical session, C(user), C(unit), C(state).
  type: list
  elements: dict
  returned: unless O(target=confirm)
  sample: [{user: alice, unit: sunshine.service, state: active}]
mem_available_before_kib:
  description: MemAvailable (KiB) before anything was done.
  type: int
  returned: unless O(target=confirm)
  sample: 101231020
mem_available_after_kib:
  description: MemAvailable (KiB) after it had come to rest.
  type: int
  returned: unless O(target=confirm)
  sample: 113920140
gained_kib:
  description: MemAvailable (KiB) that the strips since the record brought, as measured around them.
  type: int
  returned: unless O(target=confirm)
  sample: 12689120
needs_change:
  description: In check mode, whether a run would change something, for a play that reports with C(changed_when) false.
  type: bool
  returned: always
  sample: false
serving:
  description: Something is held.
  type: bool
  returned: always
  sample: true
dead_man:
  description: Whether the timer is armed (C(armed)) and how long it still runs (C(seconds_left), null after a reboot).
  type: dict
  returned: always
  sample: {armed: true, seconds_left: 300}
archived:
  description: Path of the archived record.
  type: str
  returned: when the desktop was given back
  sample: /var/lib/ds4/state/serving-mode/archive/20261129T120000-000.json
ds4_summary:
  description: One line for the table at the end of a run.
  type: dict
  returned: unless O(target=confirm)
  sample: {room: serving_mode, state: changed, text: "serving; 14 units off, MemAvailable 96.5 GiB → 108.6 GiB (+12.1 GiB)"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4.errors import Ds4Error
from ansible.module_utils.ds4.serving_mode import ServingMode
from ansible.module_utils.ds4.serving_mode_host import Request, parse_entries, parse_rules


def argument_spec() -> dict[str, dict[str, object]]:
    rule = {
        "units": {"type": "list", "elements": "str", "required": True},
        "reason": {"type": "str", "required": True},
        "cure": {"type": "str", "default": ""},
    }
    entry = {
        "unit": {"type": "str", "required": True},
        "reason": {"type": "str", "required": True},
        "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
        "unless_active": {"type": "str", "default": ""},
    }
    return {
        "target": {"type": "str", "choices": ["unmanaged", "serving", "desktop", "confirm"], "required": True},
        "groups": {"type": "dict", "default": {}},
        "selected": {"type": "list", "elements": "str", "default": []},
        "extra_units": {"type": "list", "elements": "dict", "default": [], "options": entry},
        "never": {"type": "list", "elements": "dict", "default": [], "options": rule},
        "keep": {"type": "list", "elements": "dict", "default": [], "options": rule},
        "remote_desktops": {"type": "list", "elements": "str", "default": []},
        "boot_target": {"type": "str", "default": "multi-user.target"},
        "reached_as": {"type": "str", "default": ""},
        "swap": {"type": "str", "choices": ["keep", "low_swappiness", "off"], "default": "keep"},
        "swappiness": {"type": "int", "default": 10},
        "update_window": {"type": "str", "default": ""},
        "update_timers": {"type": "list", "elements": "str", "default": []},
        "dead_man_seconds": {"type": "int", "default": 300},
        "force": {"type": "bool", "default": False},
        "stop_on_findings": {"type": "bool", "default": True},
        "stop_timeout_seconds": {"type": "int", "default": 120},
        "settle_seconds": {"type": "int", "default": 30},
        "settle_mib": {"type": "int", "default": 64},
        "state_dir": {"type": "path", "default": "/var/lib/ds4/state"},
        "lib_dir": {"type": "path", "default": "/opt/ds4/lib"},
        "bin_dir": {"type": "path", "default": "/usr/local/bin"},
        "meminfo_path": {"type": "path", "default": "/proc/meminfo"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    given = module.params
    try:
        request = Request(
            groups={name: parse_entries(entries, name) for name, entries in given["groups"].items()},
            selected=given["selected"],
            extra=parse_entries(given["extra_units"], "extra_units"),
            never=parse_rules(given["never"]),
            keep=parse_rules(given["keep"], "take its line out of serving_mode_keep"),
            remote_desktops=given["remote_desktops"],
            boot_target=given["boot_target"],
            reached_as=given["reached_as"],
            swap=given["swap"],
            swappiness=given["swappiness"],
            window=given["update_window"],
            window_timers=given["update_timers"],
            dead_man_seconds=given["dead_man_seconds"],
            force=given["force"],
            check=module.check_mode,
            stop_on_findings=given["stop_on_findings"],
            wait_seconds=given["stop_timeout_seconds"],
            settle_seconds=given["settle_seconds"],
            settle_kib=given["settle_mib"] * 1024,
            state_dir=given["state_dir"],
            lib_dir=given["lib_dir"],
            bin_dir=given["bin_dir"],
            meminfo=given["meminfo_path"],
        )
        mode = ServingMode(request)
        verbs = {"unmanaged": mode.report, "serving": mode.serve, "desktop": mode.restore, "confirm": mode.confirm}
        result = verbs[given["target"]]()
    except Ds4Error as error:
        summary = {"room": "serving_mode", "state": "failed", "text": error.what}
        module.fail_json(**error.result(), ds4_summary=summary)
    for note in result.get("notes", []):
        module.warn(f"Serving mode: {note}")
    module.exit_json(**result, needs_change=result["changed"] and module.check_mode)


if __name__ == "__main__":
    main()
