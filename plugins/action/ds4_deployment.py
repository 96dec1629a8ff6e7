# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Stage without a round trip where it shows that nothing is to be staged, and follow the switch of a host.

A line for every step, patience with a lost connection, one judgement at the end.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleConnectionFailure
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template
from ansible.utils.display import Display

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside this folder.
_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)

from ansible.module_utils.ds4 import staging  # noqa: E402
from ansible.module_utils.ds4.follow import follow  # noqa: E402

display = Display()
CALL_SECONDS = 15  # one round trip waits on the host so long for a further step


class ActionModule(ActionBase):
    """Arguments of the task that stay here; the module gets the rest.

    Arguments of the task:
        patience_seconds, limit_seconds: how long a host may be out of reach, and how long a switch is followed.
        refuse: what the engine would not accept (list of str); the task fails with it, and nobody is asked.
        standing: what ``ds4_look`` found to stand on the host. When that is what would be staged, nobody is asked again.
        tell: lines to show for a host that was staged (list of str).
        templates: where to put which rendered template of the role: ``{files: {name: template}, helpers: [name]}``.
            The lookup ``template`` would do the same at several times the cost: it copies all variables each time.
    """

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        patience = float(arguments.pop("patience_seconds", 120))
        limit = float(arguments.pop("limit_seconds", 7200))
        templates = arguments.pop("templates", {})
        standing = arguments.pop("standing", {})
        told = list(map(str, arguments.pop("tell", [])))
        refused = list(arguments.pop("refuse", []))
        host = (task_vars or {}).get("inventory_hostname", "")
        if refused:
            first = f"{host}: {len(refused)} problem(s) in the settings of the engine; the engine was not touched."
            return {**result, "failed": True, "msg": "\n".join([first, *map(str, refused)])}
        if templates:
            arguments["deployment"] = dict(arguments["deployment"])
            files = {name: self._render(template, task_vars) for name, template in templates["files"].items()}
            arguments["deployment"]["files"] = {**arguments["deployment"]["files"], **files}
            arguments["helpers"] = {name: self._render(f"{name}.j2", task_vars) for name in templates["helpers"]}
        if arguments.get("state") == "staged":
            there = self._as_it_stands(arguments, standing) if standing else None
            there = there or self._call(arguments, task_vars)
            if told and not there.get("failed"):
                display.display("\n  ".join([f"{host}, if applied:", *told]), color="yellow")
            return {**result, **there}
        if arguments.get("state") not in ("active", "proven", "rolled_back"):
            return {**result, **self._call(arguments, task_vars)}
        following, run_name = "", uuid.uuid4().hex
        shown: list[str] = []

        def ask() -> dict[str, Any]:
            more = {"wait_seconds": CALL_SECONDS, "steps_seen": len(shown), "transaction": following, "run": run_name}
            return self._call({**arguments, **more}, task_vars)

        def tell(answer: dict[str, Any]) -> None:
            nonlocal following
            record = answer.get("transaction") or {"id": "", "steps": []}
            if record["id"] != following:
                following = record["id"]
                shown.clear()
            steps = [step for step in record["steps"] if step["ok"] is not None]
            for step in steps[len(shown) :]:
                display.display(f"{host}: {step['name']}: {'' if step['ok'] else 'FAILED: '}{step['text']}")
            shown[:] = [step["name"] for step in steps]

        def away(seconds: float) -> None:
            display.display(f"{host}: not reachable for {seconds:.0f} s; its switch goes on by itself")

        answer = follow(
            ask,
            tell,
            lost=AnsibleConnectionFailure,
            patience_seconds=patience,
            limit_seconds=limit,
            away=away,
        )
        result.update(answer)
        if result.get("running"):
            steps = (result.get("transaction") or {}).get("steps")
            step = steps[-1]["name"] if steps else "its beginning"
            text = f"The switch still runs after {limit:.0f} s, in the step: {step}. Cure: run again, which follows it."
            summary = {"room": staging.ROOM, "state": "failed", "text": text}
            result.update(failed=True, msg=text, ds4_summary=summary)
        return result

    def _as_it_stands(self, arguments: dict[str, Any], standing: dict[str, Any]) -> dict[str, Any] | None:
        """The module's answer without a round trip, or None: the module finds out."""
        warn = arguments.get("warn", [])
        given = {name: value for name, value in arguments.items() if name in staging.OPTIONS}
        valid = ArgumentSpecValidator(staging.OPTIONS).validate(given)
        if valid.error_messages:
            return None
        try:
            there: dict[str, Any] | None = staging.stands(valid.validated_parameters, warn, standing)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None  # what only the way to a host makes plain, such as a date
        return there

    def _render(self, template: str, task_vars: dict[str, Any] | None) -> str:
        path = self._find_needle("templates", template)
        text = trust_as_template(self._loader.get_text_file_contents(path))
        templar = self._templar.copy_with_new_env(available_variables=task_vars, searchpath=os.path.dirname(path))
        return str(templar.template(text, escape_backslashes=False))

    def _call(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module("ds4_deployment", module_args=arguments, task_vars=task_vars)
        return answer
