"""The fetcher killed, its journal damaged, the power lost, the clock moved, two of it at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.fetching import Fetcher, Running
from lab.hub import Hub
from tests.faults.conftest import MIB, SIZES, judge

SIZE, LARGE = SIZES["base"], SIZES["mtp"]
Make = Callable[..., Fetcher]
RATE = 4 * MIB  # bytes per second while a run is to be interrupted: three seconds for the file
LARGE_RATE = 16 * MIB  # the same for the large one: four seconds


def wait_for_bytes(fetcher: Fetcher, running: Running, count: int) -> None:
    """Until so many bytes went over the wire, or the fetcher ended."""
    deadline = time.monotonic() + 30
    while fetcher.wire_bytes() < count and running.ended() is None:
        assert time.monotonic() < deadline, running.text()
        time.sleep(0.02)


def interrupt(hub: Hub, fetcher: Fetcher, count: int, rate: int = RATE) -> None:
    """Start it on a slow line and kill it after ``count`` more bytes."""
    hub.options(total_rate=rate)
    running = fetcher.start()
    wait_for_bytes(fetcher, running, fetcher.wire_bytes() + count)
    running.kill()
    hub.options(total_rate=0)


def test_killed_at_random_points(hub: Hub, large: Make, seed: int) -> None:
    rng = random.Random(seed)
    fetcher = large(connections=rng.choice((1, 2, 3, 4)))
    kills = rng.choice((1, 1, 2, 3))
    for _ in range(kills):
        interrupt(hub, fetcher, rng.randrange(0, LARGE // (kills + 1)), rate=LARGE_RATE // kills)
        assert not fetcher.path("mtp").exists()
    finished = fetcher.run()
    judge(fetcher, finished, role="mtp")
    assert finished.rc == 0, finished.text


def test_killed_at_the_very_end(hub: Hub, base: Make, seed: int) -> None:
    """Between the last byte, the record and the final name."""
    rng = random.Random(seed)
    fetcher = base()
    hub.options(total_rate=RATE)
    running = fetcher.start()
    wait_for_bytes(fetcher, running, SIZE)
    if running.ended(rng.uniform(0, 0.2)) is None:
        running.kill()
    judge(fetcher, fetcher.run())


def cut_journal(rng: random.Random, journal: Path, part: Path) -> float:
    os.truncate(journal, rng.randrange(journal.stat().st_size))
    return 1.0


def zero_journal_tail(rng: random.Random, journal: Path, part: Path) -> float:
    data = bytearray(journal.read_bytes())
    count = rng.randrange(1, len(data))
    data[-count:] = bytes(count)
    journal.write_bytes(data)
    return 1.0


def flip_journal_bits(rng: random.Random, journal: Path, part: Path) -> float:
    data = bytearray(journal.read_bytes())
    for _ in range(5):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    journal.write_bytes(data)
    return 0.4


def shuffle_journal(rng: random.Random, journal: Path, part: Path) -> float:
    lines = journal.read_bytes().splitlines(keepends=True)
    rng.shuffle(lines)
    journal.write_bytes(b"".join(lines))
    return 0.0


def lose_journal(rng: random.Random, journal: Path, part: Path) -> float:
    journal.unlink()
    return 1.0


def lose_part(rng: random.Random, journal: Path, part: Path) -> float:
    part.unlink()
    return 1.0


def zero_part_tail(rng: random.Random, journal: Path, part: Path) -> float:
    """What a file system without ordered data leaves after a power loss: the length, and NULs."""
    size = part.stat().st_size
    count = rng.randrange(1, size)
    with part.open("r+b") as stream:
        stream.seek(size - count)
        stream.write(bytes(count))
    return count / SIZE


def cut_part(rng: random.Random, journal: Path, part: Path) -> float:
    size = part.stat().st_size
    os.truncate(part, rng.randrange(size))
    return 1.0


def damage_part(rng: random.Random, journal: Path, part: Path) -> float:
    with part.open("r+b") as stream:
        for _ in range(3):
            stream.seek(rng.randrange(part.stat().st_size))
            stream.write(b"?")
    return 0.1


def part_of_another_file(rng: random.Random, journal: Path, part: Path) -> float:
    part.write_bytes(random.Random(rng.random()).randbytes(SIZE))
    return 1.0


DAMAGES = [
    cut_journal,
    zero_journal_tail,
    flip_journal_bits,
    shuffle_journal,
    lose_journal,
    lose_part,
    zero_part_tail,
    cut_part,
    damage_part,
    part_of_another_file,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_journal_or_part(
    hub: Hub, base: Make, damage: Callable[[random.Random, Path, Path], float], few_seeds: int
) -> None:
    """Only what is doubtful is fetched again, and what is there is never believed blindly."""
    rng = random.Random(few_seeds)
    fetcher = base(connections=2)
    interrupt(hub, fetcher, SIZE * 2 // 3)
    part = Path(fetcher.plan.part(fetcher.plan.files[0]))
    lost = damage(rng, Path(f"{part}.journal"), part)
    finished = fetcher.run()
    judge(fetcher, finished, wire_limit=1.2 + lost)
    assert finished.rc == 0, finished.text


def test_power_loss(
    hub: Hub, tmp_path: Path, loop_disk: Callable[[Path, int], Path], manifest: dict[str, object], seed: int
) -> None:
    """What really was on the disk at that moment: a copy of the image under the mounted file system."""
    rng = random.Random(seed)
    files = {"mtp": manifest["legacy"]["mtp"]}  # type: ignore[index]
    image = tmp_path / "disk"
    fetcher = Fetcher(loop_disk(image, 96), hub, files, connections=rng.choice((1, 2, 4)))
    os.sync()
    hub.options(total_rate=LARGE_RATE)
    running = fetcher.start()
    wait_for_bytes(fetcher, running, rng.randrange(MIB, LARGE))
    os.kill(running.pid, signal.SIGSTOP)
    shutil.copy(image, tmp_path / "disk-after")
    running.kill()
    hub.options(total_rate=0)
    after = Fetcher(loop_disk(tmp_path / "disk-after", 0), hub, files)
    finished = after.run()
    judge(after, finished, role="mtp")
    assert finished.rc == 0, finished.text
    assert "is not what the journal says" not in finished.text, "a segment was in the journal before it was on the disk"
    assert "journal damaged" not in finished.text


CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
/* The wall clock jumps to and fro; the monotonic one goes on. */
static long offset(void) {
    static struct timespec begun;
    static int (*real)(clockid_t, struct timespec *);
    struct timespec now;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    real(CLOCK_MONOTONIC, &now);
    if (!begun.tv_sec) begun = now;
    long tenths = (now.tv_sec - begun.tv_sec) * 10 + (now.tv_nsec - begun.tv_nsec) / 100000000;
    long jump = atol(getenv("CLOCK_JUMP_SECONDS"));
    return tenths < 3 ? 0 : (tenths / 3) % 2 ? jump : -jump;
}
int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += offset();
    return rc;
}
time_t time(time_t *t) { struct timespec now; clock_gettime(CLOCK_REALTIME, &now); if (t) *t = now.tv_sec; return now.tv_sec; }
int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now; clock_gettime(CLOCK_REALTIME, &now); t->tv_sec = now.tv_sec; t->tv_usec = now.tv_nsec / 1000; return 0;
}
"""


