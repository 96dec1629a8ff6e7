"""Every fault of the stand-in hub against the fetcher: each alone, then several at once under random seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.fetching import Fetcher
from lab.hub import Hub
from lab.hub.faults import FAULTS, random_rules
from tests.faults.conftest import MIB, SIZES, judge

SIZE = SIZES["base"]
Make = Callable[..., Fetcher]

# Faults that pass: (name of the case, rules, options of the hub). All must end with the right file.
PASSING: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("cut five times at one place", [{"fault": "cut", "offset": 5 * MIB, "count": 5}], {}),
    ("cut in twenty answers", [{"fault": "cut", "count": 20}], {}),
    ("short in ten answers", [{"fault": "short", "count": 10}], {}),
    ("stall", [{"fault": "stall", "offset": 7 * MIB}], {}),
    ("stall of all connections", [{"fault": "stall", "count": 4}], {}),
    ("trickle", [{"fault": "trickle", "offset": 3 * MIB + 1, "rate": 512}], {}),
    ("429 with Retry-After in seconds", [{"fault": "status", "status": 429, "retry_after": "1", "at": "hub"}], {}),
    ("429 without Retry-After", [{"fault": "status", "status": 429, "count": 3, "at": "hub"}], {}),
    ("429 midway", [{"fault": "status", "status": 429, "retry_after": "1", "after": 5, "count": 2}], {}),
    (
        "500 and 503",
        [{"fault": "status", "status": 500, "count": 3}, {"fault": "status", "status": 503, "after": 6}],
        {},
    ),
    ("403 midway", [{"fault": "expire", "offset": 4 * MIB}], {}),
    ("links that live a moment", [], {"link_seconds": 0.5, "total_rate": 6 * MIB}),
    ("web page instead of bytes", [{"fault": "html", "count": 3}], {}),
    ("web page instead of a redirect", [{"fault": "html", "count": 2, "at": "hub"}], {}),
    ("zeros at first", [{"fault": "zeros"}], {}),
    ("ignored range", [{"fault": "ignore_range", "count": 3}], {}),
    ("wrong range", [{"fault": "wrong_range", "extra": 4096, "count": 5}], {}),
    ("wrong total", [{"fault": "wrong_total", "extra": 1, "count": 5}], {}),
    ("short length", [{"fault": "short_length", "extra": 1, "count": 5}], {}),
    ("too long", [{"fault": "long", "extra": 1, "count": 5}], {}),
    ("no length", [{"fault": "no_length", "count": -1}], {}),
    ("no length and cut", [{"fault": "no_length", "count": -1}, {"fault": "short", "count": 5}], {}),
    ("slow start", [{"fault": "slow_start", "seconds": 0.7, "count": 4}], {}),
    ("reset before the answer", [{"fault": "reset", "count": 5}, {"fault": "reset", "at": "hub"}], {}),
    ("CDN refuses connections", [{"fault": "refuse", "seconds": 0.7, "after": 3}], {}),
    ("hub refuses connections", [{"fault": "refuse", "seconds": 0.7, "at": "hub"}], {}),
    ("no HEAD", [{"fault": "no_head", "count": -1}], {}),
    ("hub forgets its headers", [{"fault": "bare", "count": -1}], {}),
    ("mirror without headers", [], {"mirror": True}),
    ("hub without a CDN", [], {"direct": True}),
    ("hub on Xet", [], {"xet": True}),
    ("limit of requests per address", [], {"requests_per_address": 1, "window_seconds": 1.0, "link_seconds": 0.3}),
]


@pytest.mark.parametrize(("rules", "options"), [case[1:] for case in PASSING], ids=[case[0] for case in PASSING])
def test_a_passing_fault(hub: Hub, base: Make, rules: list[dict[str, Any]], options: dict[str, Any]) -> None:
    hub.options(**options)
    hub.faults(*rules)
    fetcher = base()
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    # Whatever may miss this client by its nature must not be what the case is about.
    for rule in hub.rules():
        assert rule["fired"] or rule["fault"] == "no_head", f"{rule['fault']} never happened"


def test_retry_after_is_honoured(hub: Hub, base: Make) -> None:
    hub.faults({"fault": "status", "status": 429, "retry_after": "2", "after": 3})
    fetcher = base()
    judge(fetcher, fetcher.run())
    requests = [request for request in hub.stats()["requests"] if request["at"] == "cdn"]
    refused = next(request for request in requests if request["status"] == 429)
    later = [r["begin"] for r in requests if r["begin"] > refused["end"] + 0.2]
    assert later
    assert min(later) - refused["end"] >= 2.0


def test_a_fleet_behind_one_address(hub: Hub, tmp_path: Path, manifest: dict[str, Any]) -> None:
    """Three hosts share the limit of one address; all arrive."""
    hub.options(requests_per_address=1, window_seconds=1.0)
    files = {"drafter": manifest["0731"]["drafter"]}
    fetchers = [Fetcher(tmp_path / f"spark{n}", hub, files) for n in range(3)]
    running = [fetcher.start() for fetcher in fetchers]
    for fetcher, run in zip(fetchers, running):
        finished = run.wait()
        judge(fetcher, finished, role="drafter", wire_limit=3.2)
        assert finished.rc == 0, finished.text
    assert [r["status"] for r in hub.stats()["requests"] if r["at"] == "hub"].count(429) >= 1


def test_flipped_byte_once(hub: Hub, base: Make) -> None:
    hub.faults({"fault": "flip", "offset": 5 * MIB + 7})
    fetcher = base()
    finished = fetcher.run()
    judge(fetcher, finished, wire_limit=2.1)
    assert finished.rc == 0
    assert "wrong hash" in finished.text
    assert "the first download was damaged at bytes 5242880-" in finished.text, finished.text


def test_flipped_byte_always(hub: Hub, base: Make) -> None:
    hub.faults({"fault": "flip", "offset": 5 * MIB + 7, "count": -1})
    fetcher = base()
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2, "asking again does not cure it"
    assert "twice with a wrong hash" in finished.text
    assert fetcher.plan.files[0].sha256 in finished.text
    assert fetcher.wire_bytes() <= 2.1 * SIZE, "fetched again once, then stopped"


def test_another_file_of_the_same_size_under_this_name(hub: Hub, tmp_path: Path, manifest: dict[str, Any]) -> None:
    """The hub says at once that the hash is another: nothing moves. A mirror does not say: found by hash."""
    entry = {**manifest["0731"]["base"], "file": manifest["legacy"]["base"]["file"]}
    fetcher = Fetcher(tmp_path / "a", hub, {"base": entry})
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert manifest["legacy"]["base"]["sha256"] in finished.text
    assert fetcher.wire_bytes() < MIB
    hub.reset()
    hub.options(mirror=True)
    known = {manifest["legacy"]["base"]["sha256"]: "legacy base"}
    fetcher = Fetcher(tmp_path / "b", hub, {"base": entry}, known=known)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert "legacy base" in finished.text


# Faults that do not pass: all must end soon, clearly, and with few bytes moved.
LASTING: list[tuple[str, list[dict[str, Any]], dict[str, Any], str]] = [
    ("404", [{"fault": "status", "status": 404, "at": "hub", "count": -1}], {}, "404"),
    ("401", [{"fault": "status", "status": 401, "at": "hub", "count": -1}], {}, "weights_token_file"),
    ("403", [], {"forbidden": True}, "403"),
    ("403 of the CDN", [{"fault": "status", "status": 403, "count": -1}], {}, "403"),
    ("web page for ever", [{"fault": "html", "count": -1}], {}, "text/html"),
    ("web page of the hub", [{"fault": "html", "at": "hub", "count": -1}], {}, "text/html"),
    ("zeros of the right length", [{"fault": "zeros", "count": -1}], {}, "zeros"),
    ("range never honoured", [{"fault": "ignore_range", "count": -1}], {}, "Range"),
    ("wrong range for ever", [{"fault": "wrong_range", "count": -1, "extra": 1}], {}, "Content-Range"),
    ("wrong total for ever", [{"fault": "wrong_total", "count": -1, "extra": 1}], {}, "Content-Range"),
    ("short length for ever", [{"fault": "short_length", "count": -1}], {}, "length"),
    ("reset for ever", [{"fault": "reset", "count": -1}], {}, "127.0.0.2"),
    ("hub resets for ever", [{"fault": "reset", "at": "hub", "count": -1}], {}, "127.0.0.1"),
    ("silent for ever", [{"fault": "slow_start", "seconds": 60, "count": -1}], {}, "silent"),
    ("500 for ever", [{"fault": "status", "status": 500, "count": -1}], {}, "500"),
    ("429 for ever", [{"fault": "status", "status": 429, "at": "hub", "count": -1}], {}, "429"),
    ("redirects in a circle", [{"fault": "loop", "count": -1}], {}, "redirects"),
    (
        "redirect to a foreign host",
        [{"fault": "redirect", "url": "http://foreign.invalid/x", "count": -1}],
        {},
        "weights_allowed_hosts",
    ),
]


@pytest.mark.parametrize(("rules", "options", "word"), [c[1:] for c in LASTING], ids=[c[0] for c in LASTING])
def test_a_lasting_fault(hub: Hub, base: Make, rules: list[dict[str, Any]], options: dict[str, Any], word: str) -> None:
    hub.options(**options)
    hub.faults(*rules)
    fetcher = base(retries=3)
    finished = fetcher.run(timeout_seconds=60)
    judge(fetcher, finished)
    assert finished.rc != 0
    assert word in finished.text, finished.text
    assert fetcher.wire_bytes() <= 6 * MIB, "no bytes for nothing"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_the_first_request_is_final(hub: Hub, base: Make, status: int) -> None:
    hub.faults({"fault": "status", "status": status, "at": "hub", "count": -1})
    fetcher = base()
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 2
    assert len(hub.stats()["requests"]) <= fetcher.plan.connections, "asked again after a refusal"


def test_file_is_shorter_than_the_manifest_says(hub: Hub, tmp_path: Path, manifest: dict[str, Any]) -> None:
    hub.options(mirror=True)
    entry = {**manifest["0731"]["base"], "bytes": SIZE + MIB}
    fetcher = Fetcher(tmp_path, hub, {"base": entry}, retries=3)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc != 0
    assert str(SIZE + MIB) in finished.text


def test_a_second_source_takes_over(hub: Hub, base: Make, running_tls_hub: Hub) -> None:
    """What the first source gave before it failed is kept."""
    hub.faults({"fault": "status", "status": 500, "count": -1, "after": 8})
    running_tls_hub.reset()
    fetcher = base(sources=[hub.url, running_tls_hub.url], ca_file=running_tls_hub.ca_file, retries=2)
    finished = fetcher.run()
    judge(fetcher, finished)
    assert finished.rc == 0, finished.text
    assert 0 < fetcher.wire_bytes() < SIZE
    assert fetcher.wire_bytes() + running_tls_hub.stats()["bytes"]["cdn"] <= 1.2 * SIZE
    running_tls_hub.reset()


def test_unknown_hash_is_taken_from_the_hub_or_recorded_at_first_use(
    hub: Hub, tmp_path: Path, manifest: dict[str, Any]
) -> None:
    entry = {key: value for key, value in manifest["legacy"]["drafter"].items() if key not in {"bytes", "sha256"}}
    for name, mirror, trust in (("hub", False, "hub"), ("mirror", True, "first-use")):
        hub.options(mirror=mirror)
        fetcher = Fetcher(tmp_path / name, hub, {"drafter": entry})
        finished = fetcher.run()
        assert finished.rc == 0, finished.text
        assert fetcher.sha256("drafter") == manifest["legacy"]["drafter"]["sha256"]
        assert fetcher.status()["files"][0]["trust"] == trust
        assert ("first use" in finished.text) is mirror


def test_every_fault_of_the_hub_is_in_the_table() -> None:
    tables = [case[1] for case in PASSING] + [case[1] for case in LASTING]
    assert {rule["fault"] for rules in tables for rule in rules} | {"flip"} == FAULTS


def test_several_faults_at_once(hub: Hub, base: Make, tls_hub: Hub, tmp_path: Path, manifest: Any, seed: int) -> None:
    """Random rules, rates, TLS and mirrors. All of them pass, so the file must arrive."""
    rng = random.Random(seed)
    chosen = tls_hub if rng.random() < 0.3 else hub
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["mirror"] = True
    if rng.random() < 0.3:
        options["link_seconds"] = 1.0
    if rng.random() < 0.3:
        options["total_rate"] = rng.choice((8, 16, 32)) * MIB
    rules = random_rules(seed, SIZE)
    chosen.options(**options)
    chosen.faults(*rules)
    connections = rng.choice((1, 2, 4, 8))
    fetcher = Fetcher(tmp_path, chosen, {"base": manifest["0731"]["base"]}, connections=connections, retries=20)
    finished = fetcher.run()
    flips = sum(rule["fired"] for rule in chosen.rules() if rule["fault"] == "flip")
    judge(fetcher, finished, wire_limit=1.2 + flips)
    assert finished.rc == 0 or flips > 1, f"{rules} {options}\n{finished.text}"
