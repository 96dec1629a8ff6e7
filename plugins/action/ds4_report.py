# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Say what a room found on a host: once, as text, and as a row of the table at the end. Controller only."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):
    """Show or fail with a text.

    Arguments of the task:
        text: what to say (str); nothing is shown when empty.
        stop: fail the host with the text (bool).
        summary: ``ds4_summary`` of the room (dict).
        verdict: these three as keys of what a filter found (dict). It is returned whole, so that it is found only once.
        quiet: neither show nor fail (bool).
    """

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("text", "stop", "summary", "verdict", "quiet"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = self._task.args
        verdict = dict(arguments.get("verdict") or {})
        told = {**verdict, **arguments}
        text = str(told.get("text") or "")
        result.update(changed=False, **({"verdict": verdict} if verdict else {}))
        if told.get("summary"):
            result["ds4_summary"] = dict(told["summary"])
        if boolean(arguments.get("quiet", False)):
            return result
        if told.get("stop"):
            result.update(failed=True, msg=text)
        elif text:
            Display().display(text, color="yellow")
        return result
