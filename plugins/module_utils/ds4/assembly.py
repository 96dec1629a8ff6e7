# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Many ranges become one file, hashed in order while they arrive.

Workers fill segments of ``.<name>.part``. A committer syncs finished segments and only then writes them into the
journal. A hasher follows behind in order and reads from the page cache what was just written, so that fetching and
verifying together cost the slower of both. What the journal says after a crash is believed per segment only when its
CRC-32 still fits; a segment that does not fit is fetched again.
"""

from __future__ import annotations

import errno
import hashlib
import heapq
import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from . import gguf, journal
from .errors import Ds4Error
from .plan import segment_size
from .transfer import AnyBody, Connections, Source, TransferError

KIB, MIB = 1024, 1024 * 1024
BUFFER_BYTES = MIB  # of the hasher, and at most of a worker
BUFFERS_BYTES = 16 * MIB  # of all workers together: what bounds the memory
STORE_SECONDS = 1.0  # a slow connection's bytes are written at least so often
COMMIT_SECONDS = 0.2  # at most so much work is lost when the process is killed
FAR_BYTES = 1024 * MIB  # a guest does not keep pages so far ahead of the hasher in the page cache
REFUSALS = 3  # times that a source may begin with something else: a login page may pass, another file does not
PROGRESS_BYTES = 64 * KIB  # so much resets the count of failures
_STORAGE = {errno.ENOSPC: "the file system is full", errno.EDQUOT: "the quota is used up"}


def request_size(size: int, segment: int, connections: int) -> int:
    """Bytes asked for at once: a whole number of segments up to 64 MiB, few enough that all connections have work."""
    wanted = min(64 * MIB, size // (8 * connections))
    return max(segment, wanted // segment * segment)


def buffer_size(connections: int) -> int:
    """Bytes of a worker's buffer, so that all of them together stay small."""
    return min(BUFFER_BYTES, BUFFERS_BYTES // connections)


class Limits(NamedTuple):
    """How patient, how parallel and how considerate a transfer is. Times in seconds, rates in bytes per second."""

    connections: int = 8
    segment_bytes: int = 0  # 0: segment_size()
    stall_seconds: float = 30.0
    stall_bytes_per_second: float = 4096.0
    retries: int = 10  # failures of one worker while nobody makes progress
    backoff_seconds: float = 1.0
    backoff_limit_seconds: float = 60.0
    bandwidth_bytes_per_second: float = 0.0  # 0: unlimited
    drop_cache: bool = False


class Valve:
    """Holds all transfers while somebody asks for it, and ends them.

    Attributes:
        paused_for: why transfers wait at the moment; empty when they do not.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._changed = threading.Condition()
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._deadline: float | None = None
        self.paused_for = ""

    def pause(self, why: str) -> None:
        """Let transfers wait; an empty reason lets them go on."""
        with self._changed:
            self.paused_for = why
            self._changed.notify_all()

    def deadline(self, monotonic: float | None) -> None:
        self._deadline = monotonic

    def pass_through(self, count: int, stopped: Callable[[], bool]) -> None:
        """Wait until ``count`` more bytes may move.

        Raises:
            Ds4Error: the total time limit is over.
        """
        with self._changed:
            while self.paused_for and not stopped():
                self._changed.wait(0.5)
                self.check_deadline()
            self.check_deadline()
            if not self._rate:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.1) + count / self._rate
            pause = self._free_at - now
        if pause > 0:
            time.sleep(pause)

    def check_deadline(self) -> None:
        """Raises Ds4Error when the total time limit is over."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise Ds4Error(
                "The weights did not arrive within the time limit",
                required="an end before weights_deadline_seconds",
                cure="run again (what is there is kept), or raise weights_deadline_seconds",
            )


class Segment:
    """A part of the file with a fate of its own."""

    __slots__ = ("committed", "crc", "end", "hashed", "number", "recovered", "start", "written")

    def __init__(self, number: int, start: int, end: int) -> None:
        self.number, self.start, self.end = number, start, end
        self.written = 0  # bytes from start that are in the file
        self.crc = 0  # CRC-32 of these bytes
        self.recovered = False  # from the journal: to be believed after a check
        self.committed = False
        self.hashed = False

    @property
    def complete(self) -> bool:
        return self.written == self.end - self.start

    def reset(self) -> None:
        self.written = self.crc = 0
        self.recovered = self.committed = self.hashed = False


