# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write docs/serving-mode.md around the role's own lists; `--check` fails when the page is not what they say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
ROLE = ROOT / "roles/serving_mode"
PAGE = ROOT / "docs/serving-mode.md"

HEAD = """\
<!-- Written by tools/gen_serving_mode_docs.py. Change that file or the lists in roles/serving_mode, then `make docs`. -->
# Serving mode

A desktop on a Spark holds memory that the engine could use; public reports say 10 to 15 GB. Serving mode takes chosen parts of the
desktop away and gives them back exactly. It is off unless you ask for it, per host or group:

```yaml
serving_mode_target: serving        # unmanaged (default) | serving | desktop
```

| command | what it does |
| --- | --- |
| `ansible-playbook site.yml --check --diff` | lists every unit with its present and future state, and changes nothing |
| `ansible-playbook site.yml` | with `serving_mode_target: serving`: takes the groups away before the engine is switched |
| `ansible-playbook desktop.yml` | gives the desktop back; set `serving_mode_target` back as well, or the next `site.yml` takes it away again |
| `sudo ds4-desktop status` | on the Spark: what is held, what it was, and whether the timer below is armed |
| `sudo ds4-desktop restore` | on the Spark, without Ansible: the same as `desktop.yml`; `--force` although memory is tight or a unit fails |
| `sudo ds4-desktop confirm` | on the Spark: the desktop stays away (cancels the timer) |

With `unmanaged`, the report tells what the desktop holds. Where systemd counts memory per unit the figure stands beside it; page cache is in
it, so what counts is the measured MemAvailable: the table at the end of a run shows it before, after, and the GiB gained.

## What happens

1. Everything is read and judged. A graphical or remote-desktop session stops the host with its name, and with what else would be cut off,
   unless `serving_mode_force: true`. So does the playbook running inside such a session.
2. A snapshot is written to `/var/lib/ds4/state/serving-mode/` and is on disk before the first change: of each unit its state, whether it
   runs, every link that enables, aliases or masks it, hashes of local files; the default target; swap settings. It is never overwritten
   while serving ([schema](schemas/serving-mode-snapshot.schema.json)). `journal.jsonl` beside it has every operation.
3. A timer is armed that gives the desktop back, also after a reboot.
4. The default target becomes `serving_mode_boot_target`. Units are stopped, then disabled, then masked; each step is read back, and a unit that
   did not follow is an error that names it and why. Nothing is isolated: what `systemctl isolate` would stop in addition is listed as
   a warning; those units run on until the next boot and are missing after it.
5. MemAvailable is measured once it has come to rest. The memory gate of the engine uses the measured value.
6. The playbook drops its connection, opens a new one, and cancels the timer through it. When that does not come within
   `serving_mode_dead_man_seconds` ({dead_man} as delivered), the desktop comes back by itself.

A second run changes nothing. Other groups in a later run: what is no longer listed is given back. A run that was cut off anywhere goes on, or
is given back exactly.

## The way back

Every unit that is held gets back its links byte for byte, its default target, and runs again if it ran. What its owner had disabled, masked or
stopped stays so. After that the snapshot goes to `archive/`.

- A unit that was removed meanwhile only loses its mask; one that was installed meanwhile is left alone. Both are told.
- What somebody changed on a held unit meanwhile is put back and told. A file that somebody put in the place of a mask is left alone and told.
- What is not held was never touched and is not touched.
- Bringing the desktop back beside a loaded engine can freeze a Spark. When MemAvailable is less than what taking the desktop away brought, the
  way back stops and says so: `systemctl stop ds4` first, or `serving_mode_force: true`.
- Containers that ran under docker come back as their own restart policy says.
- Sessions that were ended are not brought back; the login screen is.

## What goes

Only `serving_mode_groups`, as delivered {groups}. `all_but_containers` is short for all groups but one. A unit that a host does not have is
passed over. An alias is followed to the unit behind it. What starts a unit again (socket, path, timer) goes along with it, and so does, for
as long, what its stop takes down. A unit file made by hand in `/etc/systemd/system` cannot be masked; it is stopped and disabled.

| group | unit | why |
| --- | --- | --- |
"""

