# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters over the hosts of a play: who is switched, in which batch, when it ends early, and what a host's status is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ansible.module_utils

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside this folder.
_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)

from ansible.module_utils.ds4 import rollout, status  # noqa: E402


def _true(value: Any) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")


def ds4_rollout(
    hosts: Sequence[str], hostvars: Mapping[str, Any], present: Sequence[str], batches: Sequence[Any]
) -> dict[str, Any]:
    """Plan of the rollout, see ds4.rollout.plan."""
    facts = {}
    for host in hosts:
        variables = hostvars[host]
        staged = variables.get("engine_service_result") or {}
        facts[str(host)] = {
            "staged": staged.get("deployment") if not staged.get("failed") else None,
            "drained": _true(variables.get("engine_service_drained", False)),
            "more": str(variables.get("engine_service_more_to_do") or ""),
            "obstacles": str(variables.get("engine_service_obstacles") or ""),
        }
    plan = rollout.plan([str(host) for host in hosts], [str(host) for host in present], facts, list(batches))
    return {**plan, "made": time.time()}


def ds4_rollout_hosts(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> list[str]:
    """Hosts to switch by the newest plan; a host that was absent from it may still have an older one."""
    plans = [hostvars[host].get("__engine_service_rollout") or {} for host in hosts if host in hostvars]
    newest: Mapping[str, Any] = max(plans, key=lambda plan: float(plan.get("made", 0)), default={})
    return [str(host) for host in newest.get("switch", [])]


def ds4_rollout_halt(
    order: Sequence[str], batch: Sequence[str], hostvars: Mapping[str, Any], batches: Sequence[Any], allowed: float = 0
) -> str:
    """Why a batch must not begin, see ds4.rollout.halt."""
    outcomes = {str(host): str(hostvars[host].get("__engine_service_outcome", "")) for host in order}
    return str(
        rollout.halt([str(host) for host in order], [str(host) for host in batch], outcomes, list(batches), allowed)
    )


def ds4_status(query: Mapping[str, Any], host: str, staged: Any, release: str, unknown: str = "") -> dict[str, Any]:
    """Status of one host, see ds4.status.describe."""
    return dict(status.describe(query, str(host), staged or None, str(release), str(unknown)))


class FilterModule:
    """Jinja filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "ds4_rollout": ds4_rollout,
            "ds4_rollout_hosts": ds4_rollout_hosts,
            "ds4_rollout_halt": ds4_rollout_halt,
            "ds4_status": ds4_status,
        }