@pytest.mark.parametrize("jump_seconds", [86400, 40 * 365 * 86400])
def test_clock_jumps(hub: Hub, base: Make, tmp_path: Path, jump_seconds: int) -> None:
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library), "CLOCK_JUMP_SECONDS": str(jump_seconds)}
    script = "import time; a = time.time(); time.sleep(0.35); b = time.time(); time.sleep(0.3); print(b - a, time.time() - b)"
    told = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(told[0]) > jump_seconds
    assert float(told[1]) < -jump_seconds
    hub.options(total_rate=6 * MIB)
    hub.faults(
        {"fault": "cut", "offset": 5 * MIB},
        {"fault": "stall", "offset": 7 * MIB},
        {"fault": "status", "status": 429, "after": 9, "retry_after": "1"},
    )
    fetcher = base(deadline_seconds=60.0)
    finished = fetcher.run(env=env)
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert finished.seconds < 20
    assert 0 <= fetcher.status()["elapsed_seconds"] < 20


def test_two_starts_at_once(hub: Hub, base: Make) -> None:
    hub.options(total_rate=8 * MIB)
    fetcher = base()
    both = [fetcher.start(), fetcher.start()]
    ends = [running.wait() for running in both]
    for finished in ends:
        judge(fetcher, finished, wire_limit=1.05)
        assert finished.rc == 0, finished.text
    assert sum("another one is at work" in finished.text for finished in ends) == 1
    assert any("base " in finished.text and "MiB/s" in finished.text for finished in ends), "the second one follows"


