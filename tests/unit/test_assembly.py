"""Ranges become a file: every byte once, in the right place, hashed in order, resumed from what is proven to be there."""

from __future__ import annotations

import errno
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds4 import assembly, journal
from ds4.assembly import KIB, MIB, Assembled, Assembly, Limits, Valve
from ds4.errors import Ds4Error
from ds4.plan import segment_size
from ds4.transfer import TransferError

SIZE = 3 * MIB + 12345
CONTENT = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + os.urandom(SIZE - 24)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
STEP = 128 * KIB
FAST = Limits(connections=4, retries=3, backoff_seconds=0.001, backoff_limit_seconds=0.002, stall_seconds=1.0)


class Lines:
    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


class Bytes:
    def __init__(self, data: bytes, fault: Callable[[int], None]) -> None:
        self.data, self.fault, self.at = data, fault, 0

    def readinto(self, view: memoryview) -> int:
        self.fault(self.at)
        count = min(len(view), 50_000, len(self.data) - self.at)
        view[:count] = self.data[self.at : self.at + count]
        self.at += count
        return count

    def close(self) -> None:
        pass


class Origin:
    """A source in memory. ``trouble(request number, start, end)`` may raise, or return (data, fault of the body)."""

    def __init__(self, content: bytes = CONTENT, trouble: Callable[..., Any] | None = None) -> None:
        self.content, self.trouble = content, trouble
        self.asked: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def connections(self) -> Lines:
        return Lines()

    def open(self, _lines: Lines, start: int, end: int) -> Bytes:
        with self.lock:
            self.asked.append((start, end))
            number = len(self.asked)
        data: bytes = self.content[start:end]
        fault: Callable[[int], None] = lambda at: None  # noqa: E731
        if self.trouble:
            found = self.trouble(number, start, end)
            if found:
                data, fault = found
        return Bytes(data, fault)

    @property
    def bytes_asked(self) -> int:
        return sum(end - start for start, end in self.asked)


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / ".x.gguf.part"


@pytest.fixture
def notes() -> list[str]:
    return []


Run = Callable[..., Assembled]


@pytest.fixture
def run(part: Path, notes: list[str]) -> Run:
    def one(source: Any, limits: Limits = FAST, *, valve: Valve | None = None, check_header: bool = True) -> Assembled:
        made = Assembly(str(part), SIZE, SHA256, limits, valve or Valve(), check_header=check_header, note=notes.append)
        try:
            return made.run(source)
        finally:
            made.close()

    return one


def recorded(part: Path) -> dict[int, int]:
    return journal.load(f"{part}.journal", journal.identity(SHA256, SIZE, STEP)).segments


def test_a_whole_file(run: Run, part: Path) -> None:
    source = Origin()
    found = run(source)
    assert found.sha256 == SHA256
    assert part.read_bytes() == CONTENT
    assert source.bytes_asked == SIZE
    assert len(recorded(part)) == len(found.crcs) == 25
    assert recorded(part) == dict(enumerate(found.crcs))


def test_a_file_smaller_than_a_segment(part: Path) -> None:
    made = Assembly(str(part), 1000, "", FAST, Valve(), check_header=True, note=print)
    assert made.run(Origin(CONTENT[:1000])).sha256 == hashlib.sha256(CONTENT[:1000]).hexdigest()  # type: ignore[arg-type]
    made.close()


@pytest.mark.parametrize(
    ("size", "segment", "asked"),
    [
        (1, 128 * KIB, 128 * KIB),
        (24 * MIB, 128 * KIB, 384 * KIB),
        (1024 * MIB, MIB, 16 * MIB),
        (86720111488, 16 * MIB, 64 * MIB),
        (10**13, 16 * MIB, 64 * MIB),
    ],
)
def test_sizes_of_segments_and_requests(size: int, segment: int, asked: int) -> None:
    assert segment_size(size) == segment
    assert assembly.request_size(size, segment, 8) == asked


def test_resumes_only_what_is_missing(run: Run, part: Path) -> None:
    def ends(number: int, _start: int, _end: int) -> None:
        if number > 8:
            raise TransferError("gone", final=True)

    with pytest.raises(TransferError):
        run(Origin(trouble=ends))
    kept = recorded(part)
    assert kept
    source = Origin()
    assert run(source).sha256 == SHA256
    assert source.bytes_asked == SIZE - sum(min(STEP, SIZE - number * STEP) for number in kept)


