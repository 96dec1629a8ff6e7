# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters of host_verify: judge a host, compare a fleet."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ansible.module_utils
from ansible.errors import AnsibleFilterError

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside it, under the same name as in modules.
MODULE_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if MODULE_UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(MODULE_UTILS)

from ansible.module_utils.ds4.errors import Ds4Error  # noqa: E402
from ansible.module_utils.ds4.findings import fleet_drift, judge_host  # noqa: E402


def ds4_findings(
    look: Mapping[str, Any],
    policy: Mapping[str, Any],
    catalogue: Mapping[str, Any],
    name: str = "this host",
    drift: Sequence[str] = (),
) -> dict[str, Any]:
    """See ``ds4.findings.judge_host``; the host's clock is compared with this machine's.

    Args:
        look: result of ``ds4_look``; one that failed as a whole failed in every part.
    """
    gpu, memory, host = (look.get(part, look) for part in ("gpu", "memory", "host"))
    try:
        return dict(judge_host(gpu, memory, host, policy, catalogue, name=name, now=time.time(), drift=drift))
    except Ds4Error as error:
        raise AnsibleFilterError(f"{name}: {error}") from error


def ds4_fleet_drift(hostvars: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, list[str]]:
    """Host → in what it differs from the majority of ``hosts``; hosts without probes are left out."""
    probes = {}
    for name in hosts:
        variables = hostvars[name]
        look = variables.get("host_verify_look", {})
        if "host" in look and "gpu" in look:
            probes[str(name)] = {"host": look["host"], "gpu": look["gpu"]}
    return dict(fleet_drift(probes))


class FilterModule:
    """Ansible's entry point."""

    def filters(self) -> dict[str, Any]:
        return {"ds4_findings": ds4_findings, "ds4_fleet_drift": ds4_fleet_drift}
