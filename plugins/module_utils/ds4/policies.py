# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What may happen to old generations of weights, and settings about it that contradict one another."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import Ds4Error

KEEP, AFTER_SMOKE, BEFORE_FETCH = "keep", "remove_after_smoke", "remove_before_fetch"
POLICIES = (KEEP, AFTER_SMOKE, BEFORE_FETCH)


def contradictions(policy: str, *, fetch: bool, rollback_waived: bool, paths: Sequence[str]) -> list[Ds4Error]:
    """Pairs of settings of which the one forbids what the other asks for."""
    found = []
    if policy == BEFORE_FETCH and not rollback_waived:
        found.append(
            Ds4Error(
                "weights_old_generation: remove_before_fetch deletes what a rollback would start",
                found="weights_rollback_waived: false",
                required="weights_rollback_waived: true, or another policy",
                cure="set weights_rollback_waived: true if you can do without a way back",
            )
        )
    if policy == BEFORE_FETCH and not fetch:
        found.append(
            Ds4Error(
                "weights_old_generation: remove_before_fetch contradicts weights_fetch: false",
                found="the old files would go and nothing would come",
                cure="set weights_fetch: true, or weights_old_generation: keep",
            )
        )
    if policy == KEEP and paths:
        found.append(
            Ds4Error(
                "weights_old_generation: keep contradicts weights_clean_paths",
                found="one keeps, the other removes",
                cure="set weights_old_generation: remove_after_smoke, or empty weights_clean_paths",
            )
        )
    return found


def require_consistent(policy: str, *, fetch: bool, rollback_waived: bool, paths: Sequence[str]) -> None:
    """Refuse settings that contradict one another.

    Raises:
        Ds4Error: which two do.
    """
    for error in contradictions(policy, fetch=fetch, rollback_waived=rollback_waived, paths=paths):
        raise error
