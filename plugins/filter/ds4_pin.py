# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters over the pin: release tag → commit, generation, files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.module_utils.ds4.pin import generation_errors, generation_files, known_files, resolve_pin


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "ds4_resolve_pin": resolve_pin,
            "ds4_generation_files": generation_files,
            "ds4_known_files": known_files,
            "ds4_generation_errors": generation_errors,
        }
