# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Judge everything an operator wrote, for one host, before any host is contacted: all findings in one message."""

from __future__ import annotations

import contextlib
import difflib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.release import __version__ as core_version

CORE_MINIMUM = (2, 19)
CORE_BELOW = (2, 22)
PYTHON_MINIMUM = (3, 11)
# What only a later part of the run knows: results, and what roles offer.
ROOMS = "agent_clients|cuda_build|engine_service|host_base|host_verify|serving_mode|smoke_test|weights"
LATER = re.compile(rf"\b(?:{ROOMS})_(?:\w*result|arguments|look)\b|host_verify_\w+|smoke_test_\w+")

# What Ansible itself sets for each host or task.
OF_ANSIBLE = frozenset(
    ("_task", "environment", "group_names", "groups", "hostvars", "inventory_dir", "inventory_file", "inventory_hostname", "inventory_hostname_short",
     "omit", "play_hosts", "playbook_dir", "role_names", "vars")
)  # fmt: skip


class ActionModule(ActionBase):
    """Controller-only; needs no connection.

    Arguments of the task:
        roles_path: folder that holds the roles whose argument_specs count.
        group_vars_path: folder of our group_vars; every name in it is a variable of ours.
        renamed: mapping old name → new name; an old name in use is a finding.
        bounds: mapping variable → ``{least, most, why}`` (both bounds optional).
        findings: further findings computed by the caller (list of str).
        shared: variables that many others refer to (list of str): resolved once, which saves most of the time.
    """

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("roles_path", "group_vars_path", "renamed", "bounds", "findings", "shared"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        judged = _alike(variables)
        if judged:
            return {**result, "changed": False, "msg": f"As {judged}, whose inputs are judged."}
        findings = _controller_findings()
        if not findings:  # with an unsupported core the rest would only add noise
            specs = {"ds4": dict(variables["ds4_variables"]), **_read_specs(Path(self._task.args["roles_path"]))}
            findings += self._unknown_names(specs, variables)
            findings += self._wrong_values(specs, variables)
            findings += [str(item) for item in self._task.args.get("findings") or []]
        if findings:
            host = variables.get("inventory_hostname", "this host")
            lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(findings, 1))
            result.update(
                failed=True,
                msg=f"{host}: {len(findings)} problem(s) in what was asked for; nothing was touched.\n{lines}",
                findings=findings,
                ds4_summary={"room": "validate", "state": "failed", "text": findings[0]},
            )
        else:
            result.update(changed=False, msg="Inputs are valid.")
        return result

    def _unknown_names(self, specs: dict[str, dict[str, Any]], variables: dict[str, Any]) -> list[str]:
        """A misspelt variable would be silently ignored, so a name that begins like ours must be ours."""
        renamed: dict[str, str] = self._task.args.get("renamed") or {}
        known = {option for spec in specs.values() for option in spec} | self._registered()
        for path in Path(self._task.args["group_vars_path"]).glob("*.yml"):
            known |= set(_load(path) or {})
        prefixes = re.compile(r"^(?:spark|" + "|".join(sorted(specs)) + r")_")
        findings = []
        for name in sorted(variables):
            if name in renamed:
                findings.append(f"Variable {name} was renamed. Cure: write {renamed[name]} instead.")
            elif prefixes.match(name) and name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
                hint = f"did you mean {near[0]}?" if near else "docs/variables.md lists all names."
                findings.append(f"Variable {name} is not known. Cure: remove it or correct its name; {hint}")
        return findings

    def _registered(self) -> set[str]:
        """What tasks of ours register and set: still there when another playbook of ours follows in the same command."""
        texts = [path.read_text(encoding="utf-8") for path in Path(self._task.args["roles_path"]).glob("*/tasks/*.yml")]
        return {name for text in texts for name in re.findall(r"^ +register: (\w+)$", text, re.M)}

    def _role_variables(self) -> dict[str, Any]:
        """Defaults and constants of every role: what an operator wrote may refer to them, as it may inside the role."""
        found: dict[str, Any] = {}
        for folder in ("defaults", "vars"):
            for path in sorted(Path(self._task.args["roles_path"]).glob(f"*/{folder}/main.yml")):
                found.update(self._loader.load_from_file(str(path), cache="none", trusted_as_template=True) or {})
        return found

    def _wrong_values(self, specs: dict[str, dict[str, Any]], variables: dict[str, Any]) -> list[str]:
        findings = []
        resolve = _Resolver(self._templar, variables, self._role_variables)
        resolve.once(self._task.args.get("shared") or [])
        for role, options in specs.items():
            values: dict[str, Any] = {}
            for option in options:
                if option not in variables:
                    continue
                try:
                    values[option] = resolve(option)
                except Exception as error:  # any template error is a finding, unless it waits for a later result
                    if not LATER.search(f"{error}{variables[option]}"):
                        findings.append(f"Variable {option} cannot be resolved: {error}")
            checked = {name: {**spec, "required": False, "default": None} for name, spec in options.items()}
            outcome = ArgumentSpecValidator(checked).validate(values)
            findings += [
                f"Role {role}: {message}. Cure: correct the value in your inventory."
                for message in outcome.error_messages
            ]
            if not outcome.error_messages:
                findings += self._out_of_bounds(outcome.validated_parameters)
        return findings

    def _out_of_bounds(self, values: dict[str, Any]) -> list[str]:
        findings = []
        for name, bound in (self._task.args.get("bounds") or {}).items():
            value = values.get(name)
            least, most = bound.get("least"), bound.get("most")
            if value is None or ((least is None or value >= least) and (most is None or value <= most)):
                continue
            wanted = f"{least} or more" if most is None else f"{least} to {most}"
            findings.append(
                f"Variable {name} is {value:g}; required: {wanted}, since {bound['why']}. Cure: correct it."
            )
        return findings


