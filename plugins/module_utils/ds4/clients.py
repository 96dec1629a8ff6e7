# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Configuration of coding agents for a served Spark, merged into what their user already has, and removed again.

Sources: engine README "Agent Client Usage" (all four), ds4-on-spark README "Connecting agents" (Codex). Keys that those do not
name were read in the clients themselves: Codex 0.144.1 and 0.171.0 (``model_catalog_json``, ``model_catalog_url``, profile
files), Claude Code 2.1.332 (``CLAUDE_CODE_MAX_CONTEXT_TOKENS``), Pi 1.6.0, opencode 1.18.33.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from .catalogue import FALLBACK_INSTRUCTIONS, MODEL_ID, catalogue_text, limits
from .errors import Ds4Error
from .files import MARKER_LINE, digest, read_json, write_atomic
from .splice import Claim, json_get, json_remove, json_set, toml_merge, toml_strip

CLIENTS = ("codex", "claude", "opencode", "pi")
TOKEN = "dsv4-local"  # noqa: S105  the engine has no authentication; clients insist on some word
MAX_OUTPUT = 384000  # tokens; the model writes no longer answers (engine README)


class Endpoint(NamedTuple):
    """A served Spark as clients see it."""

    provider: str  # id of the provider in every client
    label: str  # what people read
    url: str  # http://HOST:PORT, without /v1
    context: int  # tokens, as served
    max_output: int  # tokens
    catalogue: str  # Codex catalogue, the file's text
    model: str = MODEL_ID


class Layout(NamedTuple):
    """Where each client's files lie below a root."""

    codex: str
    claude: str
    opencode: str
    pi: str
    record: str  # what we wrote and what it replaced; %s is the provider


HOME = Layout(".codex", ".local/bin", ".config/opencode", ".pi/agent", ".config/ds4-fleet/clients-%s.json")
FOLDER = Layout("codex", "", "opencode", "pi", ".clients-%s.json")
LAYOUTS = {"home": HOME, "folder": FOLDER}


class Whole(NamedTuple):
    """A file that is ours altogether."""

    path: str
    text: str
    mode: int


class Toml(NamedTuple):
    """Our tables and top-level keys in a TOML file of the user's."""

    path: str
    top: Mapping[str, str]
    table: tuple[str, ...]
    values: Mapping[str, Any]


class Json(NamedTuple):
    """Our keys in a JSON file of the user's."""

    path: str
    keys: Mapping[tuple[str, ...], Any]


# -------------------------------------------------------------------------------------------------- what is served


