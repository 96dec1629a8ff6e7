# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Say what a room found on a host: once, as text, and as a row of the table at the end. Controller only."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display


class ActionModule(ActionBase):
    """Show or fail with a text.

    Arguments of the task:
        text: what to say (str); nothing is shown when empty.
        stop: fail the host with the text (bool).
        summary: ``ds4_summary`` of the room (dict).
    """

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("text", "stop", "summary"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        text = str(self._task.args.get("text") or "")
        result.update(changed=False, ds4_summary=dict(self._task.args["summary"]))
        if self._task.args.get("stop"):
            result.update(failed=True, msg=text)
        elif text:
            Display().display(text, color="yellow")
        return result
