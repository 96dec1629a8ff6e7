# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The table at the end of a run: what each room did on each host, and the command to go on."""

from __future__ import annotations

DOCUMENTATION = r"""
name: fleet_summary
type: aggregate
short_description: One table per run from the C(ds4_summary) key of task results
description:
  - Every room of the playbook returns C(ds4_summary), a dictionary with C(room), C(state)
    (ok, changed, planned, failed or skipped), C(text) and numbers of its own; a task that speaks for several rooms returns a list,
    C(ds4_summaries).
  - The last of each room and host is shown at the end (an C(ok) hides no change, nothing hides a failure), with any stdout
    callback and under ansible-runner.
  - After it come, for a rollout, the hosts by what became of them; and when a host failed, was out of reach or was not attempted,
    the one command that goes on from there.
  - A last play would not run after a failed rollout; a callback does.
options:
  summary_file:
    description: Path of a JSON file to write the same data to. Nothing is written when empty.
    type: str  # an empty path would become the current folder
    default: ""
    env:
      - name: DS4_SUMMARY_FILE
    ini:
      - section: callback_fleet_summary
        key: summary_file
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import ansible.module_utils
from ansible import context
from ansible.plugins.callback import CallbackBase

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside this folder.
_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)

from ansible.module_utils.ds4 import masking

ROOMS = (
    "validate",
    "host_verify",
    "host_base",
    "cuda_build",
    "weights",
    "serving_mode",
    "engine_service",
    "smoke_test",
    "agent_clients",
    "rollout",
)
# What can become of a host in a rollout, in the order of the last lines; those of ``NOT_DONE`` are named in the command to go on.
DONE, OUT, BUSY, RETURNED, STOPPED, FAILED, UNREACHABLE, WAITING = (
    "done",
    "left out",
    "left alone",
    "rolled back",
    "stopped",
    "failed",
    "unreachable",
    "not attempted",
)
NOT_DONE = (BUSY, RETURNED, STOPPED, FAILED, UNREACHABLE, WAITING)
FATE_STATES = {DONE: "changed", OUT: "skipped", BUSY: "skipped", WAITING: "planned"}  # all others: failed
COLOURS = {"failed": "COLOR_ERROR", "changed": "COLOR_CHANGED", "planned": "COLOR_CHANGED", "skipped": "COLOR_SKIP"}


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "fleet_summary"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hosts: dict[str, dict[str, dict[str, Any]]] = {}
        self.outcome: dict[str, str] = {}

    def _note(self, result: Any, outcome: str | None = None) -> None:
        host = result.host.get_name()
        content = result.result
        told = [content.get("ds4_summary"), *content.get("ds4_summaries", [])] if isinstance(content, dict) else []
        for summary in told:
            if not isinstance(summary, dict) or "room" not in summary:
                continue
            rooms, room = self.hosts.setdefault(host, {}), str(summary["room"])
            if _replaces(str(summary.get("state", "")), str(rooms.get(room, {}).get("state", ""))):
                rooms[room] = dict(summary)
        if outcome is not None:
            self.outcome[host] = outcome
            text = str(content.get("msg", "")).strip() if isinstance(content, dict) else ""
            rooms = self.hosts.setdefault(host, {})
            if outcome == "unreachable" or not any(room.get("state") == "failed" for room in rooms.values()):
                rooms[outcome] = {"room": outcome, "state": "failed", "text": f"{result.task.get_name()}: {text}"}

    def v2_runner_on_ok(self, result: Any) -> None:
        self._note(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        self._note(result, None if ignore_errors else "failed")

    def v2_runner_on_unreachable(self, result: Any) -> None:
        self._note(result, "unreachable")

    def v2_playbook_on_stats(self, stats: Any) -> None:
        if not any(self.hosts.values()):
            return
        self._display.display("")
        self._display.display("FLEET SUMMARY", color="bright blue")
        for host in sorted(self.hosts):
            totals = stats.summarize(host)
            self._display.display(
                f"{host}: changed={totals['changed']} failed={totals['failures']} unreachable={totals['unreachable']}"
            )
            rooms = self.hosts[host]
            for room in sorted(rooms, key=lambda name: ROOMS.index(name) if name in ROOMS else len(ROOMS)):
                entry = rooms[room]
                state = str(entry.get("state", ""))
                lines = str(entry.get("text", "")).splitlines() or [""]
                self._display.display(f"  {room:<15} {state:<8} {lines[0]}", color=_colour(state))
        fates = {host: self._fate(host, stats.summarize(host)) for host in sorted(self.hosts)}
        if any("rollout" in rooms for rooms in self.hosts.values()):
            for fate in (DONE, OUT, *NOT_DONE):
                if hosts := [host for host, came_to in fates.items() if came_to == fate]:
                    self._display.display(f"{fate}: {', '.join(hosts)}", color=_colour(FATE_STATES.get(fate, "failed")))
        not_done = [host for host, fate in fates.items() if fate in NOT_DONE]
        again = command_again(sys.argv, not_done) if not_done else ""
        if again:
            self._display.display(f"To go on, once that is seen to: {again}")
        path = self.get_option("summary_file")
        if path:
            data = {
                "schema": 1,
                "hosts": {h: {"rooms": r, "stats": stats.summarize(h)} for h, r in self.hosts.items()},
                "fates": fates,
                "to_go_on": again,
            }
            temporary = f"{path}.new"
            with open(temporary, "w", encoding="utf-8") as stream:
                json.dump(data, stream, indent=2, sort_keys=True, default=str)
            os.replace(temporary, path)

    def _fate(self, host: str, totals: dict[str, int]) -> str:
        """What became of a host; an empty string when it only had nothing to do."""
        rooms = self.hosts[host]
        turn = rooms.get("rollout", {})
        state = turn.get("state")
        if totals["unreachable"] or "unreachable" in rooms:
            return UNREACHABLE
        if state == "planned" and not context.CLIARGS.get("check"):
            return WAITING  # also the one on which the end of the rollout was told
        if totals["failures"]:
            outcome = str(rooms.get("engine_service", {}).get("outcome"))
            return {"returned": RETURNED, "stopped": STOPPED}.get(outcome, FAILED)
        if state == "skipped":
            return BUSY if turn.get("outcome") == "skipped" else OUT
        return DONE if state == "changed" else ""


def command_again(argv: Sequence[str], hosts: Sequence[str]) -> str:
    """The command that ran, for these hosts only, as it can be typed. What looks like a secret is not repeated.

    Args:
        argv: of ansible-playbook.
        hosts: those that are not done; this machine alone needs no naming.
    """
    program = os.path.basename(argv[0])
    words = [program if shutil.which(program) == argv[0] else argv[0]]
    kind = ""  # of the option whose value comes next
    for word in argv[1:]:
        found = None if kind else _OPTION.match(word)
        this = kind or (str(found.lastgroup) if found else "")
        option, value = (word[: found.end()], word[found.end() :]) if found else ("", word)
        kind = this if found and not value and not option.endswith("=") else ""
        if this == "limit":
            continue
        hidden = this == "extra" and value and not value.startswith("@") and not _PLAIN.fullmatch(value)
        words.append(f"{option}{masking.MASK}" if hidden else word)
    return shlex.join(words if list(hosts) == ["localhost"] else [*words, "--limit", ",".join(hosts)])


# Every way to write them: in full, cut short as argparse allows, and behind other letters.
_OPTION = re.compile(r"(?P<extra>--ex[a-z-]*=?|-[bCDKkJv]*e)|(?P<limit>--lim[a-z]*=?|-[bCDKkJv]*l)")
# What is repeated of extra variables: names of ours with values that are no secret whatever they are called.
_PLAIN = re.compile(r"(?!\S*(?:token|secret|pass|pw|key|cred))\w+=(?:true|false|yes|no|\d+|v\d[\w.-]*)", re.I)


def _replaces(new: str, old: str) -> bool:
    """A room may speak twice (fetch, then clean up). The later word counts, but an "ok" hides no change, and nothing a failure."""
    if old == "failed":
        return new == "failed"
    return new != "ok" or old not in ("changed", "planned")


def _colour(state: str) -> str | None:
    from ansible import constants

    name = COLOURS.get(state, "COLOR_OK")
    return str(getattr(constants, name, "")) or None
