# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters that write text for systemd: what was meant is what the process receives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

import ansible.module_utils
from ansible.errors import AnsibleFilterError

# On the controller ansible.module_utils is Ansible's own package only; ours lies beside this folder.
_UTILS = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "module_utils")
if _UTILS not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(_UTILS)

from ansible.module_utils.ds4 import systemd_text  # noqa: E402
from ansible.module_utils.ds4.errors import Ds4Error  # noqa: E402


def ds4_exec_line(arguments: Iterable[Any]) -> str:
    """Words of a command line, quoted for ``ExecStart=``."""
    try:
        return str(systemd_text.exec_line(str(argument) for argument in arguments))
    except Ds4Error as error:
        raise AnsibleFilterError(str(error)) from error


def ds4_unit_paths(paths: Iterable[Any]) -> str:
    """Paths, quoted for ``ReadWritePaths=`` and its like."""
    try:
        return str(systemd_text.path_list(str(path) for path in paths))
    except Ds4Error as error:
        raise AnsibleFilterError(str(error)) from error


def ds4_environment_file(environment: Mapping[str, Any]) -> str:
    """Variables, quoted for ``EnvironmentFile=``."""
    try:
        return str(systemd_text.environment_file({str(name): str(value) for name, value in environment.items()}))
    except Ds4Error as error:
        raise AnsibleFilterError(str(error)) from error


def ds4_option(arguments: Sequence[Any], name: str) -> list[str]:
    """Value of an option of a command line as a list of one; empty when it is not there. The last occurrence wins."""
    words = [str(word) for word in arguments]
    return [words[index + 1] for index in range(len(words) - 1) if words[index] == name][-1:]


class FilterModule:
    """Jinja filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "ds4_exec_line": ds4_exec_line,
            "ds4_unit_paths": ds4_unit_paths,
            "ds4_environment_file": ds4_environment_file,
            "ds4_option": ds4_option,
        }