def _alike(variables: dict[str, Any]) -> str:
    """The first host of the play, when this one has the same variables; a play that fails there ends for all (validate.yml)."""
    hosts = variables.get("ansible_play_hosts_all") or []
    if not hosts or hosts[0] == variables.get("inventory_hostname"):
        return ""
    first = variables["hostvars"].raw_get(hosts[0])
    names = {name for name in {*variables, *first} if not name.startswith("ansible_")} - OF_ANSIBLE
    alike = all(variables.get(name, OF_ANSIBLE) == first.get(name, OF_ANSIBLE) for name in names)
    return str(hosts[0]) if alike else ""


class _Resolver:
    """Values of variables. What many others stand on is resolved once; defaults of roles are read only where one is missing."""

    def __init__(self, templar: Any, variables: dict[str, Any], more: Callable[[], dict[str, Any]]) -> None:
        self._templar = templar
        self._variables = variables
        self._more: Callable[[], dict[str, Any]] | None = more
        self._know(variables)

    def _know(self, variables: dict[str, Any]) -> None:
        self._known = variables
        self._engine = self._templar.copy_with_new_env(available_variables=variables)

    def once(self, names: Iterable[str]) -> None:
        """Resolve variables for all that refer to them; one that cannot be resolved is met again where it counts."""
        for name in names:
            with contextlib.suppress(Exception):
                self._know({**self._known, name: self(name)})

    def __call__(self, name: str) -> Any:
        value = self._variables[name]
        try:
            return self._engine.template(value)
        except Exception as error:
            if self._more is None or LATER.search(f"{error}{value}"):
                raise
            more, self._more = self._more(), None
            self._know({**more, **self._known})
            return self._engine.template(value)


def _load(path: Path) -> Any:
    """A YAML file of ours, by the C loader where there is one: many of them are read for every host."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506, both are safe


def _controller_findings() -> list[str]:
    found = tuple(int(part) for part in re.findall(r"\d+", core_version)[:2])
    findings = []
    if not CORE_MINIMUM <= found < CORE_BELOW:
        findings.append(
            f"ansible-core {core_version} runs this playbook; required: 2.19 to 2.21. "
            "Cure: `make venv` in the repository, then run `.venv/bin/ansible-playbook` (or `make apply`)."
        )
    if sys.version_info[:2] < PYTHON_MINIMUM:
        findings.append(
            f"The controller's Python is {sys.version.split()[0]}; required: 3.11 or newer. Cure: `make venv` finds one."
        )
    return findings


def _read_specs(roles_path: Path) -> dict[str, dict[str, Any]]:
    """Options of every entry point of every role, merged per role."""
    specs: dict[str, dict[str, Any]] = {}
    for path in sorted(roles_path.glob("*/meta/argument_specs.yml")):
        entries = _load(path)["argument_specs"]
        specs[path.parent.parent.name] = {
            name: spec for entry in entries.values() for name, spec in (entry.get("options") or {}).items()
        }
    return specs
