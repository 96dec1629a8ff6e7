# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Figures of the fetcher, each as a ratio within this one run: ``python3 -m lab.bench_weights`` (root, Linux).

A network namespace of its own is joined to this host by a virtual cable whose rate the kernel limits (tbf). The hub
serves at this end, the fetcher and its rivals (curl, sha256sum) run at the other. Every figure is measured anew for
every comparison, because disks and neighbours change: only the ratio counts. Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from .fetching import Fetcher, lab_file
from .hub import ROOT, Hub, weights

MIB = weights.MIB
HOST, GUEST, PREFIX = "10.214.213.1", "10.214.213.2", 30
ROLE = "base"


class Figure(NamedTuple):
    """One line of the table. ``bar`` is what ``value`` is held against; None: told for information."""

    name: str
    value: float
    unit: str
    bar: float | None
    at_least: bool
    detail: str

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def command(*argv: str | Path) -> str:
    """Run a program of the system; its output.

    Raises:
        RuntimeError: it failed; its message is included.
    """
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(str(word) for word in argv[:6])}: {done.stderr.strip()}")
    return done.stdout


class Link:
    """A virtual cable to a network namespace, with a rate that the kernel keeps."""

    def __init__(self) -> None:
        self.name = f"ds4bench{os.getpid()}"
        self.near, self.far = f"b{os.getpid()}h", f"b{os.getpid()}g"
        self.inside = ["ip", "netns", "exec", self.name]

    def __enter__(self) -> Link:
        command("ip", "netns", "add", self.name)
        try:
            command("ip", "link", "add", self.near, "type", "veth", "peer", "name", self.far, "netns", self.name)
            command("ip", "address", "add", f"{HOST}/{PREFIX}", "dev", self.near)
            command("ip", "link", "set", self.near, "up")
            command(*self.inside, "ip", "address", "add", f"{GUEST}/{PREFIX}", "dev", self.far)
            command(*self.inside, "ip", "link", "set", self.far, "up")
            command(*self.inside, "ip", "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        command("ip", "netns", "delete", self.name)  # takes the cable along

    def rate(self, mbit: int | None) -> None:
        """Limit what comes to the guest; None: no limit."""
        subprocess.run(["tc", "qdisc", "delete", "dev", self.near, "root"], capture_output=True, check=False)
        if mbit:
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", "512k", "latency", "50ms"]
            command("tc", "qdisc", "add", "dev", self.near, "root", *shape)


class Bench:
    """Everything one run of the bench needs."""

    def __init__(self, folder: Path, hub: Hub, link: Link, size: int) -> None:
        self.folder, self.hub, self.link, self.size = folder, hub, link, size
        self.entry = weights.manifest({ROLE: size})["0731"][ROLE]
        self.url = f"{hub.url}/{self.entry['repo']}/resolve/{self.entry['revision']}/{self.entry['file']}"
        self.count = 0

    def fetch(self, **settings: Any) -> tuple[float, Fetcher, int]:
        """Seconds, fetcher and peak KiB of one fetch into an empty directory."""
        self.settle()
        self.count += 1
        fetcher = Fetcher(
            self.folder / f"fetch{self.count}",
            self.hub,
            {ROLE: self.entry},
            prefix=self.link.inside,
            **{"connections": 8, "deadline_seconds": 0.0, "stall_seconds": 30.0, "backoff_seconds": 1.0, **settings},
        )
        finished = fetcher.run(timeout_seconds=900)
        if finished.rc or fetcher.sha256(ROLE) != self.entry["sha256"]:
            raise RuntimeError(f"the fetch failed: {finished.text}")
        return finished.seconds, fetcher, finished.peak_kib

    def curl(self, *words: str) -> float:
        """Seconds of one plain transfer to a file on the same disk, until the data is there."""
        self.settle()
        target = self.folder / "plain"
        target.unlink(missing_ok=True)
        begun = time.monotonic()
        command(*self.link.inside, "curl", "-fsSL", "-o", target, *words, self.url)
        command("sync", "-d", target)
        return time.monotonic() - begun

    def settle(self) -> None:
        """Let earlier writes reach the disk, so that nobody pays for somebody else's."""
        os.sync()


def hash_seconds(path: Path) -> float:
    """Time of hashing alone, from the page cache, with the library that the fetcher uses."""
    with path.open("rb", buffering=0) as stream:
        hashlib.file_digest(stream, "md5")  # warms the page cache
        stream.seek(0)
        begun = time.monotonic()
        hashlib.file_digest(stream, "sha256")
        return time.monotonic() - begun


def shaped_link(bench: Bench, mbit: int, rounds: int) -> list[Figure]:
    """Against one saturating plain transfer on the same link, and against transfer and hash apart."""
    bench.link.rate(mbit)
    plain, fetched, peaks = [], [], []
    directory = Path()
    for _ in range(rounds):
        plain.append(bench.curl())
        seconds, fetcher, peak = bench.fetch()
        fetched.append(seconds)
        peaks.append(peak)
        directory = fetcher.path(ROLE)
    bench.link.rate(None)
    hashing = hash_seconds(directory)
    begun = time.monotonic()
    command("sha256sum", directory)
    summing = time.monotonic() - begun
    transfer, fetch = min(plain), min(fetched)
    slower = max(transfer, hashing)
    rate = bench.size / MIB / fetch
    told = f"fetch {fetch:.2f} s ({rate:.0f} MiB/s), plain transfer {transfer:.2f} s, hash {hashing:.2f} s, sha256sum {summing:.2f} s"
    return [
        Figure(f"{mbit} Mbit/s: throughput / plain transfer", 100 * transfer / fetch, "%", 98.0, True, told),
        Figure(f"{mbit} Mbit/s: fetch + verify / slower of both", fetch / slower, "×", 1.10, False, told),
        Figure(
            f"{mbit} Mbit/s: fetch + verify / curl, then sha256sum",
            fetch / (transfer + summing),
            "×",
            None,
            False,
            told,
        ),
        Figure(
            "peak memory of the fetcher",
            max(peaks) / 1024,
            "MiB",
            64.0,
            False,
            f"{rounds} runs, {bench.size // MIB} MiB",
        ),
    ]


def connection_limits(bench: Bench, mib_per_second: int) -> Figure:
    """Against one curl when the far side limits every connection."""
    bench.hub.options(connection_rate=mib_per_second * MIB)
    part = min(bench.size, mib_per_second * MIB * 5)
    one = part / bench.curl("--range", f"0-{part - 1}")
    seconds, _, _ = bench.fetch(connections=8)
    bench.hub.options(connection_rate=0)
    eight = bench.size / seconds
    told = f"8 connections {eight / MIB:.1f} MiB/s, one curl {one / MIB:.1f} MiB/s, limit {mib_per_second} MiB/s each"
    return Figure("limit per connection: 8 connections / one curl", eight / one, "×", 7.0, True, told)


def second_look(bench: Bench) -> list[Figure]:
    """What a run reads when everything is there and verified, and what it adds to the page cache."""
    _, fetcher, _ = bench.fetch()
    path = fetcher.path(ROLE)
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "plugins/module_utils")}
    argv = [sys.executable, "-m", "ds4.fetch", "--plan", str(fetcher.plan_path)]

    def reads(*words: str) -> tuple[int, float]:
        begun = time.monotonic()
        with subprocess.Popen(
            [*argv, *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
            counters = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
        return counters["rchar"], time.monotonic() - begun

    start_up, _ = reads("--help")  # the interpreter and its modules
    looked, seconds = reads("run")
    cached = int(command("fincore", "-b", "-n", "-o", "RES", path) or 0)
    told = f"{looked - start_up} bytes beside the interpreter's own {start_up}, {cached} bytes of weights in the page cache"
    return [
        Figure("second look: bytes read", max(looked - start_up, cached) / MIB, "MiB", 1.0, False, told),
        Figure("second look: time", seconds, "s", None, False, f"{bench.size // MIB} MiB of weights"),
    ]


def table(figures: list[Figure]) -> str:
    """The figures as people read them."""
    words = {True: "met", False: "MISSED", None: ""}
    lines = []
    for figure in figures:
        bar = "" if figure.bar is None else f"{'≥' if figure.at_least else '≤'} {figure.bar:g} {figure.unit}"
        value = f"{figure.value:.2f} {figure.unit}"
        lines.append(f"{figure.name:58} {value:>12} {bar:>11}  {words[figure.met]:6}  {figure.detail}")
    return "\n".join(lines)


@contextmanager
def set_up(mib: int) -> Iterator[Bench]:
    """Link, hub and folders; all gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ds4-bench-", dir="/var/tmp") as name, Link() as link:
        folder = Path(name)
        file = lab_file("0731", ROLE)
        weights.write_file(file, mib * MIB, str(folder / "hub" / file.repo / file.revision / file.file))
        with Hub(folder / "hub", HOST) as hub:
            command("curl", "-fsSLI", "-o", "/dev/null", f"{hub.url}/{file.repo}/resolve/{file.revision}/{file.file}")
            yield Bench(folder, hub, link, mib * MIB)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.bench_weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the file [%(default)s]")
    parser.add_argument("--mbit", type=int, nargs="+", default=[400, 1000], help="rates of the link [%(default)s]")
    parser.add_argument("--rounds", type=int, default=2, help="runs per rate; the best counts [%(default)s]")
    parser.add_argument("--json", type=Path, default=ROOT / "artifacts/bench-weights.json", help="file [%(default)s]")
    options = parser.parse_args()
    if os.geteuid() != 0:
        print("bench_weights: not run. Cure: run as root, it makes a network namespace", file=sys.stderr)
        return 2
    absent = [name for name in ("curl", "ip", "tc", "fincore", "sha256sum") if not shutil.which(name)]
    if absent:
        print(
            f"bench_weights: not run, missing: {', '.join(absent)}. Cure: apt-get install curl iproute2",
            file=sys.stderr,
        )
        return 2
    figures: list[Figure] = []
    with set_up(options.mib) as bench:
        steps: list[Callable[[], list[Figure]]] = [
            *(lambda mbit=mbit: shaped_link(bench, mbit, options.rounds) for mbit in options.mbit),  # type: ignore[misc]
            lambda: [connection_limits(bench, 5)],
            lambda: second_look(bench),
        ]
        for step in steps:
            figures += step()
    print(table(figures))
    missed = [figure.name for figure in figures if figure.met is False]
    value = {
        "schema": 1,
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpus": os.cpu_count(),
        "file_mib": options.mib,
        "figures": [{**figure._asdict(), "met": figure.met} for figure in figures],
        "missed": missed,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    print(f"written to {options.json}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