EXTRA = """
Your own: `serving_mode_extra_units: [{unit: lldpd.service, reason: no switch listens}]`, with `scope: user` for a unit that users' managers run
(it is masked for all users, and stopped where it runs).

## What stays

**Whatever anybody lists.** A listed unit that matches stops the host before anything is touched, with the reason; so does one whose stop
would take such a unit down.

| never taken away | why |
| --- | --- |
"""

KEEP = """
**Found out on the host.** Whatever carries the connection of the playbook: the route to the SSH peer, its interface, what that is
stacked on, and the unit behind it (NetworkManager, networkd, `wg-quick@`, the service that holds a tunnel device, such as tailscaled); units that
the playbook itself runs below. `wpa_supplicant` while any Wi-Fi interface is up. avahi when the inventory reaches the host by a name in
`.local`. A unit that systemd refuses to stop by hand, a transient one, and one that is masked while it runs, since these could not be given back. A
socket whose service stays.

**By default** (`serving_mode_keep`; take a line out to allow it):

| kept | why |
| --- | --- |
"""

TAIL = """
`serving_mode_update_window: Sun 03:00` moves apt's timers ({timers}) to a quiet hour while serving instead of stopping them.

## Swap

`serving_mode_swap`: `keep` (as delivered) changes nothing. `low_swappiness` sets `vm.swappiness` to `serving_mode_swappiness`. `off` switches swap
off, and is refused while more is swapped out than MemAvailable holds. Pinned GPU pages cannot be swapped, so with swap an
out-of-memory can become hours of thrashing instead of an end; without it there is less room. Both are undone on the way back.

## Remote desktops

A running unit of these names is a finding when the display goes: {remote}.

## Files

| path | what |
| --- | --- |
| `/var/lib/ds4/state/serving-mode/` | snapshot, journal, archive; root's alone |
| `/usr/local/bin/ds4-desktop` | the command above |
| `/etc/systemd/system/ds4-desktop-deadman.timer`, `.service` | only while the timer is armed |
| `/etc/systemd/system/<timer>.d/90-ds4-window.conf` | only with `serving_mode_update_window`, while serving |
| `/etc/sysctl.d/90-ds4-serving-mode.conf` | only with `low_swappiness`, while serving |

## What the lab cannot show

Units there are simulated: the names are those of DGX OS, the amounts of memory are guesses. Not shown are a real GNOME session ending, Wi-Fi, a
real VPN, and `swapoff` (containers may not); these parts are held by unit tests. How much a real desktop gives back is for `make plan`
and the table of the first real run to tell.
"""


def cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def names(units: Iterable[str]) -> str:
    return ", ".join(f"`{unit}`" for unit in units)


def page(policy: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Text of the page."""
    lines = []
    for group, entries in policy["__serving_mode_groups"].items():
        for entry in entries:
            scope = " (users')" if entry.get("scope") == "user" else ""
            lines.append(f"| {group} | `{entry['unit']}`{scope} | {cell(entry['reason'])} |")
    never = [
        *policy["__serving_mode_never"],
        {"units": defaults["serving_mode_engine_units"], "reason": "is the engine itself"},
    ]
    head = HEAD.replace("{dead_man}", f"{defaults['serving_mode_dead_man_seconds']} s")
    tail = TAIL.replace("{timers}", names(policy["__serving_mode_update_timers"]))
    return (
        head.replace("{groups}", names(defaults["serving_mode_groups"]))
        + "\n".join(lines)
        + "\n"
        + EXTRA
        + "\n".join(f"| {names(rule['units'])} | {cell(rule['reason'])} |" for rule in never)
        + "\n"
        + KEEP
        + "\n".join(f"| {names(rule['units'])} | {cell(rule['reason'])} |" for rule in defaults["serving_mode_keep"])
        + "\n"
        + tail.replace("{remote}", names(policy["__serving_mode_remote_desktops"]))
    )


def main(arguments: list[str]) -> int:
    policy = yaml.safe_load((ROLE / "vars/main.yml").read_text(encoding="utf-8"))
    wanted = page(policy, yaml.safe_load((ROLE / "defaults/main.yml").read_text(encoding="utf-8")))
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is out of date. Cure: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
