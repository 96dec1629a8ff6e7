# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Change single keys in TOML and JSON files that somebody else wrote, leaving every other byte as it is.

Python 3.9 has no TOML reader and no version has a writer, and a JSON file written anew loses its layout and its comments. So
both formats are walked here just far enough to know where a statement or a member begins and ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .errors import Ds4Error

# -------------------------------------------------------------------------------------------------- JSON


class _Member(NamedTuple):
    key: str
    start: int  # of the key's quote
    value: int  # first character of the value
    end: int  # after the value


def _bad_json(path: str, why: str) -> Ds4Error:
    return Ds4Error(
        f"{path} cannot be read",
        found=why,
        required="JSON (comments are allowed)",
        cure="correct the file, or move it away so that a new one can be written",
    )


def _skip(text: str, position: int) -> int:
    """Past white space and comments."""
    while position < len(text):
        if text[position] in " \t\r\n\ufeff":
            position += 1
        elif text.startswith("//", position):
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif text.startswith("/*", position):
            end = text.find("*/", position + 2)
            position = len(text) if end < 0 else end + 2
        else:
            break
    return position


def _string_end(text: str, position: int) -> int:
    end = position + 1
    while end < len(text):
        if text[end] == "\\":
            end += 2
        elif text[end] == '"':
            return end + 1
        else:
            end += 1
    raise ValueError("a string does not end")


def _value_end(text: str, position: int) -> int:
    """After the value that begins at ``position``."""
    if position >= len(text):
        raise ValueError("the text ends where a value is due")
    if text[position] == '"':
        return _string_end(text, position)
    if text[position] in "{[":
        depth = 0
        while position < len(text):
            position = _skip(text, position)
            if position >= len(text):
                break
            if text[position] == '"':
                position = _string_end(text, position)
                continue
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(text[position], 0)
            position += 1
            if depth == 0:
                return position
        raise ValueError("a bracket is not closed")
    end = position
    while end < len(text) and text[end] not in ",}] \t\r\n/":
        end += 1
    if end == position:
        raise ValueError(f"unexpected {text[position]!r}")
    return end


def _members(text: str, start: int) -> tuple[list[_Member], int]:
    """Members of the object that begins at ``start``, and the position of its closing brace."""
    if start >= len(text) or text[start] != "{":
        raise ValueError("an object is due")
    members: list[_Member] = []
    position = _skip(text, start + 1)
    while position < len(text) and text[position] != "}":
        if text[position] != '"':
            raise ValueError(f"a key in quotes is due, not {text[position]!r}")
        end = _string_end(text, position)
        key = json.loads(text[position:end])
        colon = _skip(text, end)
        if colon >= len(text) or text[colon] != ":":
            raise ValueError(f"no colon after {key!r}")
        value = _skip(text, colon + 1)
        stop = _value_end(text, value)
        members.append(_Member(key, position, value, stop))
        position = _skip(text, stop)
        if position < len(text) and text[position] == ",":
            position = _skip(text, position + 1)
        elif position < len(text) and text[position] != "}":
            raise ValueError(f"a comma is due after {key!r}")
    if position >= len(text):
        raise ValueError("a brace is not closed")
    return members, position


def _root(text: str, path: str) -> int:
    start = _skip(text, 0)
    try:
        _, end = _members(text, start)
    except ValueError as error:
        raise _bad_json(path, str(error)) from None
    if _skip(text, end + 1) != len(text):
        raise _bad_json(path, "something follows the closing brace")
    return start


def _plain_json(text: str) -> Any:
    """Value of a piece of JSON with comments and trailing commas."""
    kept: list[str] = []
    position = 0
    while position < len(text):
        if text[position] == '"':
            end = _string_end(text, position)
            kept.append(text[position:end])
        else:
            end = _skip(text, position)
            if end == position:
                end = position + 1
                kept.append(text[position])
        position = end
    joined = "".join(kept)
    return json.loads(_without_trailing_commas(joined))


