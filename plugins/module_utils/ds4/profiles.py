# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a profile means on a given host: memory per context, banks to expect, what a request is charged, disk for prompts.

Every figure rests on the ``figures`` of the data file of settings, which say on whose box they were measured. All results
are estimates except what the running engine itself reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

KIB_PER_GIB = 1024 * 1024


def expected_banks(context: int, explicit: Optional[int], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Banks the engine will plan at boot.

    Measured at three contexts only; between two of them the truth lies between theirs, and beyond the deepest between its
    count and as many as hold the same tokens.

    Returns:
        ``low`` and ``high`` (equal when known), and ``basis``: ``set``, ``measured`` or ``between measurements``.
    """
    if explicit is not None:
        return {"low": explicit, "high": explicit, "basis": "set"}
    points = {int(tokens): int(banks) for tokens, banks in figures["banks_at_context"]["value"].items()}
    if context <= min(points):
        context = min(points)  # the engine's count is flat up to here
    if context in points:
        return {"low": points[context], "high": points[context], "basis": "measured"}
    below = max(tokens for tokens in points if tokens < context)
    above = [tokens for tokens in points if tokens > context]
    low = points[min(above)] if above else max(points[below] * below // context, 1)
    return {"low": low, "high": points[below], "basis": "between measurements"}


def arithmetic(
    config: Mapping[str, Any],
    figures: Mapping[str, Any],
    *,
    mem_available_kib: int = 0,
    loaded: bool = False,
    banks_total: Optional[int] = None,
) -> dict[str, Any]:
    """Figures of one configuration on one host.

    Args:
        config: result of ``engine_config``.
        figures: ``figures`` of the data file of settings.
        mem_available_kib: MemAvailable of the host now; 0 when it is not known.
        loaded: an engine with its weights is already in that memory.
        banks_total: ``ds4_banks_total`` as the running engine reports it.

    Returns:
        ``context`` (tokens), ``gib_per_context``, ``banks`` (see ``expected_banks``) with ``total`` as reported or null,
        ``charge_tokens`` and ``charge_gib`` of a request that names no limit, ``prompt_tokens_without_limit`` (longest such
        prompt), ``free_gib`` for conversations (null when unknown), ``contexts_that_fit``, ``disk_tokens``, ``warnings`` and
        ``lines`` to print.
    """
    context = int(config["context"])
    per_token_kib = float(figures["memory_kib_per_token"]["value"])
    gib_per_context = context * per_token_kib / KIB_PER_GIB
    tranche = config["settings"].get("admission_tranche_tokens")
    charged = int(figures["charged_tokens_without_max_tokens"]["value"] if tranche is None else tranche)
    output = min(int(config["max_output_tokens"]), context)
    charged = min(charged or output, output)  # a tranche of 0 charges the whole possible answer
    banks = expected_banks(context, config.get("banks"), figures)
    banks["total"] = banks_total
    result: dict[str, Any] = {
        "context": context,
        "gib_per_context": round(gib_per_context, 2),
        "banks": banks,
        "charge_tokens": charged,
        "charge_gib": round(charged * per_token_kib / KIB_PER_GIB, 2),
        "prompt_tokens_without_limit": max(context - charged, 0),
        "free_gib": None,
        "contexts_that_fit": None,
        "disk_tokens": None,
        "warnings": [],
    }
    floor = int(config["memory_floor_gib"])
    if mem_available_kib:
        free = mem_available_kib / KIB_PER_GIB - floor
        if not loaded:  # what loading will take: the files, the engine's start-up cache and its own planning margin
            free -= int(config["weights_bytes"]) / 1024**3
            free -= float(figures["weights_overhead_gib"]["value"]) + float(figures["planning_margin_gib"]["value"])
        result["free_gib"] = round(free, 1)
        fit = result["contexts_that_fit"] = max(int(free / gib_per_context), 0)
        if (
            not loaded and banks["basis"] != "set" and fit < banks["high"]
        ):  # measured on a box with nothing beside the engine
            banks.update(low=max(min(banks["low"], fit), 1), high=max(fit, 1), basis="memory")
        if not loaded and free < gib_per_context:
            result["warnings"].append(
                f"Not one full context of {context} tokens is likely to fit: about {free:.1f} GiB would be left for conversations, "
                f"one needs {gib_per_context:.1f} GiB. Cure: a smaller engine_service_settings.context_tokens, a lower "
                "memory_floor_gib, or serving_mode_target: serving to take the desktop's memory."
            )
    if config["kv"]["enabled"]:
        budget = int(config["kv"]["budget_mib"])
        result["disk_tokens"] = int(budget * 1024 / float(figures["disk_kib_per_token"]["value"]))
        if result["disk_tokens"] < context:
            result["warnings"].append(
                f"The budget for kept conversations ({budget} MiB, about {result['disk_tokens']} tokens) holds less than one full "
                f"context of {context} tokens, so the engine would store and evict it in turn. Cure: raise "
                "engine_service_settings.kv_budget_mib."
            )
    result["lines"] = _lines(config, result, loaded)
    return result


def _lines(config: Mapping[str, Any], result: Mapping[str, Any], loaded: bool) -> list[str]:
    banks = result["banks"]
    count = str(banks["low"]) if banks["low"] == banks["high"] else f"{banks['low']} to {banks['high']}"
    basis = {
        "set": "as set",
        "measured": "estimate, measured elsewhere",
        "between measurements": "estimate",
        "memory": "estimate, by this host's memory",
    }[banks["basis"]]
    measured = "" if banks["total"] is None else f"; the engine reports {banks['total']}"
    lines = [
        f"profile {config['profile']}: context {result['context']} tokens, about {result['gib_per_context']:.2f} GiB when full",
        f"banks to expect: {count} ({basis}){measured}",
        f"a request without max_tokens is charged {result['charge_tokens']} tokens beyond its prompt (about {result['charge_gib']:.2f} GiB), "
        f"so its prompt may have {result['prompt_tokens_without_limit']}",
    ]
    if result["free_gib"] is not None:
        when = "now" if loaded else "after loading"
        lines.append(
            f"memory for conversations {when}: about {result['free_gib']:.1f} GiB above the floor of {config['memory_floor_gib']} GiB, "
            f"{result['contexts_that_fit']} full context(s)"
        )
    if result["disk_tokens"] is not None:
        lines.append(
            f"prompts kept on disk, in plain text: up to {config['kv']['budget_mib']} MiB, about {result['disk_tokens']} tokens, "
            f"in {config['kv']['directory']}; kv_persistence: false keeps none"
        )
    return lines