class Assembled(NamedTuple):
    """A complete, hashed, synced ``.part`` file."""

    sha256: str
    segment_bytes: int
    crcs: list[int]


class Assembly:
    """One file on its way. Made anew for every run; the journal carries what matters from one to the next.

    Args:
        part: path of the partial file; its journal lies beside it with the suffix ``.journal``.
        size: bytes of the whole file.
        sha256: expected hash, which ties the journal to the content; empty when nobody knows it.
        limits: see :class:`Limits`.
        valve: shared brake.
        check_header: look at the GGUF header before anything else is asked for.
        note: called with one sentence when something worth telling happened.
    """

    def __init__(
        self,
        part: str,
        size: int,
        sha256: str,
        limits: Limits,
        valve: Valve,
        *,
        check_header: bool,
        note: Callable[[str], None],
    ) -> None:
        self.part = part
        self.size = size
        self.limits = limits
        self.segment_bytes = limits.segment_bytes or segment_size(size)
        self.received = 0  # bytes that came over the wire, for ever counted up
        self.hashed = 0
        self._valve = valve
        self._note = note
        self._check_header = check_header
        self._owner = journal.identity(sha256, size, self.segment_bytes)
        self._changed = threading.Condition()
        self.segments = [
            Segment(number, start, min(start + self.segment_bytes, size))
            for number, start in enumerate(range(0, size, self.segment_bytes))
        ]
        self._pending: list[int] = []
        self._fresh: list[Segment] = []  # complete and not yet in the journal
        self._stop = False
        self._failure: BaseException | None = None
        self._gave = 0  # bytes that the present source gave
        self._refused = 0  # times that its beginning was no header
        self._begun = False  # its beginning is a header: the rest is worth fetching
        self._not_before = 0.0
        self._file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._recover()
            self._journal = journal.Journal(part + ".journal", self._owner)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def present(self) -> int:
        """Bytes of the file that are there."""
        return sum(segment.written for segment in self.segments)

    def close(self) -> None:
        self._journal.close()
        os.close(self._file)

    def _recover(self) -> None:
        loaded = journal.load(self.part + ".journal", self._owner)
        there = os.fstat(self._file).st_size
        lost = 0
        for segment in self.segments:
            crc = loaded.segments.get(segment.number)
            if crc is None:
                continue
            if segment.end > there:
                lost += 1
                continue
            segment.written, segment.crc = segment.end - segment.start, crc
            segment.recovered = segment.committed = True
        if there and not loaded.segments:
            os.ftruncate(self._file, 0)
        elif there > self.size:  # whatever was appended to it is not part of the file
            os.ftruncate(self._file, self.size)
        if loaded.damaged or lost:
            self._note(
                f"journal damaged: {loaded.damaged} lines unreadable, {lost} segments missing; only these are fetched again"
            )

    def run(self, source: Source) -> Assembled:
        """Bring the file to its end from this source.

        Raises:
            TransferError: the source cannot give it (what is there is kept for the next one).
            Ds4Error: disk full, time limit, or another condition that no source can cure.
        """
        self._stop, self._failure, self._gave, self._refused, self._not_before = False, None, 0, 0, 0.0
        self._begun = not self._check_header or self.segments[0].complete
        self._pending = [segment.number for segment in self.segments if not segment.complete]
        lines = [source.connections() for _ in range(min(self.limits.connections, max(len(self._pending), 1)))]
        digest: list[str] = []
        threads = [
            threading.Thread(target=self._guarded, args=(self._work, source, line), daemon=True) for line in lines
        ]
        threads.append(threading.Thread(target=self._guarded, args=(self._hash, digest), daemon=True))
        committer = threading.Thread(target=self._guarded, args=(self._commit,), daemon=True)
        for thread in (*threads, committer):
            thread.start()
        try:
            with self._changed:
                while not self._stop and not digest:
                    self._changed.wait(1.0)
                    self._valve.check_deadline()  # silent connections pass no valve
        finally:
            with self._changed:
                self._stop = True
                self._changed.notify_all()
            for line in lines:
                line.abort()
            for thread in (*threads, committer):
                thread.join()
            for line in lines:
                line.close()
        if self._failure is not None:
            raise self._failure
        return Assembled(digest[0], self.segment_bytes, [segment.crc for segment in self.segments])

    # Threads

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except OSError as error:
            self._fail(self._storage_error(error))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if not self._stop:
                self._failure = error
            self._stop = True
            self._changed.notify_all()

    def _storage_error(self, error: OSError) -> Ds4Error:
        missing = self.size - self.present
        stat = os.statvfs(self.part)
        free = stat.f_bavail * stat.f_frsize
        full = error.errno in _STORAGE
        return Ds4Error(
            f"{os.path.basename(self.part)} cannot be written: {_STORAGE.get(error.errno or 0, error.strerror)}",
            found=f"{missing} bytes of this file are still missing, {free} bytes are free",
            required=f"{max(missing - free, 0)} bytes more" if full else "a working disk",
            cure="free room on this file system, or move weights_directory; then run again (what is there is kept)"
            if full
            else "look at `dmesg`; then run again",
            evidence={"errno": error.errno, "missing_bytes": missing, "free_bytes": free},
        )

    def _work(self, source: Source, line: Connections) -> None:
        failures, seen = 0, self._gave
        buffer = memoryview(bytearray(buffer_size(self.limits.connections)))
        while True:
            batch = self._take()
            if not batch:
                return
            try:
                self._fill(batch, source, line, buffer)
                failures = 0
            except TransferError as error:
                failures = failures + 1 if self._gave - seen < PROGRESS_BYTES else 1
                seen = self._gave
                if self._stop:
                    return
                if error.final or (error.first and not self._gave) or failures > self.limits.retries:
                    raise
                self._give_back(batch)
                batch = []
                self._back_off(failures, error)
            finally:
                self._give_back(batch)

    def _take(self) -> list[Segment]:
        """The next run of neighbouring segments; empty when the work is over."""
        most = request_size(self.size, self.segment_bytes, self.limits.connections) // self.segment_bytes
        with self._changed:
            while not self._stop:
                if self._pending and (self._begun or self._pending[0] == 0):
                    most = min(most, len(self._pending) // (2 * self.limits.connections))  # so that all end together
                    batch = [self.segments[heapq.heappop(self._pending)]]
                    while len(batch) < most and self._pending and self._pending[0] == batch[-1].number + 1:
                        if self.segments[self._pending[0]].written:  # begun before: it needs a request of its own
                            break
                        batch.append(self.segments[heapq.heappop(self._pending)])
                    return batch
                self._changed.wait(1.0)  # another worker may give something back, the hasher may refuse something
        return []

    def _give_back(self, batch: list[Segment]) -> None:
        with self._changed:
            for segment in batch:
                if not segment.complete:
                    heapq.heappush(self._pending, segment.number)
            self._changed.notify_all()

    def _back_off(self, failures: int, error: TransferError) -> None:
        limits = self.limits
        pause = min(limits.backoff_limit_seconds, limits.backoff_seconds * 2 ** (failures - 1)) * random.uniform(
            0.5, 1.5
        )
        now = time.monotonic()
        if error.retry_after_seconds is not None:  # said to one, meant for all of us
            pause = error.retry_after_seconds * random.uniform(1.0, 1.1)
            self._not_before = max(self._not_before, now + error.retry_after_seconds)
        self._note(f"{error.reason}; trying again in {pause:.1f} s")
        with self._changed:
            while not self._stop and time.monotonic() < now + pause:
                self._changed.wait(max(now + pause - time.monotonic(), 0.01))

    def _fill(self, batch: list[Segment], source: Source, line: Connections, buffer: memoryview) -> None:
        """Fetch a run of segments with one request."""
        while not self._stop and time.monotonic() < self._not_before:
            time.sleep(0.05)
        self._valve.pass_through(0, lambda: self._stop)
        body = source.open(line, batch[0].start + batch[0].written, batch[-1].end)
        watch = _Watch(self.limits)
        try:
            for segment in batch:
                while not segment.complete and not self._stop:
                    self._fill_buffer(segment, body, buffer, watch)
        finally:
            body.close()

    def _fill_buffer(self, segment: Segment, body: AnyBody, buffer: memoryview, watch: _Watch) -> None:
        """Read up to a buffer full, then write it; what came before a broken connection is kept."""
        room = min(len(buffer), segment.end - segment.start - segment.written)
        filled = 0
        try:
            begun = now = time.monotonic()
            while filled < room and now - begun < STORE_SECONDS and not self._stop:
                count = body.readinto(buffer[filled:room])
                filled += count
                before, now = now, time.monotonic()
                watch.saw(count, now - before)
                self._valve.pass_through(count, lambda: self._stop)
                if not self._begun and filled >= gguf.HEADER_BYTES:  # enough to judge it
                    break
        finally:
            if filled and not self._stop:
                self._store(segment, buffer[:filled])

    def _store(self, segment: Segment, data: memoryview) -> None:
        at = segment.start + segment.written
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], at + done)
        crc = zlib.crc32(data, segment.crc)
        with self._changed:
            segment.crc = crc
            segment.written += len(data)
            self.received += len(data)
            self._gave += len(data)
            if not self._begun and segment.written >= min(gguf.HEADER_BYTES, self.size):
                self._judge_header(segment)
            if segment.complete:
                self._fresh.append(segment)
                self._changed.notify_all()

    def _judge_header(self, segment: Segment) -> None:
        try:
            gguf.parse(os.pread(self._file, gguf.HEADER_BYTES, 0), os.path.basename(self.part))
        except Ds4Error as error:
            self._gave -= segment.written  # rubbish is no progress
            segment.reset()
            self._refused += 1
            final = self._refused == REFUSALS
            raise TransferError(f"what came is not a GGUF file but {error.found}", final=final) from error
        self._begun = True
        self._changed.notify_all()

    def _commit(self) -> None:
        while True:
            with self._changed:
                while not self._fresh and not self._stop:
                    self._changed.wait(1.0)
                fresh, self._fresh = self._fresh, []
                stop = self._stop
            if fresh:
                os.fdatasync(self._file)
                self._journal.append((segment.number, segment.crc) for segment in fresh)
                for segment in fresh:
                    segment.committed = True
                    if self.limits.drop_cache and (segment.hashed or segment.start > self.hashed + FAR_BYTES):
                        self._drop(segment)
            elif stop:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._stop, COMMIT_SECONDS)

    def _drop(self, segment: Segment) -> None:
        os.posix_fadvise(self._file, segment.start, segment.end - segment.start, os.POSIX_FADV_DONTNEED)

    def _hash(self, result: list[str]) -> None:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(BUFFER_BYTES))
        for segment in self.segments:
            while True:
                with self._changed:
                    while not segment.complete and not self._stop:
                        self._changed.wait(1.0)
                    if self._stop:
                        return
                before = digest.copy()
                crc = 0
                for at in range(segment.start, segment.end, len(buffer)):
                    self._valve.pass_through(0, lambda: self._stop)
                    view = buffer[: min(len(buffer), segment.end - at)]
                    if os.preadv(self._file, [view], at) != len(view):
                        crc = -1  # the file is shorter than the journal said
                        break
                    digest.update(view)
                    if segment.recovered:
                        crc = zlib.crc32(view, crc)
                if not segment.recovered or crc == segment.crc:
                    break
                self._note(
                    f"segment {segment.number} at byte {segment.start} is not what the journal says; fetching it again"
                )
                digest = before
                with self._changed:
                    segment.reset()
                    heapq.heappush(self._pending, segment.number)
                    self._changed.notify_all()
            segment.hashed = True
            self.hashed = segment.end
            if self.limits.drop_cache and segment.committed:
                self._drop(segment)
        os.fsync(self._file)
        with self._changed:
            result.append(digest.hexdigest())
            self._changed.notify_all()


class _Watch:
    """Gives up a connection that gives too little; only the time spent waiting for it counts."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waited = 0.0
        self._bytes = 0

    def saw(self, count: int, waited: float) -> None:
        self._waited += waited
        self._bytes += count
        if self._waited < self._limits.stall_seconds:
            return
        if self._bytes < self._limits.stall_bytes_per_second * self._waited:
            raise TransferError(f"only {self._bytes / self._waited:.0f} bytes per second on one connection")
        self._waited, self._bytes = 0.0, 0
