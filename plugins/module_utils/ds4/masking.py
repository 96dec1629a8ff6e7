# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Values that bear the name of a secret are shown to nobody: not in a diff, a log, a status or a result."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"
OTHER = "*** (another one)"  # a change is worth telling, what it changed to is not
_SECRET = re.compile(r"token|secret|passw|key", re.IGNORECASE)


def is_secret(text: str) -> bool:
    """True for the name of a secret, and for a text that has one in it."""
    return bool(_SECRET.search(text))


def masked(name: str, value: str) -> str:
    """``value`` as it may be shown."""
    return MASK if is_secret(name) and value else value


def masked_environment(environment: Mapping[str, str], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables as they may be shown; a secret with another value than in ``known`` is told to be another one."""
    shown = {}
    for name, value in environment.items():
        before = (known or {}).get(name, value)
        shown[name] = masked(name, value) if before == value or not is_secret(name) else OTHER
    return shown
