# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One host's truth in a few lines: what runs, what is wanted, and how they differ. Pure, for the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ID = "@DEPLOYMENT@"


def settings_drift(manifest: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How arguments and environment of two deployments differ, as ``+new`` and ``-old`` words; their own ids do not count."""

    def words(deployment: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        mine = str(deployment["id"])
        env = sorted(f"{name}={value}".replace(mine, _ID) for name, value in deployment["env"].items())
        return [str(word).replace(mine, _ID) for word in deployment["args"]], env

    found = []
    for have, want in zip(words(manifest), words(wanted)):
        found += [f"-{word}" for word in have if word not in want] + [f"+{word}" for word in want if word not in have]
    return found


def describe(
    query: Mapping[str, Any], host: str, staged: Mapping[str, Any] | None, release: str, unknown: str = ""
) -> dict[str, Any]:
    """Status of one host.

    Args:
        query: answer of ``ds4_deployment`` with ``state: query``.
        staged: answer of ``ds4_deployment`` with ``state: staged`` in check mode, None when that cannot be told.
        release: the pin.
        unknown: why staging cannot be told.

    Returns:
        ``text`` (lines for people), ``drift`` (sentences), ``same`` (bool: it serves exactly what is wanted) and
        ``summary`` for the table.
    """
    service, manifest = query["service"], query.get("manifest")
    drift: list[str] = []
    runs = service["deployment"]
    if manifest and runs:
        wanted = (staged or {}).get("wanted") or manifest
        generation, other = manifest["weights"]["generation"], wanted["weights"]["generation"]
        drift += [f"release {manifest['release']}, wanted {release}"] if manifest["release"] != release else []
        if service["version"] and service["version"].lstrip("v") != str(manifest["build"]["version"]).lstrip("v"):
            drift.append(
                f"the running binary says {service['version']}, it was built as {manifest['build']['version']}"
            )
        drift += [f"weights {generation}, wanted {other}"] if generation != other else []
        changed = settings_drift(manifest, wanted) if generation == other else []
        drift += [f"settings: {' '.join(changed)}"] if changed else []
        drift += list(query.get("problems") or [])
    told = (staged or {}).get("deployment") or query.get("deployment") or {}
    drift += [reason for reason in told.get("reasons") or [] if reason not in drift]
    if runs and not service["answers"]:
        drift.append("it does not answer: it still loads, or hangs")
    if runs and not service["enabled"] and "it does not start at boot" not in drift:
        drift.append("it does not start at boot")
    if unknown:
        drift.append(f"what is wanted cannot be told: {unknown}")
    lines = [f"{host}: {_serving(service, manifest)}", *_numbers(service["metrics"])]
    lines += [f"  differs: {text}" for text in drift] or ["  is exactly what is wanted"]
    history = query.get("history") or []
    if history:
        lines.append("  proven here: " + ", ".join(f"{entry['release']} ({entry['id']})" for entry in history[:3]))
    last = query.get("transaction")
    if last and last["outcome"] != "proven":
        lines.append(f"  last switch ({last['requested_at']}): {last['outcome'] or 'still runs'}. {last['message']}")
    same = bool(runs) and not drift
    return {
        "text": "\n".join(lines),
        "drift": drift,
        "same": same,
        "summary": {
            "room": "engine_service",
            "state": "ok" if same else "changed" if runs else "failed",
            "text": _serving(service, manifest) + (f"; {drift[0]}" if drift else ""),
        },
    }


def _serving(service: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> str:
    if not service["deployment"] or manifest is None:
        return f"nothing of ours serves ({service['state']})"
    answers = "answers" if service["answers"] else "DOES NOT ANSWER"
    where = manifest["service"]
    version = service["version"] or manifest["release"]
    return f"{version} serves as {service['deployment']} on {where['host']}:{where['port']}, {answers}"


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    if not metrics:
        return []
    names = {
        "ds4_uptime_seconds": "up {:.0f} s",
        "ds4_banks_total": "{:.0f} banks",
        "ds4_requests_inflight": "{:.0f} requests running",
        "ds4_spec_accept_ratio": "drafts accepted {:.2f}",
        "ds4_decode_tok_s": "{:.1f} tokens/s",
    }
    return ["  " + ", ".join(text.format(metrics[name]) for name, text in names.items() if name in metrics)]
