# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that turn settings into what the engine and its clients read. Doors only; the work is in ds4.settings and friends."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Callable, Optional

import ansible.module_utils
import yaml
from ansible.errors import AnsibleFilterError

PLUGINS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
DATA_FILE = os.path.join(os.path.dirname(PLUGINS), "roles", "engine_service", "vars", "settings.yml")

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside it, under the same name as in modules.
if os.path.join(PLUGINS, "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(os.path.join(PLUGINS, "module_utils"))

from ansible.module_utils.ds4 import catalogue as codex  # noqa: E402
from ansible.module_utils.ds4 import clients, probe, profiles  # noqa: E402
from ansible.module_utils.ds4 import settings as mechanism  # noqa: E402
from ansible.module_utils.ds4.errors import Ds4Error  # noqa: E402


@functools.lru_cache(maxsize=1)
def shipped_catalogue() -> dict[str, Any]:
    """The data file of settings that belongs to this copy of the filters."""
    with open(DATA_FILE, encoding="utf-8") as stream:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return dict(yaml.load(stream, Loader=loader)["__engine_service_catalogue"])  # noqa: S506, both are safe


def ds4_engine_config(
    settings: Mapping[str, Any], catalogue: Optional[Mapping[str, Any]] = None, **options: Any
) -> dict[str, Any]:
    """Arguments and environment of ds4-server; see ds4.settings.engine_config for options and result."""
    try:
        return dict(mechanism.engine_config(settings, catalogue or shipped_catalogue(), **options))
    except (KeyError, TypeError) as error:
        raise AnsibleFilterError(f"ds4_engine_config was called wrongly: {error!r}") from error


def ds4_codex_catalogue(context: Any, base_instructions: str = "") -> str:
    """Text of the catalogue that Codex reads from /v1/models, for a context in tokens."""
    return str(codex.catalogue_text(int(context), str(base_instructions or "")))


def ds4_profile_arithmetic(config: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Banks, memory and charges of a configuration on a host; see ds4.profiles.arithmetic."""
    return dict(
        profiles.arithmetic(mechanism.plain(config), shipped_catalogue()["figures"], **mechanism.plain(options))
    )


def ds4_served(answer: Any) -> dict[str, Any]:
    """Model, context, longest answer and Codex catalogue from the engine's /v1/models; see ds4.clients.served."""
    try:
        return dict(clients.served(mechanism.plain(answer)))
    except Ds4Error as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Jinja filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        shipped_catalogue()  # once, in the process that all workers are forked from
        return {
            "ds4_engine_config": ds4_engine_config,
            "ds4_codex_catalogue": ds4_codex_catalogue,
            "ds4_profile_arithmetic": ds4_profile_arithmetic,
            "ds4_question_errors": probe.question_errors,
            "ds4_served": ds4_served,
        }