def served(answer: Any) -> dict[str, Any]:
    """Limits from the engine's own ``/v1/models``.

    Returns:
        ``model``, ``context`` and ``max_output`` in tokens, and ``catalogue`` (the served Codex catalogue's text, or empty).

    Raises:
        Ds4Error: it is no answer of ds4-server.
    """
    try:
        entry = answer["data"][0]
        context = int(entry["context_length"])
        most = int(entry["top_provider"]["max_completion_tokens"])
        model = str(entry["id"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise Ds4Error(
            "The model list does not say how much context is served",
            found="an answer without data[0].context_length",
            required="/v1/models of ds4-server",
            cure="check that ds4-server answers at this address (make status)",
        ) from None
    models = answer.get("models")
    catalogue = json.dumps({"models": models}, indent=2) + "\n" if isinstance(models, list) and models else ""
    return {"model": model, "context": context, "max_output": output_limit(context, most), "catalogue": catalogue}


def output_limit(context: int, most: int) -> int:
    """Longest answer a client may ask for: the engine's limit, the model's, and a quarter of the window kept for the prompt."""
    return max(min(most, MAX_OUTPUT, context * 3 // 4), 1)


def endpoint(
    provider: str,
    label: str,
    url: str,
    context: int,
    *,
    max_output: int = 0,
    catalogue: str = "",
    instructions: str = "",
    model: str = MODEL_ID,
) -> Endpoint:
    """An endpoint with everything derived that was not given.

    Args:
        catalogue: served Codex catalogue; made from ``context`` when empty.
        instructions: base instructions that replace those of the catalogue; empty keeps them.
        max_output: tokens; three quarters of the window when 0.
    """
    for what, value in (("label", label), ("address", url)):
        if not value or not value.isprintable():
            raise Ds4Error(
                f"The {what} of the provider cannot be written", found=repr(value), required="printable text"
            )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", provider):
        raise Ds4Error(
            "The id of the provider cannot be used in every client",
            found=repr(provider),
            required="letters, digits, - and _",
            cure="correct agent_clients_provider",
        )
    content = json.loads(catalogue or catalogue_text(context))
    for entry in content["models"]:
        entry.update(limits(context))
        if instructions.strip():
            entry["base_instructions"] = instructions
        elif not str(entry.get("base_instructions") or "").strip():  # without any, Codex works badly
            entry["base_instructions"] = FALLBACK_INSTRUCTIONS
    text = json.dumps(content, indent=2) + "\n"
    return Endpoint(
        provider, label, url.rstrip("/"), context, max_output or output_limit(context, context), text, model
    )


# -------------------------------------------------------------------------------------------------- what each client gets


def pieces(
    target: Endpoint, clients: Sequence[str], layout: Layout, *, default: bool, served_catalogue: bool = False
) -> list[Any]:
    """Files and parts of files for the chosen clients, as paths below the root.

    Args:
        default: make this Spark what the clients use when nothing else is asked for.
        served_catalogue: let Codex ask the engine for its catalogue at every start, instead of reading a file.
    """
    makers = {"codex": _codex, "claude": _claude, "opencode": _opencode, "pi": _pi}
    found: list[Any] = []
    for client in CLIENTS:
        if client in clients:
            found += makers[client](target, layout, default, served_catalogue)
    return found


def _codex(target: Endpoint, layout: Layout, default: bool, served_catalogue: bool) -> list[Any]:
    models = f"{target.provider}-models.json"
    chosen: dict[str, str] = {"model": target.model, "model_provider": target.provider}
    provider: dict[str, Any] = {
        "name": target.label,
        "base_url": target.url + "/v1",
        "wire_api": "responses",
        "stream_idle_timeout_ms": 1000000,  # a long thinking turn is silent for minutes
    }
    files: list[Any] = []
    if served_catalogue:
        # Codex asks a provider for its models only when it has a token to send.
        provider["experimental_bearer_token"] = TOKEN
        provider["model_catalog_url"] = target.url + "/v1/models"
    else:
        chosen["model_catalog_json"] = models  # relative to the folder of the file that names it
        files.append(Whole(os.path.join(layout.codex, models), target.catalogue, 0o644))
    profile = f"# {MARKER_LINE}: codex -p {target.provider}\n"
    profile += "".join(f"{key} = {json.dumps(value)}\n" for key, value in chosen.items())
    files.append(Whole(os.path.join(layout.codex, f"{target.provider}.config.toml"), profile, 0o644))
    table = ("model_providers", target.provider)
    files.append(Toml(os.path.join(layout.codex, "config.toml"), chosen if default else {}, table, provider))
    return files


def _claude(target: Endpoint, layout: Layout, default: bool, served_catalogue: bool) -> list[Any]:
    values = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": TOKEN,
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_CUSTOM_MODEL_OPTION": target.model,
        "ANTHROPIC_CUSTOM_MODEL_OPTION_NAME": target.label,
        "ANTHROPIC_CUSTOM_MODEL_OPTION_DESCRIPTION": f"{target.context} tokens of context",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "600000",
    }
    lines = [
        "#!/bin/sh",
        f"# {MARKER_LINE}: Claude Code on {target.label}. Your own Claude Code and its login stay as they are.",
        "unset ANTHROPIC_API_KEY",
        *(f"export {name}={shlex.quote(value)}" for name, value in values.items()),
        'program=$(command -v claude || echo "$HOME/.local/bin/claude")',
        'if [ ! -x "$program" ]; then',
        '  echo "claude is not installed: https://code.claude.com/docs says how" >&2',
        "  exit 127",
        "fi",
        'exec "$program" "$@"',
    ]
    return [Whole(os.path.join(layout.claude, f"claude-{target.provider}"), "\n".join(lines) + "\n", 0o755)]


def _opencode(target: Endpoint, layout: Layout, default: bool, served_catalogue: bool) -> list[Any]:
    model = f"{target.provider}/{target.model}"
    keys: dict[tuple[str, ...], Any] = {
        ("provider", target.provider): {
            "name": target.label,
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": target.url + "/v1", "apiKey": TOKEN},
            "models": {
                target.model: {
                    "name": "DeepSeek V4 Flash",
                    "limit": {"context": target.context, "output": target.max_output},
                }
            },
        },
        ("agent", target.provider): {
            "description": f"DeepSeek V4 Flash served by {target.label}",
            "model": model,
            "temperature": 0,
        },
    }
    if default:
        keys[("model",)] = model
    return [
        Json(os.path.join(layout.opencode, "opencode.json"), {("$schema",): "https://opencode.ai/config.json", **keys})
    ]


def _pi(target: Endpoint, layout: Layout, default: bool, served_catalogue: bool) -> list[Any]:
    provider = {
        "name": target.label,
        "baseUrl": target.url + "/v1",
        "api": "openai-completions",
        "apiKey": TOKEN,
        "compat": {
            "supportsStore": False,
            "supportsDeveloperRole": False,
            "supportsReasoningEffort": True,
            "supportsUsageInStreaming": True,
            "maxTokensField": "max_tokens",
            "supportsStrictMode": False,
            "thinkingFormat": "deepseek",
            "requiresReasoningContentOnAssistantMessages": True,
        },
        "models": [
            {
                "id": target.model,
                "name": "DeepSeek V4 Flash",
                "reasoning": True,
                "thinkingLevelMap": {
                    "off": None,
                    "minimal": "low",
                    "low": "low",
                    "medium": "medium",
                    "high": "high",
                    "xhigh": "xhigh",
                },
                "input": ["text"],
                "contextWindow": target.context,
                "maxTokens": target.max_output,
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
            }
        ],
    }
    found: list[Any] = [Json(os.path.join(layout.pi, "models.json"), {("providers", target.provider): provider})]
    if default:
        keys: dict[tuple[str, ...], Any] = {("defaultProvider",): target.provider, ("defaultModel",): target.model}
        found.append(Json(os.path.join(layout.pi, "settings.json"), keys))
    return found


# -------------------------------------------------------------------------------------------------- the plan


class Change(NamedTuple):
    """One file as it is and as it will be; ``after`` is None when it is removed."""

    path: str
    before: Optional[str]
    after: Optional[str]
    mode: Optional[int]  # None keeps the one it has
    users: bool  # it holds what a user wrote, so it is backed up
    whole: bool = False  # it is ours altogether and may be shown

    def needed(self) -> bool:
        """Whether the file differs, in its text or in its permissions."""
        if self.before is None or self.after is None or self.mode is None:
            return self.before != self.after
        return self.before != self.after or os.stat(self.path).st_mode & 0o777 != self.mode


def plan(root: str, wanted: Sequence[Any], provider: str, layout: Layout) -> tuple[list[Change], dict[str, Any]]:
    """Changes that lead from what is there to what is wanted. An empty ``wanted`` removes everything of ours.

    Raises:
        Ds4Error: a file cannot be merged without losing something of its user's.
    """
    record_path = os.path.join(root, layout.record % provider)
    old: dict[str, Any] = read_json(record_path) or {"whole": {}, "json": {}, "toml": {}, "created": []}
    new: dict[str, Any] = {"schema": 1, "whole": {}, "json": {}, "toml": {}, "created": []}
    changes: list[Change] = []
    by_path = {piece.path: piece for piece in wanted}

    for path, piece in by_path.items():
        full = os.path.join(root, path)
        if isinstance(piece, Whole):
            changes.append(_whole(full, piece, path in old["whole"]))
            new["whole"][path] = digest(piece.text)
    for path in sorted(set(old["whole"]) - set(new["whole"])):
        full = os.path.join(root, path)
        changes.append(Change(full, _current(full), None, None, False, whole=True))

    for path in sorted(set(old["toml"]) | {path for path, piece in by_path.items() if isinstance(piece, Toml)}):
        full = os.path.join(root, path)
        before = _current(full)
        item = by_path.get(path)
        written = old["toml"].get(path, {"top": [], "table": [], "keys": []})
        if item is not None:
            new["toml"][path] = {"top": list(item.top), "table": list(item.table), "keys": list(item.values)}
        now = new["toml"].get(path, written)
        claim = Claim(
            frozenset(written["top"]) | frozenset(now["top"]),
            tuple(now["table"]),
            frozenset(written["keys"]) | frozenset(now["keys"]),
        )
        stripped, added = toml_strip(before or "", provider, claim, full)
        created = before is None or path in old["created"]
        if item is None:
            after: Optional[str] = None if created and not stripped.strip() else stripped
        else:
            after = toml_merge(stripped, provider, dict(item.top), item.table, dict(item.values), full, added)
            new["created"] += [path] if created else []
        changes.append(Change(full, before, after, None, bool(stripped.strip() or added)))

    for path in sorted(set(old["json"]) | {path for path, piece in by_path.items() if isinstance(piece, Json)}):
        full = os.path.join(root, path)
        before = _current(full)
        item = by_path.get(path)
        created = before is None or path in old["created"]
        after, kept = _merge_json(full, before, dict(item.keys) if item else {}, old["json"].get(path, []))
        if item is not None:
            new["json"][path] = kept
            new["created"] += [path] if created else []
        elif created and after is not None and after.strip() == "{}":
            after = None
        changes.append(Change(full, before, after, None, not created))

    empty = not (new["whole"] or new["toml"] or new["json"])
    record = None if empty else json.dumps(new, indent=2, sort_keys=True) + "\n"
    # It keeps what keys of ours replaced, and that may be a key to somebody else's service.
    changes.append(Change(record_path, _current(record_path), record, 0o600, False))
    return [change for change in changes if change.needed()], new


def _current(path: str) -> Optional[str]:
    """Text of a file, its line ends as they are."""
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8", newline="") as stream:
            return stream.read()
    except UnicodeDecodeError as error:
        raise Ds4Error(
            f"{path} cannot be read",
            found=str(error),
            required="UTF-8",
            cure="correct the file, or move it away so that a new one can be written",
        ) from None


def _whole(path: str, piece: Whole, recorded: bool) -> Change:
    before = _current(path)
    if before is not None and not recorded and MARKER_LINE not in before and before != piece.text:
        raise Ds4Error(
            f"{path} exists and is not ours",
            found="no marker of ds4-fleet in it",
            cure="move it away, or choose another agent_clients_provider",
        )
    return Change(path, before, piece.text, piece.mode, False, whole=True)


def _merge_json(
    path: str, before: Optional[str], keys: Mapping[tuple[str, ...], Any], old: Sequence[Mapping[str, Any]]
) -> tuple[Optional[str], list[dict[str, Any]]]:
    """Set our keys, first taking away those of an earlier run that are no longer wanted.

    Returns:
        The text, and for each key of ours what it replaced.
    """
    if before is None and not keys:
        return None, []
    text = before if before is not None and before.strip() else "{}\n"
    earlier = {tuple(entry["key"]): entry for entry in old}
    for key, entry in earlier.items():
        if key not in keys:
            back = "replaced" in entry
            text = json_set(text, key, entry["replaced"], path) if back else json_remove(text, key, path)
    kept: list[dict[str, Any]] = []
    for key, value in keys.items():
        found, current = json_get(text, key, path)
        note: dict[str, Any] = {"key": list(key)}
        if key in earlier:
            note = dict(earlier[key])
        elif found and key[0] == "$schema":
            continue  # the user's own, whatever it says
        elif found and not _looks_ours(current, value):
            note["replaced"] = copy.deepcopy(current)
        if not found or current != value:
            text = json_set(text, key, value, path)
        kept.append(note)
    return text, kept


def _looks_ours(current: Any, value: Any) -> bool:
    """Whether an unrecorded value is one that we wrote, so that a lost record does not make it the user's."""
    if isinstance(current, dict) and TOKEN in (current.get("apiKey"), (current.get("options") or {}).get("apiKey")):
        return True
    return bool(current == value)


def apply(stays: str, changes: Sequence[Change], *, backup: bool = True, now: Optional[float] = None) -> list[str]:
    """Write the changes; links are followed, so that a managed dotfile stays a link. Folders below ``stays`` that become empty go.

    Returns:
        Paths of backups, one for every changed file that a user wrote in.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    backups = []
    for change in changes:
        path = os.path.realpath(change.path)
        if backup and change.users and change.before is not None:
            kept = f"{path}.before-ds4-{stamp}"
            shutil.copy2(path, kept)
            backups.append(kept)
        if change.after is None:
            os.unlink(change.path)
            _drop_empty(os.path.dirname(change.path), stays)
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        mode = (
            change.mode
            if change.mode is not None
            else (os.stat(path).st_mode & 0o777 if change.before is not None else 0o644)
        )
        write_atomic(path, change.after, mode=mode)
    return backups


def _drop_empty(folder: str, stays: str) -> None:
    with contextlib.suppress(OSError):  # not empty, or another host's task was faster
        while folder != stays and folder.startswith(stays + "/"):
            os.rmdir(folder)
            folder = os.path.dirname(folder)


def configure(
    root: str,
    layout: str,
    provider: str,
    target: Optional[Endpoint],
    clients: Sequence[str] = CLIENTS,
    *,
    default: bool = False,
    served_catalogue: bool = False,
    backup: bool = True,
    check: bool = False,
) -> dict[str, Any]:
    """Bring the clients' files below ``root`` to what is wanted; ``target`` None removes everything of ours.

    Returns:
        ``changed``, ``files`` (paths of ours), ``backups``, ``diff`` (what changes in each file).
    """
    places = LAYOUTS[layout]
    root = os.path.abspath(os.path.expanduser(root))
    wanted = pieces(target, clients, places, default=default, served_catalogue=served_catalogue) if target else []
    changes, record = plan(root, wanted, provider, places)
    # The folders on the controller are ours and go when they are empty; a home stays.
    stays = os.path.dirname(os.path.dirname(root)) if layout == "folder" else root
    backups = [] if check else apply(stays, changes, backup=backup)
    files = sorted({*record["whole"], *record["toml"], *record["json"]})
    return {
        "changed": bool(changes),
        "files": [os.path.join(root, path) for path in files],
        "backups": backups,
        "diff": [_shown(change, _words(wanted)) for change in changes],
    }


def _words(wanted: Sequence[Any]) -> frozenset[str]:
    """Every text value of ours."""
    found: set[str] = set()
    rest: list[Any] = [
        [item.top, item.values] if isinstance(item, Toml) else item.keys
        for item in wanted
        if not isinstance(item, Whole)
    ]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping):
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        elif isinstance(value, str):
            found.add(value)
    return frozenset(found)


def _shown(change: Change, ours: frozenset[str]) -> dict[str, str]:
    """Before and after as they may be shown. Of a file with somebody else's text: the lines that change, and no value but ours."""
    before, after = change.before or "", change.after or ""
    if not change.whole:
        old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
        steps = [
            step for step in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if step[0] != "equal"
        ]
        before = "".join(_veiled(line, ours) for _, first, last, _, _ in steps for line in old[first:last])
        after = "".join(_veiled(line, ours) for _, _, _, first, last in steps for line in new[first:last])
    header = change.path
    if change.mode is not None and change.before == change.after:
        header += f" (mode {change.mode:04o})"
    return {"before_header": change.path, "after_header": header, "before": before, "after": after}


_LITERAL = re.compile(r"""("(?:[^"\\]|\\.)*"|'[^']*')(\s*[:=])?""")


def _veiled(line: str, ours: frozenset[str]) -> str:
    """A line with ``…`` for every text value that is not ours; names of keys stay."""

    def veil(found: re.Match[str]) -> str:
        literal = found.group(1)
        if found.group(2) or literal[1:-1] in ours:
            return found.group(0)
        return f"{literal[0]}…{literal[0]}"

    return _LITERAL.sub(veil, line)
