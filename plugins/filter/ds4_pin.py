# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters over the pin: release tag → commit, generation, files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ansible.module_utils.ds4.pin import generation_errors, generation_files, known_files, resolve_pin
from ansible.module_utils.ds4.policies import contradictions


def ds4_weights_contradictions(policy: str, fetch: bool, rollback_waived: bool, paths: Sequence[str]) -> list[str]:
    """Settings about old generations that contradict one another, as sentences."""
    found = contradictions(policy, fetch=fetch, rollback_waived=rollback_waived, paths=paths)
    return [str(error) for error in found]


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "ds4_resolve_pin": resolve_pin,
            "ds4_generation_files": generation_files,
            "ds4_known_files": known_files,
            "ds4_generation_errors": generation_errors,
            "ds4_weights_contradictions": ds4_weights_contradictions,
        }
