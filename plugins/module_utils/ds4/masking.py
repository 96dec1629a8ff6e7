# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Values that bear the name of a secret are shown to nobody: not in a diff, a log, a status or a result."""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "***"
OTHER = "*** (another one)"  # a change is worth telling, what it changed to is not
# A quoted value may have lines.
_ASSIGNMENT = re.compile(r'^([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\n]*)', re.MULTILINE | re.DOTALL)
# The engine counts in tokens (--kv-cache-min-tokens, DS4_SERVER_SERIAL_MAX_TOKENS), and has a tokenizer.
_SECRET = re.compile(r"token(?!s|iz)|secret|passw|key", re.IGNORECASE)


def is_secret(text: str) -> bool:
    """True for the name of a secret, and for a text that has one in it."""
    return bool(_SECRET.search(text))


def masked(name: str, value: str) -> str:
    """``value`` as it may be shown."""
    return MASK if is_secret(name) and value else value


def masked_file(text: str, known: str = "") -> str:
    """An environment file as it may be shown; a secret with another value than in the text ``known`` is told to be another one."""
    before = dict(_ASSIGNMENT.findall(known))

    def show(found: re.Match[str]) -> str:
        name, value = found.groups()
        if not is_secret(name):
            return found.group()
        return f"{name}={MASK if before.get(name, value) == value else OTHER}"

    return _ASSIGNMENT.sub(show, text)


def masked_environment(environment: Mapping[str, str], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables as they may be shown; a secret with another value than in ``known`` is told to be another one."""
    shown = {}
    for name, value in environment.items():
        before = (known or {}).get(name, value)
        shown[name] = masked(name, value) if before == value or not is_secret(name) else OTHER
    return shown
