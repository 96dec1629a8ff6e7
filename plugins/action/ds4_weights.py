# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Progress of a fetch on the controller, one line per host and interval; a host out of reach for a while is no failure."""

from __future__ import annotations

import os
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

PAUSE_SECONDS = 5  # between two tries to reach a host


class ActionModule(ActionBase):
    """Runs the module once, or with ``state: followed`` until the fetch has ended."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        started = arguments.pop("started", None)
        quiet = boolean(arguments.pop("quiet", False)) or bool(os.environ.get("CI"))
        patience = int(arguments.pop("unreachable_seconds", 300))
        if arguments.get("state", "present") != "followed":
            return dict(self._execute_module(module_args=arguments, task_vars=task_vars))
        if isinstance(started, dict) and started.get("state") != "running":
            return dict(started)
        changed = bool(started and started.get("changed"))
        return self._follow(arguments, task_vars or {}, quiet, patience, changed)

    def _follow(
        self, arguments: dict[str, Any], task_vars: dict[str, Any], quiet: bool, patience: int, changed: bool
    ) -> dict[str, Any]:
        host = task_vars.get("inventory_hostname", "")
        seen = time.monotonic()
        while True:
            try:
                result = dict(self._execute_module(module_args=arguments, task_vars=task_vars))
            except AnsibleConnectionFailure:
                gone = time.monotonic() - seen
                if gone > patience:
                    raise
                self._tell(quiet, f"[{host}] out of reach for {gone:.0f} s; its fetch goes on without us")
                time.sleep(PAUSE_SECONDS)
                continue
            seen = time.monotonic()
            if result.get("failed") or result.get("state") != "running":
                result["changed"] = changed
                return result
            self._tell(quiet, f"[{host}] {result.get('progress', '')}")

    def _tell(self, quiet: bool, text: str) -> None:
        if not quiet:
            self._display.display(text, stderr=True)  # standard output is buffered when it is a pipe
