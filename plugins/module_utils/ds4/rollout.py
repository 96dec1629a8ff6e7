# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Which hosts of a fleet are switched in this run, in which batch, and why the others are not. Pure, for the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def batch_numbers(count: int, batches: Sequence[Any]) -> list[int]:
    """Batch (from 1) of each of ``count`` hosts, by Ansible's rules for ``serial``.

    A percentage is of all hosts and at least one; the last size repeats until no host is left.
    """
    sizes = [
        max(1, int(float(str(size).rstrip("%")) / 100 * count)) if str(size).endswith("%") else max(1, int(size))
        for size in batches
    ] or [count]
    numbers: list[int] = []
    while len(numbers) < count:
        batch = (numbers[-1] if numbers else 0) + 1
        size = sizes[min(batch, len(sizes)) - 1]
        numbers += [batch] * min(size, count - len(numbers))
    return numbers


def plan(
    all_hosts: Sequence[str], present: Sequence[str], facts: Mapping[str, Mapping[str, Any]], batches: Sequence[Any]
) -> dict[str, Any]:
    """Judge every host of the play.

    Args:
        all_hosts: hosts of the play in the order of the inventory, those of ``--limit`` only.
        present: those that neither failed nor were out of reach so far.
        facts: host → ``staged`` (the staged deployment or None), ``drained`` (bool), ``more`` (what else the host's
            turn is needed for, as text) and ``obstacles`` (what verification found against a switch, as text).
        batches: sizes as for ``serial``.

    Returns:
        ``switch`` (names in order), ``rows`` (host → ``{state, text}`` for the table) and ``text``.
    """
    switch: list[str] = []
    rows: dict[str, dict[str, Any]] = {}
    for host in all_hosts:
        known = facts.get(host, {})
        staged = known.get("staged") or {}
        if host not in present:
            rows[host] = {"state": "failed", "text": "absent: failed earlier or out of reach; not switched"}
        elif known.get("drained"):
            rows[host] = {"state": "skipped", "text": "drained (spark_drained); not switched"}
        elif not staged:
            rows[host] = {"state": "skipped", "text": "nothing staged in this run; not switched"}
        elif not staged.get("needs_switch") and not known.get("more"):
            rows[host] = {"state": "ok", "text": f"serves {staged['release']} already; not touched"}
        elif known.get("obstacles"):
            rows[host] = {"state": "failed", "text": f"not switched: {known['obstacles']}"}
        else:
            switch.append(host)
    numbers = batch_numbers(len(switch), batches)
    last = numbers[-1] if numbers else 0
    for host, number in zip(switch, numbers):
        role = ", the canary" if number == 1 and last > 1 else ""
        rows[host] = {
            "state": "planned",
            "text": f"waits in batch {number} of {last}{role}: {_why(facts[host])}",
            "batch": number,
        }
    whys = {host: _why(facts[host]) for host in switch}
    return {"switch": switch, "rows": rows, "text": _text(switch, numbers, rows, whys)}


def _why(known: Mapping[str, Any]) -> str:
    """All reasons for a host's turn."""
    return "; ".join([*known["staged"]["reasons"], *([known["more"]] if known.get("more") else [])])


def _text(
    switch: Sequence[str], numbers: Sequence[int], rows: Mapping[str, Mapping[str, Any]], whys: Mapping[str, str]
) -> str:
    by_batch: dict[int, list[str]] = {}
    for host, number in zip(switch, numbers):
        by_batch.setdefault(number, []).append(host)
    lines = [f"  batch {number}: {', '.join(hosts)}" for number, hosts in by_batch.items()]
    others = [f"  {host}: {whys.get(host) or row['text']}" for host, row in rows.items()]
    head = (
        f"Rollout: {len(switch)} of {len(rows)} host(s) to switch" if switch else "Rollout: no host is to be switched"
    )
    return "\n".join([head, *lines, *others])


def halt(
    order: Sequence[str], batch: Sequence[str], outcomes: Mapping[str, str], batches: Sequence[Any], allowed: float = 0
) -> str:
    """Why this batch must not begin, or an empty string.

    Ansible ends a rollout by itself when more than ``allowed`` percent of a batch failed, but lets hosts pass that were lost.

    Args:
        order: all hosts of the rollout in order. batch: hosts of the present one.
        outcomes: host → ``proven`` or ``skipped``; one that is missing failed or was lost, wherever in its batch that happened.
        batches: sizes as for ``serial``.
        allowed: ``max_fail_percentage``.
    """
    first = min((order.index(host) for host in batch if host in order), default=0)
    numbers = batch_numbers(len(order), batches)
    earlier = order[:first]
    for number in sorted(set(numbers[:first])):
        hosts = [host for host, other in zip(order, numbers) if other == number]
        lost = [host for host in hosts if not outcomes.get(host)]
        if len(lost) > len(hosts) * allowed / 100:
            share = f" (more than {allowed:g} % of batch {number})" if allowed else ""
            return f"{', '.join(lost)} failed or was lost in an earlier batch{share}. Cure: see to it, then run again"
    if earlier and not any(outcomes.get(host) == "proven" for host in earlier):
        tried = ", ".join(f"{host} {'was left alone as busy' if outcomes.get(host) else 'failed'}" for host in earlier)
        return f"no canary was proven ({tried}). Cure: run again later, or set engine_service_busy: wait"
    return ""
