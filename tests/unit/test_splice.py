"""Single keys change in files of somebody else; every other byte stays."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.errors import Ds4Error
from ds4.splice import Claim, Stripped, json_get, json_remove, json_set, toml_merge, toml_strip

if sys.version_info >= (3, 11):
    import tomllib

# ------------------------------------------------------------------------------------------------ JSON

WITH_COMMENTS = """\
// my own file
{
    "theme": "dark", // keep
    /* the providers
       I use */
    "provider": {
        "mine": {"url": "http://a/{b}", "list": [1, 2, {"x": "}"}],},
    },
    "last": "\\"quoted, text\\"",
}
"""


def test_a_key_is_added_beside_comments_and_trailing_commas() -> None:
    text = json_set(WITH_COMMENTS, ("provider", "ds4"), {"a": [1], "b": {}})
    assert json_get(text, ("provider", "ds4")) == (True, {"a": [1], "b": {}})
    assert json_get(text, ("provider", "mine", "list")) == (True, [1, 2, {"x": "}"}])
    assert json_get(text, ("last",)) == (True, '"quoted, text"')
    for line in WITH_COMMENTS.splitlines():
        assert line in text
    assert '        "ds4": {\n            "a": [\n                1\n            ],' in text  # the file's own indent


def test_taking_the_key_away_again_gives_the_file_back() -> None:
    for text in (
        WITH_COMMENTS,
        '{"a":1}',
        '{"a":1}\n',
        "{}",
        '{\n  "a": {"b": 1}\n}\n',
        '{\n\t"a": 1 // note\n}\n',
        '{"provider": {"x": 1}, "z": null}',
    ):
        for key in (("provider", "ds4"), ("model",), ("agent", "ds4", "deep")):
            assert json_remove(json_set(text, key, {"v": 1}), key) == text


def test_a_value_is_replaced_in_its_place() -> None:
    text = '{\n  "a": 1,\n  "b": {"c": [1,2]},\n  "d": 3\n}\n'
    assert json_set(text, ("b", "c"), "x") == '{\n  "a": 1,\n  "b": {"c": "x"},\n  "d": 3\n}\n'
    assert json_remove(text, ("a",)) == '{\n  "b": {"c": [1,2]},\n  "d": 3\n}\n'
    assert json_remove(text, ("d",)) == '{\n  "a": 1,\n  "b": {"c": [1,2]}\n}\n'
    assert json_remove(text, ("b", "c")) == '{\n  "a": 1,\n  "d": 3\n}\n'
    assert json_remove(text, ("no", "such")) == text


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"a" 1}', '{"a":1', '{"a":"x', '{"a":1} {"b":2}', "{a:1}", '{"a":1 "b":2}', '{"a":}']
)
def test_what_is_no_json_object_is_refused_not_overwritten(text: str) -> None:
    for call in (lambda: json_set(text, ("k",), 1, "/f"), lambda: json_get(text, ("k",), "/f")):
        with pytest.raises(Ds4Error, match="/f cannot be read"):
            call()


def test_something_else_in_the_way_is_refused() -> None:
    for call in (
        lambda: json_set('{"provider": [1]}', ("provider", "ds4"), 1, "/f"),
        lambda: json_get('{"provider": 5}', ("provider", "ds4"), "/f"),
    ):
        with pytest.raises(Ds4Error, match=r"/f holds something else.*provider is no object"):
            call()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    st.sampled_from([None, 1, 2, 4, "\t"]),
    st.lists(st.text(max_size=4), min_size=1, max_size=3),
    json_values,
)
def test_any_file_keeps_all_else(content: dict[str, Any], indent: Any, key: list[str], value: Any) -> None:
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    walked: Any = content
    for name in key[:-1]:
        walked = walked.get(name, {}) if isinstance(walked, dict) else None
    if not isinstance(walked, dict):
        with pytest.raises(Ds4Error):
            json_set(text, key, value)
        return
    changed = json_set(text, key, value)
    expected = json.loads(text)
    place = expected
    for name in key[:-1]:
        place = place.setdefault(name, {})
    existed = key[-1] in place
    place[key[-1]] = value
    assert json.loads(changed) == expected
    assert json_get(changed, key) == (True, value)
    if not existed:
        removed = json.loads(json_remove(changed, key))
        del place[key[-1]]
        assert removed == _without_empty(expected, key[:-1]) or removed == expected


def _without_empty(content: dict[str, Any], key: list[str]) -> dict[str, Any]:
    """Groups emptied by a removal go as well."""
    for depth in range(len(key), 0, -1):
        parent = content
        for name in key[: depth - 1]:
            parent = parent[name]
        if parent[key[depth - 1]] == {}:
            del parent[key[depth - 1]]
    return content


# ------------------------------------------------------------------------------------------------ TOML

TABLE = ("model_providers", "ds4")
VALUES = {"name": 'ds4 on "spark" #1', "base_url": "http://h:8000/v1", "stream_idle_timeout_ms": 1000000, "on": True}
TOP = {"model": "deepseek-v4-flash", "model_provider": "ds4"}
OURS = Claim(frozenset(TOP), TABLE, frozenset(VALUES))


def strip(text: str, name: str = "ds4") -> str:
    stripped = toml_strip(text, name, OURS._replace(table=("model_providers", name)))
    assert stripped.added == ""
    return stripped.text


USER = '''\
# my settings
model = "gpt-x"   # the good one
model_provider = """
multi
model = "not this one"
"""
notify = ["a",
  "b", # ] not the end
]

[model_providers.other]
name = "other" # [model_providers.ds4]

[[hooks]]
run = 'x = [ "'

[model_providers."ds4"]
name = "by hand"
base_url = "http://old"

[model_providers.ds4.http_headers]
X = "1"

[tui]
theme = "dark"'''


def test_our_table_and_top_keys_join_what_is_there() -> None:
    merged = toml_merge(USER, "ds4", TOP, TABLE, VALUES)
    if sys.version_info >= (3, 11):
        read = tomllib.loads(merged)
        before = tomllib.loads(USER)
        assert read["model_providers"]["ds4"] == VALUES
        assert (read["model"], read["model_provider"]) == ("deepseek-v4-flash", "ds4")
        for name in ("notify", "hooks", "tui"):
            assert read[name] == before[name]
        assert read["model_providers"]["other"] == before["model_providers"]["other"]


def test_what_was_put_aside_comes_back() -> None:
    for top in (TOP, {}):
        merged = toml_merge(USER, "ds4", top, TABLE, VALUES)
        assert strip(merged) == USER + "\n"
        assert strip(merged, "other") == merged


def test_merging_twice_changes_nothing() -> None:
    once = toml_merge(USER, "ds4", TOP, TABLE, VALUES)
    assert toml_merge(strip(once), "ds4", TOP, TABLE, VALUES) == once


def test_an_empty_file_gets_ours_alone() -> None:
    merged = toml_merge("", "ds4", {}, TABLE, {"name": "x"})
    assert merged.splitlines()[1:3] == ["[model_providers.ds4]", 'name = "x"']
    assert strip(merged) == ""


def test_two_providers_live_side_by_side() -> None:
    one = toml_merge("a = 1\n", "ds4", {}, TABLE, VALUES)
    two = toml_merge(one, "ds4-b", {}, ("model_providers", "ds4-b"), VALUES)
    assert strip(strip(two, "ds4-b")) == "a = 1\n"
    assert strip(strip(two), "ds4-b") == "a = 1\n"


END = "# <<< ds4-fleet ds4\n"
THEIRS = '\n[mcp_servers.mine]\ncommand = "echo"\nargs = ["hi"]\n'


def test_a_table_that_codex_puts_before_our_end_marker_is_the_user_s() -> None:
    """Its writer takes our markers for comments: a new table goes before the one at the end of the file."""
    merged = toml_merge(USER, "ds4", TOP, TABLE, VALUES)
    touched = merged[: merged.rindex(END)] + THEIRS + END
    assert strip(touched) == USER + "\n" + THEIRS
    again = toml_merge(strip(touched), "ds4", TOP, TABLE, VALUES)
    assert strip(again) == USER + "\n" + THEIRS


def test_a_top_level_key_among_ours_is_the_user_s() -> None:
    merged = toml_merge("[tui]\n", "ds4", TOP, TABLE, VALUES)
    touched = merged.replace(END, 'model_reasoning_effort = "high"\n' + END, 1)
    assert strip(touched) == 'model_reasoning_effort = "high"\n[tui]\n'


def test_a_lost_end_marker_takes_nothing_with_it() -> None:
    merged = toml_merge("[tui]\nx = 1\n", "ds4", TOP, TABLE, VALUES)
    assert strip(merged.replace(END, "") + "[mine]\nmodel = 2\n") == "[tui]\nx = 1\n[mine]\nmodel = 2\n"
    assert strip(merged.replace(END, "", 1)) == "[tui]\nx = 1\n"


def test_what_the_user_adds_to_our_table_stays_in_it() -> None:
    merged = toml_merge("a = 1\n", "ds4", {}, TABLE, VALUES)
    headers = '[model_providers.ds4.http_headers]\nX = "1"\n'
    touched = merged.replace(END, "request_max_retries = 5\n" + END) + headers
    stripped = toml_strip(touched, "ds4", OURS)
    assert stripped == Stripped("a = 1\n", "request_max_retries = 5\n" + headers)
    again = toml_merge(stripped.text, "ds4", {}, TABLE, VALUES, added=stripped.added)
    assert again == merged.replace(END, "request_max_retries = 5\n" + headers + END)
    assert toml_strip(again, "ds4", OURS) == stripped


@pytest.mark.parametrize("odd", ["\u2028", "\u0085", "\x0c", "\x1c", "\v"])
def test_only_a_newline_ends_a_line(odd: str) -> None:
    user = f'# a{odd}b\nmodel = "x"\n\n[tui]\ntheme = "d"\n'
    merged = toml_merge(user, "ds4", TOP, TABLE, VALUES)
    assert '# ds4-fleet ds4 put aside: model = "x"\n' in merged
    assert f"# a{odd}b\n" in merged
    assert strip(merged) == user


def test_line_ends_of_windows_stay() -> None:
    user = 'model = "x"\r\n[tui]\r\ntheme = "d"\r\n'
    assert strip(toml_merge(user, "ds4", TOP, TABLE, VALUES)) == user


@pytest.mark.parametrize(
    "text",
    [
        'model_providers = {ds4 = {name = "x"}}\n',
        'model_providers.ds4.name = "x"\n',
        '[model_providers]\nds4 = {name = "x"}\n',
        '[model_providers]\n"ds4".name = "x"\n',
    ],
)
def test_a_form_that_cannot_be_put_aside_is_refused(text: str) -> None:
    with pytest.raises(
        Ds4Error, match=r"/f describes model_providers.ds4 in a form that cannot be merged. Found: line"
    ):
        toml_merge(text, "ds4", {}, TABLE, VALUES, "/f")


@pytest.mark.parametrize("text", ['a = "x', "a = '''x", "a = [1", "= 1", "a 1", "[model_providers.ds4\nx", "[]"])
def test_what_is_no_toml_is_refused_not_overwritten(text: str) -> None:
    try:
        merged = toml_merge(text, "ds4", {}, TABLE, VALUES, "/f")
    except Ds4Error as error:
        assert "/f cannot be read" in str(error)
    else:  # a slip that cannot hide ours: it stays, byte for byte
        assert strip(merged).rstrip("\n") == text.rstrip("\n")


if sys.version_info >= (3, 11):
    keys = st.sampled_from(["a", "model", "b-c", "model_provider", '"x y"', "'q.r'"])
    literals = st.sampled_from(
        [
            '"s"',
            "'l # ['",
            "1",
            "true",
            "[1,\n 2] # c",
            '"""m\n[t]\nmodel = 1\n"""',
            "'''x\n'y'\n'''",
            "{k = 1}",
            '"\\"="',
        ]
    )
    headers = st.sampled_from(
        ["[t]", "[t.u]", "[model_providers.x]", "[[many]]", "[model_providers.ds4]", "# note", ""]
    )

    @given(
        st.lists(
            st.tuples(headers, st.lists(st.tuples(keys, literals), max_size=3, unique_by=lambda pair: pair[0])),
            max_size=4,
            unique_by=lambda part: part[0],
        ),
        st.booleans(),
        st.sampled_from(
            ["", "[mine]\nx = 1\n", '\n[mine]\nmodel = "m"\n\n[mine.deep]\nname = """\n[t]\n"""\n', "# a note\n"]
        ),
    )
    def test_any_toml_keeps_all_else(
        parts: list[tuple[str, list[tuple[str, str]]]], default: bool, theirs: str
    ) -> None:
        text = "".join(f"{header}\n" + "".join(f"{key} = {value}\n" for key, value in pairs) for header, pairs in parts)
        try:
            before = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            return
        merged = toml_merge(text, "ds4", TOP if default else {}, TABLE, VALUES)
        read = tomllib.loads(merged)
        expected = tomllib.loads(text)
        if default:
            expected.update(TOP)
        expected.setdefault("model_providers", {})["ds4"] = VALUES
        assert read == expected
        assert strip(merged) == text
        assert tomllib.loads(strip(merged)) == before
        touched = merged[: merged.rindex(END)] + theirs + END  # as Codex' own writer does
        assert strip(touched) == text + theirs
        assert strip(touched.replace(END, "")) == text + theirs