def _without_trailing_commas(text: str) -> str:
    out: list[str] = []
    position = 0
    while position < len(text):
        end = _string_end(text, position) if text[position] == '"' else position + 1
        piece = text[position:end]
        if piece in "}]" and out and out[-1] == ",":
            out.pop()
        out.append(piece)
        position = end
    return "".join(out)


def json_get(text: str, key: Sequence[str], path: str = "the file") -> tuple[bool, Any]:
    """Whether a member exists, and its value.

    Raises:
        Ds4Error: the text is no JSON object.
    """
    start = _root(text, path)
    try:
        for depth, name in enumerate(key):
            if text[start] != "{":
                raise _blocked(path, key[:depth])
            found = [member for member in _members(text, start)[0] if member.key == name]
            if not found:
                return False, None
            start = found[-1].value
        return True, _plain_json(text[start : _value_end(text, start)])
    except ValueError as error:
        raise _bad_json(path, str(error)) from None


def _blocked(path: str, key: Sequence[str]) -> Ds4Error:
    return Ds4Error(
        f"{path} holds something else where a group of keys belongs",
        found=f"{'.'.join(key)} is no object",
        required="an object, or nothing",
        cure=f"correct {'.'.join(key)} in that file",
    )


def _indent(text: str) -> str:
    found = re.search(r"\n([ \t]+)\S", text)
    return found.group(1) if found else "  "


def json_set(text: str, key: Sequence[str], value: Any, path: str = "the file") -> str:
    """The text with one member set; everything else stays, comments included."""
    start = _root(text, path)
    unit = _indent(text)
    for depth, name in enumerate(key):
        if text[start] != "{":
            raise _blocked(path, key[:depth])
        members, closing = _members(text, start)
        found = [member for member in members if member.key == name]
        if found and depth < len(key) - 1:
            start = found[-1].value
            continue
        margin = unit * (depth + 1)
        rest: Any = value
        for outer in reversed(key[depth + 1 :]):
            rest = {outer: rest}
        dumped = json.dumps(rest, indent=unit, ensure_ascii=False).replace("\n", "\n" + margin)
        if found:
            return text[: found[-1].value] + dumped + text[found[-1].end :]
        entry = f"{json.dumps(name, ensure_ascii=False)}: {dumped}"
        if not members:
            return f"{text[: start + 1]}\n{margin}{entry}\n{unit * depth}{text[closing:]}"
        last = members[-1].end
        comma = _skip(text, last)
        if text[comma] == ",":  # a trailing comma, as comments-allowed JSON may have
            return f"{text[: comma + 1]}\n{margin}{entry},{text[comma + 1 :]}"
        return f"{text[:last]},\n{margin}{entry}{text[last:]}"
    raise ValueError("an empty key")


def json_remove(text: str, key: Sequence[str], path: str = "the file") -> str:
    """The text without one member; groups that become empty by it go too."""
    start = _root(text, path)
    trail: list[tuple[int, int]] = []  # (object start, index of the member that leads on)
    for name in key:
        if text[start] != "{":
            return text
        members, _closing = _members(text, start)
        at = [index for index, member in enumerate(members) if member.key == name]
        if not at:
            return text
        trail.append((start, at[-1]))
        start = members[at[-1]].value
    while trail:
        begin, index = trail.pop()
        text = _drop(text, begin, index)
        if not trail or _members(text, begin)[0]:
            break
    return text


def _drop(text: str, begin: int, index: int) -> str:
    members, closing = _members(text, begin)
    member = members[index]
    after = _skip(text, member.end)
    if text[after] == ",":
        after += 1
        line_end = re.compile(r"[ \t]*\r?\n").match(text, after)
        line_start = text.rfind("\n", 0, member.start) + 1
        if line_end and not text[line_start : member.start].strip():
            return text[:line_start] + text[line_end.end() :]
        return text[: member.start] + text[after:].lstrip(" ")
    if index:  # the last one: the comma before it goes, and what lies between
        previous = members[index - 1].end
        return text[:previous] + text[member.end :]
    return text[: begin + 1] + text[closing:]


