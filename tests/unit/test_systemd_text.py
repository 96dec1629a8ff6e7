"""Quoting for systemd: what is written is read back, by readers written from the manual pages and not from our writer."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import Ds4Error
from ds4.systemd_text import deployment_of, directives, environment_file, exec_argument, exec_line, path_list

# Everything that systemd accepts in a value: no control characters but tab and newline, no surrogates or noncharacters.
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cn"]).filter(
        lambda char: (ord(char) >= 0x20 or char in "\t\n") and ord(char) != 0x7F and not 0xFDD0 <= ord(char) <= 0xFDEF
    ),
    max_size=60,
)
HOSTILE = st.text(st.sampled_from(list(" \t\n\"'\\$%;`{}=#~*?[]()<>&|!-@:+abcENV")), max_size=40)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)


def read_exec(line: str) -> list[str]:
    """systemd.service(5): words by whitespace, double quotes with C escapes, then %% and $$ become one character."""
    words: list[str] = []
    word: list[str] | None = None
    quoted = False
    at = 0
    while at < len(line):
        char = line[at]
        if char == "\\":
            at += 1
            word = (word or []) + [{"n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'", "s": " "}[line[at]]]
        elif char == '"':
            quoted = not quoted
            word = word or []
        elif char.isspace() and not quoted:
            assert char in " \t\n\r", "systemd splits at ASCII whitespace only"
            if word is not None:
                words.append("".join(word))
            word = None
        else:
            word = (word or []) + [char]
        at += 1
    assert not quoted
    if word is not None:
        words.append("".join(word))
    for text in words:
        assert not re.search(r"(?<!%)(%%)*%(?!%)", text), "a lone % is a specifier"
        assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text), "a lone $ is a variable"
    return [text.replace("%%", "%").replace("$$", "$") for text in words]


def read_environment(text: str) -> dict[str, str]:
    """systemd.exec(5) EnvironmentFile=: NAME=value lines; in double quotes a backslash protects only \" \\ ` and $."""
    values: dict[str, str] = {}
    at = 0
    while at < len(text):
        equals = text.index("=", at)
        name, at = text[at:equals], equals + 1
        value = []
        if text[at] == '"':
            at += 1
            while text[at] != '"':
                if text[at] == "\\" and text[at + 1] in '"\\`$':
                    at += 1
                value.append(text[at])
                at += 1
            at += 1
        else:
            while text[at] != "\n":
                assert text[at] not in "\\\"'", "an unquoted value must be plain"
                value.append(text[at])
                at += 1
        assert text[at] == "\n"
        at += 1
        values[name] = "".join(value)
    return values


@given(st.lists(st.one_of(TEXT, HOSTILE), min_size=1, max_size=6))
def test_a_command_line_reaches_the_process_as_it_was_meant(words: list[str]) -> None:
    line = exec_line(words)
    assert "\n" not in line, "a directive is one line"
    assert read_exec(line) == words


def read_paths(text: str) -> list[str]:
    """systemd.syntax(7): words by whitespace, double quotes in which a backslash protects what follows, then %%."""
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', text)
    plain = [re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word for word in words]
    assert not [word for word in plain if re.search(r"(?<!%)(%%)*%(?!%)", word)], "a lone % is a specifier"
    return [word.replace("%%", "%") for word in plain]


@given(st.lists(st.one_of(TEXT, HOSTILE).map(lambda text: "/" + re.sub(r"[\t\n]", "", text)), max_size=5))
def test_paths_reach_systemd_as_they_were_meant(paths: list[str]) -> None:
    assert read_paths(path_list(paths)) == paths


def test_a_plain_path_needs_no_quotes() -> None:
    assert path_list(["/tmp", "-/srv/a", "/srv/my slips 50%"]) == '/tmp -/srv/a "/srv/my slips 50%%"'


@given(st.dictionaries(NAMES, st.one_of(TEXT, HOSTILE), max_size=6))
def test_an_environment_reaches_the_process_as_it_was_meant(environment: dict[str, str]) -> None:
    assert read_environment(environment_file(environment)) == environment


@pytest.mark.parametrize("word", [";", "-", "@x", "+x", "!x", "#", "", " ", "'", "\\"])
def test_words_with_a_meaning_for_systemd_are_quoted_or_harmless(word: str) -> None:
    line = exec_line(["/program", word])
    assert read_exec(line) == ["/program", word]
    assert not line.endswith(" ;"), "a lone semicolon would begin another command"


@pytest.mark.parametrize("value", ["a\0b", "a\rb", "\x1b[0m", "\x7f", "\ud800", "\ufdd0", "\ufffe"])
def test_what_systemd_would_drop_in_silence_is_refused(value: str) -> None:
    with pytest.raises(Ds4Error, match=r"does not accept"):
        environment_file({"NAME": value})
    with pytest.raises(Ds4Error, match=r"does not accept"):
        exec_argument(value)
    with pytest.raises(Ds4Error, match=r"does not accept"):
        path_list([value])


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "Ä", "A\n"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(Ds4Error, match="no variable name"):
        environment_file({name: "x"})


def test_environment_is_sorted_so_that_its_text_is_stable() -> None:
    assert environment_file({"B": "2", "A": "x y"}) == 'A="x y"\nB=2\n'


def test_directives_leave_out_what_systemd_does_not_act_on() -> None:
    unit = "# note\n[Service]\n\n  User=ds4  \nExecStart=/a \\\n# inside a continued line\n  b \\\n\n  c\n; old\nRestart=always\n"
    assert directives(unit) == ["[Service]", "User=ds4", "ExecStart=/a b c", "Restart=always"]


def test_a_comment_is_no_other_unit_but_a_directive_is() -> None:
    assert directives("# a\n[Unit]\n") == directives("[Unit]\n# b \\\n")
    assert directives("[Service]\nUser=a\n") != directives("[Service]\nUser=b\n")


@pytest.mark.parametrize(
    ("unit", "found"),
    [
        ("[Service]\nEnvironment=DS4_DEPLOYMENT=0123456789ab\n", "0123456789ab"),
        ("[Service]\n# Environment=DS4_DEPLOYMENT=0123456789ab\n", ""),
        ("", ""),
    ],
)
def test_deployment_of_a_unit(unit: str, found: str) -> None:
    assert deployment_of(unit) == found
