# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Text that systemd reads back exactly as it was meant: command lines, environment files, and a unit's directives.

Sources of the rules: systemd.service(5) "COMMAND LINES", systemd.exec(5) "EnvironmentFile=", systemd.syntax(7).
What cannot be written safely is refused: systemd drops such a value with no more than a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .errors import Ds4Error

_PLAIN_ARGUMENT = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_./:=,@+-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _refuse_unreadable(value: str, where: str, allowed_controls: str) -> None:
    """Stop at what systemd does not accept in a value: NUL, control characters, surrogates, noncharacters."""
    for char in value:
        code = ord(char)
        control = (code < 0x20 and char not in allowed_controls) or code == 0x7F
        nonchar = 0xD800 <= code <= 0xDFFF or 0xFDD0 <= code <= 0xFDEF or (code & 0xFFFE) == 0xFFFE
        if control or nonchar:
            raise Ds4Error(
                f"{where} contains a character that systemd does not accept",
                found=f"U+{code:04X} as character {value.index(char) + 1}",
                required="printable text" + (", tabs and newlines" if allowed_controls else ""),
                cure=f"remove the character from {where}",
            )


def exec_argument(value: str) -> str:
    """One argument of an ``ExecStart=`` line, quoted so that the process receives exactly ``value``.

    ``%`` and ``$`` are doubled, since systemd expands specifiers and variables inside quotes too.

    Raises:
        Ds4Error: a NUL, a surrogate or another character that no unit file can carry.
    """
    _refuse_unreadable(value, "a command line argument", "\t\n")
    if _PLAIN_ARGUMENT.fullmatch(value):
        return value
    text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return '"' + text.replace("%", "%%").replace("$", "$$") + '"'


def exec_line(arguments: Iterable[str]) -> str:
    """A whole command line for ``ExecStart=``."""
    return " ".join(exec_argument(argument) for argument in arguments)


def path_list(paths: Iterable[str]) -> str:
    """Paths for a directive that takes several, such as ``ReadWritePaths=``: quoted at spaces, ``%`` doubled.

    Raises:
        Ds4Error: a character that no unit file can carry.
    """
    words = []
    for path in paths:
        _refuse_unreadable(path, "a path", "")
        quoted = '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
        words.append(path if _PLAIN_ARGUMENT.fullmatch(path) else quoted)
    return " ".join(words)


def environment_file(environment: Mapping[str, str]) -> str:
    """Body of an ``EnvironmentFile=``: one variable a line, sorted, quoted where needed.

    Nothing is expanded in such a file; inside double quotes a backslash protects only a double quote, a backslash, a backtick and a dollar sign.

    Raises:
        Ds4Error: a name that is no variable name, or a value systemd would silently drop.
    """
    lines = []
    for name in sorted(environment):
        if not _NAME.fullmatch(name):
            raise Ds4Error(
                "The environment has a name that is no variable name",
                found=repr(name),
                required="letters, digits and underscores, not beginning with a digit",
                cure="correct the name in engine_service_extra_env",
            )
        value = environment[name]
        _refuse_unreadable(value, f"the value of {name}", "\t\n")
        if not _PLAIN_VALUE.fullmatch(value):
            value = '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def directives(unit: str) -> list[str]:
    """What systemd acts on in a unit file: section headers and assignments in order, without comments and blank lines."""
    found: list[str] = []
    continued = False
    for raw in unit.splitlines():
        line = raw.strip()
        if not line or line[0] in "#;":  # a comment neither ends nor joins a continued line
            continue
        more = line.endswith("\\")
        line = line[:-1].rstrip() if more else line
        if continued:
            found[-1] += " " + line
        else:
            found.append(line)
        continued = more
    return found


def deployment_of(unit: str) -> str:
    """Deployment id that a unit file of ours starts, or an empty string."""
    found = re.search(r"^Environment=DS4_DEPLOYMENT=([0-9a-f]+)$", unit, re.MULTILINE)
    return found.group(1) if found else ""