# -------------------------------------------------------------------------------------------------- TOML


class _Statement(NamedTuple):
    kind: str  # table | array | key
    key: tuple[str, ...]
    table: tuple[str, ...]  # the table it stands in; its own for a header
    first: int  # lines, both inclusive
    last: int


def _bad_toml(path: str, line: int, why: str) -> Ds4Error:
    return Ds4Error(
        f"{path} cannot be read",
        found=f"line {line}: {why}",
        required="TOML",
        cure="correct the file, or move it away so that a new one can be written",
    )


_KEY_PART = re.compile(r"""\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')\s*""")


def _read_key(text: str, position: int) -> tuple[tuple[str, ...], int]:
    parts: list[str] = []
    while True:
        found = _KEY_PART.match(text, position)
        if not found:
            raise ValueError("a key is due")
        bare, quoted, literal = found.groups()
        parts.append(bare if bare is not None else literal if literal is not None else json.loads(f'"{quoted}"'))
        position = found.end()
        if position < len(text) and text[position] == ".":
            position += 1
            continue
        return tuple(parts), position


def _toml_value_end(text: str, position: int) -> int:
    """Position of the line end that ends the value beginning at ``position``."""
    depth = 0
    while position < len(text):
        char = text[position]
        if text.startswith('"""', position) or text.startswith("'''", position):
            quote = text[position : position + 3]
            end = position + 3
            while not text.startswith(quote, end):
                if end >= len(text):
                    raise ValueError("a multi-line string does not end")
                end += 2 if quote == '"""' and text[end] == "\\" else 1
            position = end + 3
            while position < len(text) and text[position] == quote[0]:  # up to two quotes may end the content
                position += 1
            continue
        if char == '"':
            position = _string_end(text, position)
            continue
        if char == "'":
            end = text.find("'", position + 1)
            if end < 0:
                raise ValueError("a string does not end")
            position = end + 1
            continue
        if char == "#":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "\n" and depth <= 0:
            return position
        position += 1
    if depth > 0:
        raise ValueError("a bracket is not closed")
    return position


def _statements(text: str, path: str) -> list[_Statement]:
    """Headers and assignments with the lines they take."""
    found: list[_Statement] = []
    table: tuple[str, ...] = ()
    position = 0
    while position < len(text):
        line_end = text.find("\n", position)
        line_end = len(text) if line_end < 0 else line_end
        line = text[position:line_end].strip()
        number = text.count("\n", 0, position)
        if not line or line.startswith("#"):
            position = line_end + 1
            continue
        try:
            if line.startswith("["):
                double = line.startswith("[[")
                table, _ = _read_key(text, text.index("[", position) + (2 if double else 1))
                found.append(_Statement("array" if double else "table", table, table, number, number))
                position = line_end + 1
                continue
            key, after = _read_key(text, position)
            if after >= len(text) or text[after] != "=":
                raise ValueError(f"no = after {'.'.join(key)}")
            end = _toml_value_end(text, after + 1)
        except ValueError as error:
            raise _bad_toml(path, number + 1, str(error)) from None
        found.append(_Statement("key", table + key, table, number, text.count("\n", 0, end)))
        position = end + 1
    return found


def _markers(name: str) -> tuple[str, str, str]:
    return (
        f"# >>> ds4-fleet {name}: what stands between these lines is written by ds4-fleet",
        f"# <<< ds4-fleet {name}",
        f"# ds4-fleet {name} put aside: ",
    )


class Claim(NamedTuple):
    """What is ours in a TOML file: keys of its top level, and keys of one table."""

    top: frozenset[str]
    table: tuple[str, ...]
    keys: frozenset[str]

    def holds(self, statement: _Statement) -> bool:
        """Whether a statement between our markers is ours. Other programs write between them too: to Codex they are comments."""
        if statement.kind != "key":
            return statement.kind == "table" and statement.key == self.table
        return statement.key[:-1] == statement.table and (
            (statement.table == () and statement.key[0] in self.top)
            or (statement.table == self.table and statement.key[-1] in self.keys)
        )