def test_what_came_before_a_cut_is_kept(run: Run) -> None:
    def cut(number: int, start: int, end: int) -> Any:
        if number > 6:
            return None

        def fault(at: int) -> None:
            if at >= 50_000:
                raise TransferError("cut")

        return CONTENT[start:end], fault

    source = Origin(trouble=cut)
    assert run(source).sha256 == SHA256
    assert (50_000, STEP) in source.asked, "the first segment goes on where it was cut"


@pytest.mark.parametrize("damage", ["zeros", "one byte", "truncated"])
def test_a_damaged_partial_file_costs_only_its_segments(run: Run, part: Path, notes: list[str], damage: str) -> None:
    run(Origin())
    content = bytearray(CONTENT)
    if damage == "zeros":
        content[5 * STEP : 6 * STEP] = bytes(STEP)
    elif damage == "one byte":
        content[5 * STEP + 77] ^= 1
    else:
        del content[-STEP // 2 :]
    part.write_bytes(content)
    source = Origin()
    assert run(source).sha256 == SHA256
    assert part.read_bytes() == CONTENT
    assert 0 < source.bytes_asked <= 2 * STEP
    assert any("fetched again" in note or "fetching it again" in note for note in notes)


def test_what_was_appended_to_a_partial_file_does_not_stay(run: Run, part: Path) -> None:
    run(Origin())
    with part.open("ab") as stream:
        stream.write(b"junk")
    assert run(Origin()).sha256 == SHA256
    assert part.stat().st_size == SIZE


@pytest.mark.parametrize(("connections", "buffer"), [(1, MIB), (8, MIB), (16, MIB), (64, 256 * KIB)])
def test_buffers_of_any_number_of_connections_stay_small(connections: int, buffer: int) -> None:
    assert assembly.buffer_size(connections) == buffer


def test_damage_in_journal_and_data_together(run: Run, part: Path) -> None:
    run(Origin())
    lines = Path(f"{part}.journal").read_bytes()
    Path(f"{part}.journal").write_bytes(lines[:700] + bytes(100) + lines[800:-13])
    content = bytearray(CONTENT)
    content[0] = 0
    part.write_bytes(content)
    source = Origin()
    assert run(source).sha256 == SHA256
    assert source.bytes_asked < SIZE / 2


def test_a_journal_of_another_content_counts_for_nothing(run: Run, part: Path) -> None:
    other = Assembly(str(part), SIZE, "cd" * 32, FAST, Valve(), check_header=False, note=print)
    other.run(Origin(bytes(SIZE)))  # type: ignore[arg-type]
    other.close()
    source = Origin()
    assert run(source).sha256 == SHA256
    assert source.bytes_asked == SIZE
    assert part.read_bytes() == CONTENT


def test_progress_resets_the_count_of_failures(run: Run) -> None:
    def cut(_number: int, start: int, end: int) -> Any:
        def fault(at: int) -> None:
            if at >= 70_000:
                raise TransferError("cut")

        return CONTENT[start:end], fault

    assert run(Origin(trouble=cut), FAST._replace(retries=1)).sha256 == SHA256


def test_no_progress_ends_it(run: Run) -> None:
    def refuse(_number: int, _start: int, _end: int) -> None:
        raise TransferError("no", cure="pay")

    source = Origin(trouble=refuse)
    with pytest.raises(TransferError) as caught:
        run(source, FAST._replace(connections=1))
    assert caught.value.cure == "pay"
    assert len(source.asked) == FAST.retries + 1


def test_a_refusal_is_final_at_first_and_passes_later(run: Run, part: Path) -> None:
    def first(number: int, _start: int, _end: int) -> None:
        raise TransferError("403", first=True)

    source = Origin(trouble=first)
    with pytest.raises(TransferError):
        run(source, FAST._replace(connections=1))
    assert len(source.asked) == 1

    def midway(number: int, _start: int, _end: int) -> None:
        if number in (4, 5):
            raise TransferError("403", first=True)

    assert run(Origin(trouble=midway), FAST._replace(connections=1)).sha256 == SHA256


def test_retry_after_holds_all_workers(run: Run) -> None:
    times: list[float] = []

    def limit(number: int, _start: int, _end: int) -> None:
        times.append(time.monotonic())
        if number == 1:
            raise TransferError("429", retry_after_seconds=0.3)

    run(Origin(trouble=limit), FAST._replace(connections=2))
    late = [at - times[0] for at in times[2:]]
    assert late and min(late) >= 0.25


def test_a_web_page_never_stays_in_the_file(run: Run, part: Path, notes: list[str]) -> None:
    page = b"<html>" + bytes(SIZE)

    def login(number: int, start: int, end: int) -> Any:
        return (page[start:end], lambda at: None) if number <= 2 and start == 0 else None

    source = Origin(trouble=login)
    assert run(source).sha256 == SHA256
    assert part.read_bytes() == CONTENT
    assert any("a web page" in note for note in notes)


def test_a_source_that_only_has_web_pages_is_given_up(run: Run) -> None:
    with pytest.raises(TransferError, match="not a GGUF file but a web page"):
        run(Origin(b"<html>" + bytes(SIZE)))


def test_nothing_else_is_asked_for_before_the_beginning_is_right(run: Run, part: Path) -> None:
    """A file of zeros has the right length; without this it would arrive whole."""
    source = Origin(bytes(SIZE))
    with pytest.raises(TransferError, match="not a GGUF file but zeros") as caught:
        run(source, FAST._replace(connections=4))
    assert caught.value.final
    assert {start for start, _end in source.asked} == {0} and len(source.asked) == assembly.REFUSALS


def test_a_wrong_byte_is_in_the_hash_and_its_place_in_the_crcs(run: Run) -> None:
    wrong = bytearray(CONTENT)
    wrong[7 * STEP + 5] ^= 255
    first = run(Origin(bytes(wrong)))
    assert first.sha256 == hashlib.sha256(wrong).hexdigest() != SHA256
    assert [number for number, crc in enumerate(first.crcs) if crc != run_crcs()[number]] == [7]


def run_crcs() -> list[int]:
    import zlib

    return [zlib.crc32(CONTENT[at : at + STEP]) for at in range(0, SIZE, STEP)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_does_not_take_it_ends_it_at_once(run: Run, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real, calls = os.pwrite, []

    def pwrite(handle: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > 5:
            raise OSError(code, os.strerror(code))
        return real(handle, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(Ds4Error) as caught:
        run(Origin())
    error = caught.value
    assert error.evidence["errno"] == code
    assert error.evidence["missing_bytes"] >= SIZE - 6 * MIB
    assert f"{error.evidence['missing_bytes']} bytes of this file are still missing" in error.found
    assert len(calls) < 12, "no retry on a full disk"


def test_short_writes_are_finished(run: Run, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, at: real(handle, data[: max(len(data) // 2, 1)], at))
    assert run(Origin()).sha256 == SHA256
    assert part.read_bytes() == CONTENT


def test_a_segment_counts_only_after_its_data_is_synced(run: Run, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_append = os.fdatasync, journal.Journal.append

    def sync(handle: int) -> None:
        events.append("sync")
        real_sync(handle)

    monkeypatch.setattr(os, "fdatasync", sync)

    def append(self: journal.Journal, segments: Any) -> None:
        events.append("journal")
        real_append(self, segments)

    monkeypatch.setattr(journal.Journal, "append", append)
    run(Origin())
    assert "journal" in events
    for number, event in enumerate(events):
        if event == "journal":
            assert events[number - 1] == "sync"


def test_bandwidth_is_capped(run: Run) -> None:
    begun = time.monotonic()
    run(Origin(), valve=Valve(6 * MIB))
    assert 0.35 < time.monotonic() - begun < 3


def test_pause_and_go_on(run: Run) -> None:
    valve = Valve()
    valve.pause("memory is short")
    threading.Timer(0.3, valve.pause, [""]).start()
    begun = time.monotonic()
    assert run(Origin(), valve=valve).sha256 == SHA256
    assert time.monotonic() - begun >= 0.25


def test_deadline(run: Run) -> None:
    valve = Valve()
    valve.deadline(time.monotonic() - 1)
    with pytest.raises(Ds4Error, match="time limit"):
        run(Origin(), valve=valve)


def test_a_trickle_is_given_up_but_waiting_for_us_does_not_count() -> None:
    watch = assembly._Watch(Limits(stall_seconds=10, stall_bytes_per_second=1000))
    for _ in range(20):
        watch.saw(1000, 1.0)
    watch.saw(100, 0.0)
    with pytest.raises(TransferError, match="bytes per second"):
        for _ in range(30):
            watch.saw(10, 1.0)
