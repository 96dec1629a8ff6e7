# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the stand-in hub can do wrong, as rules that are spent one by one.

A rule is a JSON object. Only ``fault`` is needed::

    {"fault": "cut", "at": "cdn", "count": 5, "after": 0, "file": "0731", "offset": 10485760}

fault
    answers        ``status`` (a code: with ``retry_after``, a number of seconds or an HTTP date), ``html`` (200 with a
                   login page), ``no_head`` (405 to HEAD), ``redirect`` (302 to ``url``), ``loop`` (302 to itself),
                   ``reset`` (connection reset before any answer), ``refuse`` (reset, then the port refuses connections
                   for ``seconds``); one of them per request, in the order of the rules
    headers        ``bare`` (no X-Linked-*, X-Repo-Commit and X-Xet-Hash), ``ignore_range`` (200 with the whole file), ``wrong_range`` (206 with another range, and its bytes,
                   ``extra`` bytes away), ``wrong_total`` (Content-Range names another size), ``short_length``
                   (Content-Length and body end ``extra`` bytes early), ``long`` (``extra`` bytes too many),
                   ``no_length`` (no Content-Length, the end of the connection ends the body)
    time           ``slow_start`` (``seconds`` before the answer)
    body           ``cut`` (reset), ``short`` (closed cleanly), ``stall`` (silent for ``seconds``, then reset),
                   ``trickle`` (``rate`` bytes per second from there on), ``flip`` (one byte wrong, right length),
                   ``expire`` (cut, and the signed link is refused with 403 from then on), ``zeros`` (nothing but NULs
                   from there on, as of a file whose room was taken and never filled)
at
    ``hub`` (resolve and API), ``cdn`` (the bytes) or ``proxy``; by default where the fault belongs.
count, after
    how often it happens (-1: always), and how many matching requests pass before the first time.
file
    part of a file name; empty matches every file.
offset
    byte of the file at which a body fault happens, if the answer covers it (``flip``: the byte itself). Without it a
    body fault happens half way through the answer, and ``zeros`` fill all of it.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any

ANSWER_FAULTS = frozenset({"status", "html", "no_head", "redirect", "loop", "reset", "refuse"})
HEADER_FAULTS = frozenset({"ignore_range", "wrong_range", "wrong_total", "short_length", "long", "no_length"})
TIME_FAULTS = frozenset({"slow_start"})
BODY_FAULTS = frozenset({"cut", "short", "stall", "trickle", "flip", "expire", "zeros"})
FAULTS = ANSWER_FAULTS | HEADER_FAULTS | TIME_FAULTS | BODY_FAULTS | {"bare"}
PLACES = ("hub", "cdn", "proxy")
HUB_BY_DEFAULT = frozenset({"no_head", "redirect", "loop", "bare"})


@dataclasses.dataclass
class Rule:
    """One rule and how much of it is spent."""

    fault: str
    at: str = ""
    count: int = 1
    after: int = 0
    file: str = ""
    offset: int | None = None
    seconds: float = 0.0
    rate: int = 1024  # bytes per second
    status: int = 0
    retry_after: str = ""
    url: str = ""
    extra: int = 1
    seen: int = 0
    fired: int = 0

    @classmethod
    def parse(cls, value: dict[str, Any]) -> Rule:
        """A rule from JSON.

        Raises:
            ValueError: unknown fault, place or key, or a key of the wrong type.
        """
        try:
            rule = cls(**value)
        except TypeError as error:
            raise ValueError(f"not a rule: {value!r}: {error}") from error
        rule.retry_after = str(rule.retry_after)
        if rule.fault not in FAULTS:
            raise ValueError(f"unknown fault {rule.fault!r}; known: {', '.join(sorted(FAULTS))}")
        rule.at = rule.at or ("hub" if rule.fault in HUB_BY_DEFAULT else "cdn")
        if rule.at not in PLACES:
            raise ValueError(f"unknown place {rule.at!r}; known: {', '.join(PLACES)}")
        if rule.fault == "status" and not rule.status:
            raise ValueError("the fault status needs a status")
        if rule.fault in {"stall", "refuse", "slow_start"} and not rule.seconds:
            rule.seconds = {"stall": 3600.0, "refuse": 2.0, "slow_start": 3.0}[rule.fault]
        return rule