class Stripped(NamedTuple):
    """A TOML file without what is ours."""

    text: str  # as its user wrote it
    added: str  # what the user added to our table, without the table's header


def _lines(text: str) -> list[str]:
    """Lines as TOML counts them, with their ends: str.splitlines also splits at form feeds, U+2028 and the like."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def toml_strip(text: str, name: str, ours: Claim, path: str = "the file") -> Stripped:
    """The text as its user wrote it: our statements gone, and what we put aside back in its place.

    Only statements of ours go. Whatever else has come to stand between our markers stays, also when the closing one is lost.

    Raises:
        Ds4Error: a text with a block of ours is no TOML.
    """
    begin, end, aside = _markers(name)
    lines = _lines(text)
    inside: list[bool] = []
    for line in lines:
        bare = line.rstrip("\r\n")
        inside.append((bare == begin or (bool(inside) and inside[-1])) and bare != end)
    blocks = [statement for statement in _statements(text, path) if inside[statement.first]] if any(inside) else []
    gone = {number for item in blocks if ours.holds(item) for number in range(item.first, item.last + 1)}
    keys: list[str] = []
    tables: list[str] = []
    if any(item.kind == "table" and ours.holds(item) for item in blocks):
        for item in _statements(text, path):
            if item.table[: len(ours.table)] == ours.table and item.first not in gone:
                (keys if item.table == ours.table else tables).extend(lines[item.first : item.last + 1])
                gone.update(range(item.first, item.last + 1))
    kept = [
        line[len(aside) :] if line.startswith(aside) else line
        for number, line in enumerate(lines)
        if number not in gone and line.rstrip("\r\n") not in (begin, end)
    ]
    return Stripped("".join(kept), "".join(keys + tables))


def _literal(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # strings, whole numbers and booleans read the same in TOML


def toml_merge(
    text: str,
    name: str,
    top: Mapping[str, Any],
    table: tuple[str, ...],
    values: Mapping[str, Any],
    path: str = "the file",
    added: str = "",
) -> str:
    """The user's text (without blocks of ours) with our top-level keys and our table, and in it what the user ``added``.

    What the user had under the same names is put aside as comments in its place, from where ``toml_strip`` brings it back.

    Raises:
        Ds4Error: the text is no TOML, or has the names in a form that cannot be put aside line by line.
    """
    begin, end, aside = _markers(name)
    lines = _lines(text)
    for statement in _statements(text, path):
        ours = statement.table[: len(table)] == table and statement.table != ()
        if statement.kind == "key" and not ours:
            if statement.key[: len(table)] == table or (statement.key == table[:1] and statement.table == ()):
                raise Ds4Error(
                    f"{path} describes {'.'.join(table)} in a form that cannot be merged",
                    found=f"line {statement.first + 1}",
                    required=f"a table [{'.'.join(table)}], or nothing",
                    cure="remove that entry, or choose another agent_clients_provider",
                )
            ours = statement.table == () and statement.key[0] in top
        if ours:
            for number in range(statement.first, statement.last + 1):
                if number < len(lines):
                    lines[number] = aside + lines[number]
    body = "".join(lines)
    head = ""
    if top:
        head = begin + "\n" + "".join(f"{key} = {_literal(value)}\n" for key, value in top.items()) + end + "\n"
    header = ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else _literal(part) for part in table)
    if added and not added.endswith("\n"):
        added += "\n"
    assignments = "".join(f"{key} = {_literal(value)}\n" for key, value in values.items())
    tail = f"{begin}\n[{header}]\n{assignments}{added}{end}\n"
    if body and not body.endswith("\n"):
        body += "\n"
    return head + body + tail
