# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The one shape of an expected failure: what failed, what was found, what is required, what cures it."""

from __future__ import annotations

from typing import Any


class Ds4Error(Exception):
    """An expected condition that stops the work. Doors turn it into a message, never into a traceback.

    Args:
        what: one sentence: what failed.
        found: the measured value, with its unit; empty when there is none.
        required: what was needed; empty when there is nothing to compare.
        cure: the variable or command that cures it.
        evidence: structured details (log tail, hashes, pids); must be JSON-able and free of secrets.
    """

    def __init__(
        self, what: str, *, found: str = "", required: str = "", cure: str = "", evidence: dict[str, Any] | None = None
    ) -> None:
        super().__init__(what)
        self.what = what
        self.found = found
        self.required = required
        self.cure = cure
        self.evidence: dict[str, Any] = evidence or {}

    def __str__(self) -> str:
        parts = [self.what.rstrip(".") + "."]
        if self.found:
            parts.append(f"Found: {self.found}.")
        if self.required:
            parts.append(f"Required: {self.required}.")
        if self.cure:
            parts.append(f"Cure: {self.cure.rstrip('.')}.")
        return " ".join(parts)

    def result(self) -> dict[str, Any]:
        """Keyword arguments for ``module.fail_json`` and the body of ``--json`` output."""
        return {
            "msg": str(self),
            "error": {
                "what": self.what,
                "found": self.found,
                "required": self.required,
                "cure": self.cure,
                "evidence": self.evidence,
            },
        }