class Rules:
    """The rules of one hub. Safe for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []

    def set(self, values: list[dict[str, Any]], *, keep: bool = False) -> None:
        """Replace the rules, or with ``keep`` add to them."""
        rules = [Rule.parse(value) for value in values]
        with self._lock:
            self._rules = (self._rules if keep else []) + rules

    def as_json(self) -> list[dict[str, Any]]:
        with self._lock:
            return [dataclasses.asdict(rule) for rule in self._rules]

    def take(
        self,
        at: str,
        method: str,
        file: str,
        span: tuple[int, int] | None = None,
        names: frozenset[str] = FAULTS,
        most: int = 99,
    ) -> list[Rule]:
        """Spend and return the rules that hit this request.

        Args:
            at: place of the request.
            method: HTTP method; ``no_head`` hits HEAD, the body and header faults never do.
            file: name of the file asked for.
            span: first byte and byte behind the last that the answer would carry; None before that is known.
            names: faults that the caller is ready to perform now.
            most: how many rules at most.
        """
        taken: list[Rule] = []
        with self._lock:
            for rule in self._rules:
                if len(taken) == most:
                    break
                if rule.fault not in names or rule.at != at or rule.file not in file:
                    continue
                if method == "HEAD" and rule.fault in BODY_FAULTS | HEADER_FAULTS:
                    continue
                if method != "HEAD" and rule.fault == "no_head":
                    continue
                if rule.fault in BODY_FAULTS and (span is None or not _covers(rule, span)):
                    continue
                rule.seen += 1
                if rule.seen <= rule.after or (rule.count >= 0 and rule.fired >= rule.count):
                    continue
                rule.fired += 1
                taken.append(dataclasses.replace(rule))
        return taken


def _covers(rule: Rule, span: tuple[int, int]) -> bool:
    first, end = span
    if rule.offset is None:
        return end > first
    if rule.fault == "flip":
        return first <= rule.offset < end
    return first < rule.offset < end  # an answer that begins there would otherwise never make progress


def random_rules(seed: int, size: int) -> list[dict[str, Any]]:
    """One to four passing troubles in a random order and place, the same for the same seed.

    Every one of them ends by itself, so a fetcher that retries must end with the right file.

    Args:
        seed: of the choice.
        size: bytes of the file to be fetched.
    """
    rng = random.Random(seed)
    rules: list[dict[str, Any]] = []
    for name in rng.choices(sorted(_PASSING), k=rng.randint(1, 4)):
        rule: dict[str, Any] = {"fault": name, "count": rng.randint(1, 3), "after": rng.randint(0, 3)}
        rule.update(_PASSING[name])
        if name in BODY_FAULTS and rng.random() < 0.7:
            rule.update(offset=rng.randrange(1, size), after=0)  # few answers cover one place: let none of them pass
        if name == "status":
            rule["at"] = rng.choice(("hub", "cdn"))
            rule["status"] = rng.choice((429, 429, 500, 502, 503))
            if rule["status"] in {429, 503} and rng.random() < 0.5:
                rule["retry_after"] = "1"
        if name in {"reset", "refuse"}:
            rule["at"] = rng.choice(("hub", "cdn"))
        if name == "flip":
            rule["count"] = 1
        rules.append(rule)
    return rules


# Troubles a fetcher must outlive, with the times that keep a test short.
_PASSING: dict[str, dict[str, Any]] = {
    "cut": {},
    "short": {},
    "stall": {"seconds": 600.0, "count": 1},
    "trickle": {"rate": 512, "count": 1},
    "flip": {},
    "expire": {},
    "status": {},
    "html": {},
    "ignore_range": {},
    "wrong_range": {"extra": 4096},
    "wrong_total": {},
    "short_length": {"extra": 1000},
    "long": {"extra": 1000},
    "no_length": {},
    "slow_start": {"seconds": 0.7},
    "reset": {},
    "refuse": {"seconds": 1.0, "count": 1},
}