def test_many_starts_and_kills(hub: Hub, large: Make, seed: int) -> None:
    """Whoever is killed, one of those that follow, or the next start, ends with the right file."""
    rng = random.Random(seed)
    hub.options(total_rate=LARGE_RATE)
    fetcher = large()
    running = [fetcher.start() for _ in range(3)]
    for victim in rng.sample(running, 2):
        time.sleep(rng.uniform(0.1, 1.5))
        if victim.ended() is None:
            victim.kill()
    last = next((one for one in running if one._process.returncode is None), None)
    if last:
        ended = last.wait()
        assert ended.rc == 0, f"the follower must go on when the writer dies:\n{ended.text}"
    judge(fetcher, fetcher.run(), role="mtp")


def test_second_start_while_the_first_fails(hub: Hub, base: Make) -> None:
    hub.options(total_rate=8 * MIB)
    hub.faults({"fault": "flip", "offset": MIB, "count": -1})
    fetcher = base()
    both = [fetcher.start(), fetcher.start()]
    ends = [running.wait() for running in both]
    assert {finished.rc for finished in ends} == {2}
    for finished in ends:
        assert "twice with a wrong hash" in finished.text
        assert "Cure: " in finished.text
    assert fetcher.wire_bytes() <= 2.2 * SIZE


def test_half_written_final_state_is_repaired(hub: Hub, base: Make) -> None:
    """A record without its file, and a file without its record."""
    fetcher = base()
    judge(fetcher, fetcher.run())
    record = fetcher.directory / f"{fetcher.path('base').name}.record.json"
    record.unlink()
    finished = fetcher.run()
    judge(fetcher, finished, wire_limit=1.0)
    record.write_text('{"schema": 1')
    judge(fetcher, fetcher.run(), wire_limit=1.0)
    fetcher.path("base").unlink()
    judge(fetcher, fetcher.run(), wire_limit=2.0)


def test_second_look_reads_nothing_and_deep_look_finds_damage(hub: Hub, base: Make) -> None:
    fetcher = base()
    judge(fetcher, fetcher.run())
    path = fetcher.path("base")
    before = path.stat()
    with path.open("r+b") as stream:
        stream.seek(9 * MIB)
        stream.write(b"damage")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetcher.run("verify").rc == 0, "size, time and inode fit: the quick look cannot know"
    deep = fetcher.run("verify", "--deep")
    assert deep.rc == 2
    assert f"bytes {9 * MIB}-" in deep.text, deep.text
    path.touch()
    assert fetcher.run("verify").rc == 2, "touched since it was verified"
    finished = fetcher.run()
    assert finished.rc == 0, finished.text
    assert fetcher.sha256("base") == fetcher.plan.files[0].sha256
    assert fetcher.wire_bytes() <= SIZE + MIB, "only what is damaged is fetched again"
    assert fetcher.leftovers() == []


def test_a_damaged_file_that_somebody_else_shares_is_not_altered(hub: Hub, base: Make, tmp_path: Path) -> None:
    """A hard link keeps its bytes, however wrong they are; a good copy takes its place in our directory."""
    fetcher = base()
    judge(fetcher, fetcher.run())
    theirs = tmp_path / "theirs.gguf"
    os.link(fetcher.path("base"), theirs)
    with theirs.open("r+b") as stream:
        stream.seek(9 * MIB)
        stream.write(b"theirs")
    before = theirs.stat()
    finished = fetcher.run()
    assert finished.rc == 0, finished.text
    assert fetcher.sha256("base") == fetcher.plan.files[0].sha256
    after = theirs.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    with theirs.open("rb") as stream:
        stream.seek(9 * MIB)
        assert stream.read(6) == b"theirs"


def test_what_an_interrupted_write_left_behind_is_swept(hub: Hub, base: Make) -> None:
    fetcher = base()
    (fetcher.directory / ".new-abcdefgh").write_text("half a record")
    judge(fetcher, fetcher.run())
