"""The journal of a partial file: it may forget, it never lies."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ds4 import journal

OWNER = journal.identity("ab" * 32, 86720111488, 16 << 20)
SEGMENTS = st.dictionaries(st.integers(0, 5169), st.integers(0, 2**32 - 1), max_size=30)


def text(segments: dict[int, int]) -> bytes:
    return b"".join(journal.line(OWNER, number, crc) for number, crc in segments.items())


@given(SEGMENTS)
def test_reads_back_what_was_written(segments: dict[int, int]) -> None:
    assert journal.parse(text(segments), OWNER) == journal.Loaded(segments, 0, 0)


@given(SEGMENTS, st.data())
def test_power_loss_in_the_tail(segments: dict[int, int], data: st.DataObject) -> None:
    whole = text(segments)
    kept = data.draw(st.integers(0, len(whole)))
    zeros = data.draw(st.integers(0, 200))
    loaded = journal.parse(whole[:kept] + bytes(zeros), OWNER)
    assert loaded.segments.items() <= segments.items()
    assert len(loaded.segments) >= whole[:kept].count(b"\n") - (1 if zeros else 0)
    if kept < len(whole) and zeros and not whole[:kept].endswith(b"\n"):
        assert loaded.damaged == 1


@given(SEGMENTS, st.lists(st.tuples(st.integers(0, 4000), st.binary(min_size=1, max_size=60)), max_size=6))
def test_damage_anywhere(segments: dict[int, int], damage: list[tuple[int, bytes]]) -> None:
    content = bytearray(text(segments))
    for at, wrong in damage:
        content[at : at + len(wrong)] = wrong
    loaded = journal.parse(bytes(content), OWNER)
    assert loaded.segments.items() <= segments.items(), "a damaged journal told something that is not true"


@given(st.binary(max_size=600))
def test_rubbish_says_nothing(content: bytes) -> None:
    assert journal.parse(content, OWNER).segments == {}


@given(SEGMENTS, st.integers(0, 100))
def test_lines_in_a_mixed_order_and_written_twice(segments: dict[int, int], seed: int) -> None:
    lines = text(segments).splitlines(keepends=True)
    turned = lines[seed % (len(lines) + 1) :] + lines
    assert journal.parse(b"".join(turned), OWNER).segments == segments


def test_a_later_line_about_a_segment_wins() -> None:
    content = journal.line(OWNER, 7, 1) + journal.line(OWNER, 7, 2)
    assert journal.parse(content, OWNER).segments == {7: 2}


def test_another_content_is_foreign() -> None:
    other = journal.identity("cd" * 32, 86720111488, 16 << 20)
    loaded = journal.parse(journal.line(other, 1, 2) + journal.line(OWNER, 3, 4), OWNER)
    assert loaded == journal.Loaded({3: 4}, 0, 1)
    assert len({journal.identity("ab" * 32, size, step) for size in (1, 2) for step in (1, 2)}) == 4


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(journal.line(OWNER, 1, 10) + journal.line(OWNER, 2, 20)[:-9])
    opened = journal.Journal(str(path), OWNER)
    opened.append([(3, 30), (4, 40)])
    opened.close()
    assert journal.load(str(path), OWNER) == journal.Loaded({1: 10, 3: 30, 4: 40}, 1, 0)


def test_absent_journal(tmp_path: Path) -> None:
    assert journal.load(str(tmp_path / "none"), OWNER) == journal.Loaded({}, 0, 0)
