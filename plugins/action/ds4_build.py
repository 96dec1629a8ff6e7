# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Follow the build of a host: a line for every step, patience with a lost connection."""

from __future__ import annotations

import os
import time
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside this folder.
_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)

from ansible.module_utils.ds4.follow import follow  # noqa: E402

display = Display()
CALL_SECONDS = 15  # one round trip waits on the host so long


class ActionModule(ActionBase):
    """Runs the module until the build has ended; in check mode, and when there is nothing to build, that is once."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        host = (task_vars or {}).get("inventory_hostname", "")
        limit = float(arguments.get("timeout_seconds", 1800)) + 120
        begun = time.monotonic()
        following = False
        warnings: list[Any] = []

        def ask() -> dict[str, Any]:
            more = {"wait_seconds": CALL_SECONDS, "following": following}
            answer: dict[str, Any] = self._execute_module(module_args={**arguments, **more}, task_vars=task_vars)
            return answer

        def tell(answer: dict[str, Any]) -> None:
            nonlocal following
            following = following or bool(answer.get("running"))
            warnings.extend(answer.pop("warnings", []))
            if answer.get("running"):
                display.display(f"{host}: build: {answer['step']} ({time.monotonic() - begun:.0f} s)")

        def away(seconds: float) -> None:
            display.display(f"{host}: not reachable for {seconds:.0f} s; its build goes on by itself")

        patience = float(arguments.get("unreachable_seconds", 300))
        answer = follow(
            ask, tell, lost=AnsibleConnectionFailure, patience_seconds=patience, limit_seconds=limit, away=away
        )
        result.update(answer)
        if warnings:
            result["warnings"] = warnings
        if result.get("running"):
            text = f"The build still runs after {limit:.0f} s. Cure: run again, which follows it."
            summary = {"room": "cuda_build", "state": "failed", "text": text}
            result.update(failed=True, msg=text, ds4_summary=summary)
        return result
