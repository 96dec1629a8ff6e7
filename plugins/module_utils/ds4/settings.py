# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""From readable settings to the arguments and environment of ds4-server, or to one list of everything that is wrong.

Pure functions over the data file of settings (roles/engine_service/vars/settings.yml), which they call the catalogue:
no file, no process and no network is touched. Every judgement about a value rests on that file; only what the engine
does with *combinations* is written here.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from .errors import Ds4Error

MODES = ("auto", "dspark", "mtp", "plain")
EXPOSE = ("none", "lan")
SPECULATION_FLAGS = {"drafter": "--dspark", "mtp": "--mtp"}
LOOPBACK = ipaddress.ip_network("127.0.0.0/8")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


def version(text: str) -> Optional[tuple[int, ...]]:
    """``v0.6.3.1`` → ``(0, 6, 3, 1)``; None for what is no version (a branch, a commit)."""
    found = re.match(r"v?(\d+(?:\.\d+)+)", text.strip())
    return tuple(int(part) for part in found.group(1).split(".")) if found else None


def older(release: tuple[int, ...], since: str) -> bool:
    """True when ``release`` came before ``since``; missing parts count as zero."""
    wanted = version(since) or ()
    width = max(len(release), len(wanted))
    return release + (0,) * (width - len(release)) < wanted + (0,) * (width - len(wanted))


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name closest to ``name``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def plain(value: Any) -> Any:
    """A value without the tags that Ansible hangs on to strings and numbers."""
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


# -------------------------------------------------------------------------------------------------- one value


def allowed(spec: Mapping[str, Any]) -> str:
    """What a setting accepts, in words: the ``required`` part of a message and a column of the documentation."""
    unit = f" {spec['unit']}" if spec.get("unit") else ""
    kind = spec["type"]
    if kind in ("int", "float"):
        lowest, highest = spec["range"]
        word = "a whole number" if kind == "int" else "a number"
        return f"{word} from {lowest} to {highest}{unit if unit != ' TCP port' else ''}"
    if kind == "bool":
        return "true or false"
    if kind == "choice":
        return "one of " + ", ".join(spec["choices"])
    if kind == "ipv4":
        return "an IPv4 address such as 127.0.0.1 or 0.0.0.0, or localhost"
    return "an absolute path without control characters"


def read_value(spec: Mapping[str, Any], value: Any) -> Any:
    """The value as the setting's type.

    Numbers and booleans given as text (``-e`` on the command line gives text) count as what they say.

    Raises:
        ValueError: wrong type or out of range; the message is what was found.
    """
    kind = spec["type"]
    found = f"{value!r} ({type(value).__name__})"
    if kind == "int":
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value.strip()):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(found)
    elif kind == "float":
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d+)?", value.strip()):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(found)
        value = float(value)
    elif kind == "bool":
        if isinstance(value, str) and value.lower() in TRUE_WORDS + FALSE_WORDS:
            value = value.lower() in TRUE_WORDS
        if not isinstance(value, bool):
            raise ValueError(found)
    elif kind == "choice":
        if value is False and "off" in spec["choices"]:  # YAML reads a bare off as false
            value = "off"
        if value not in spec["choices"]:
            raise ValueError(found)
    elif kind == "ipv4":
        value = read_address(value, found)
    elif kind == "path" and (not isinstance(value, str) or not value.startswith("/") or not value.isprintable()):
        raise ValueError(found)
    if kind in ("int", "float") and not spec["range"][0] <= value <= spec["range"][1]:
        raise ValueError(f"{value:g}" if kind == "float" else str(value))
    return value


def read_address(value: Any, found: str) -> str:
    """The engine reads an IPv4 literal with inet_pton and maps the one word localhost; nothing else works."""
    if value == "localhost":
        return "127.0.0.1"
    if not isinstance(value, str):
        raise ValueError(found)
    try:
        address = ipaddress.IPv4Address(value)
    except ipaddress.AddressValueError:
        raise ValueError(found) from None
    if address.is_multicast or address.is_reserved:  # nothing can listen there; the broadcast address is a reserved one
        raise ValueError(found)
    return str(address)


# -------------------------------------------------------------------------------------------------- all values


class Judgement:
    """What has been found so far: messages in the house form, never a secret in one of them."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def error(self, what: str, *, found: str = "", required: str = "", cure: str = "") -> None:
        self.errors.append(str(Ds4Error(what, found=found, required=required, cure=cure)))

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def effective_settings(
    catalogue: Mapping[str, Any], profile: str, settings: Mapping[str, Any], judgement: Judgement
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of the profile overridden by the operator's, checked one by one, and where each came from.

    A value of ``null`` takes a value of the profile away, so that the engine's default applies again.
    """
    known = catalogue["settings"]
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    profiles = catalogue["profiles"]
    if profile in profiles:
        values.update(profiles[profile]["settings"])
        origin = dict.fromkeys(values, "profile")
    else:
        judgement.error(
            "engine_service_profile is not a known profile",
            found=repr(profile),
            required="one of " + ", ".join(profiles),
            cure=f"set engine_service_profile: {nearest(profile, list(profiles)) or 'standard'}, and change single values in engine_service_settings",
        )
    if not isinstance(settings, Mapping):
        judgement.error(
            "engine_service_settings is not a table of names and values",
            found=type(settings).__name__,
            required="a mapping such as {context_tokens: 524288}",
            cure="write engine_service_settings as a mapping",
        )
        settings = {}
    for name, value in settings.items():
        spec = known.get(name)
        if spec is None:
            judgement.error(
                f"engine_service_settings.{name} is not a known setting",
                required="a name from docs/settings.md",
                cure=_cure_for_unknown(str(name), catalogue),
            )
            continue
        if value is None:
            values.pop(name, None)
            origin.pop(name, None)
            continue
        try:
            values[name] = read_value(spec, value)
            origin[name] = "operator"
        except ValueError as problem:
            judgement.error(
                f"engine_service_settings.{name} has a value that it cannot have",
                found=str(problem),
                required=allowed(spec),
                cure=f"correct engine_service_settings.{name}",
            )
            values.pop(name, None)  # a value of the profile must not slip in where the operator wanted another
    return values, origin


def _cure_for_unknown(name: str, catalogue: Mapping[str, Any]) -> str:
    """An operator who writes the engine's own name for a setting gets the readable one."""
    for readable, spec in catalogue["settings"].items():
        if name in (spec.get("flag", "").split(" ")[0], spec.get("flag", "").lstrip("-"), spec.get("env")):
            return f"use engine_service_settings.{readable}"
    if name in catalogue["twins"]:
        return f"use engine_service_settings.{catalogue['twins'][name]}"
    if name.startswith("DS4_"):
        return "put environment variables of the engine into engine_service_extra_env"
    if name.startswith("-"):
        return "put flags of the engine into engine_service_extra_args"
    close = nearest(name, list(catalogue["settings"]))
    if close:
        return f"did you mean engine_service_settings.{close}"
    return "use engine_service_extra_args or engine_service_extra_env for what has no setting"


def check_release(
    catalogue: Mapping[str, Any], values: Mapping[str, Any], profile: str, release: str, judgement: Judgement
) -> None:
    """Refuse a setting or profile that the pinned engine does not know yet, naming both versions."""
    pinned = version(release)
    if pinned is None:
        judgement.warn(
            f"{release!r} is no release number, so whether the engine knows every setting is only seen when its binary is asked."
        )
        return
    for name in values:
        since = catalogue["settings"][name].get("since")
        if since and older(pinned, since):
            judgement.error(
                f"The setting {name} is newer than the pinned engine",
                found=f"engine {release}",
                required=f"engine v{since} or newer",
                cure=f"remove engine_service_settings.{name} (null takes it out of a profile), or pin a newer ds4_release",
            )
        for since, most in catalogue["settings"][name].get("most_before", {}).items():
            if older(pinned, since) and values[name] > most:
                judgement.error(
                    f"The setting {name} has a value that the pinned engine does not serve yet",
                    found=f"{values[name]} with engine {release}",
                    required=f"at most {most}, or engine v{since} or newer",
                    cure=f"lower engine_service_settings.{name}, or pin a newer ds4_release",
                )
    since = catalogue["profiles"].get(profile, {}).get("since")
    if since and older(pinned, since):
        judgement.error(
            f"The profile {profile} needs a newer engine",
            found=f"engine {release}",
            required=f"engine v{since} or newer",
            cure="choose another engine_service_profile, or pin a newer ds4_release",
        )


def of_release(catalogue: Mapping[str, Any], release: str) -> Mapping[str, Any]:
    """The data file as it holds for the pinned engine, whose defaults were others before some releases."""
    pinned = version(release)
    settings = dict(catalogue["settings"])
    for name, spec in settings.items():
        for since, default in spec.get("default_before", {}).items():
            if pinned is not None and older(pinned, since):
                settings[name] = {**spec, "default": default}
                break
    return {**catalogue, "settings": settings}


def check_profile(catalogue: Mapping[str, Any], profile: str, serving_mode: str, judgement: Judgement) -> None:
    """A profile made for a stripped box must not be tried with a desktop beside it."""
    demands = catalogue["profiles"].get(profile, {}).get("requires_serving_mode", False)
    if demands and serving_mode and serving_mode != "serving":
        judgement.error(
            f"The profile {profile} leaves so little memory free that no desktop may run beside it",
            found=f"serving_mode_target: {serving_mode}",
            required="serving_mode_target: serving",
            cure=(
                "set serving_mode_target: serving, choose another engine_service_profile, or, on a box without a desktop, "
                "write the profile's values into engine_service_settings yourself"
            ),
        )


def effective(catalogue: Mapping[str, Any], values: Mapping[str, Any], name: str) -> Any:
    """The value in force: what is set, else the engine's default."""
    return values.get(name, catalogue["settings"][name]["default"])


def check_combinations(
    catalogue: Mapping[str, Any],
    values: Mapping[str, Any],
    origin: Mapping[str, str],
    mode: str,
    files: Mapping[str, Any],
    judgement: Judgement,
) -> None:
    """What the engine refuses, or silently makes of it, when settings meet."""
    speculating = mode in ("dspark", "mtp")
    if values.get("banks") == 1 and (speculating or effective(catalogue, values, "continuous")):
        judgement.error(
            "One bank turns off continuous batching, and speculation with it",
            found="banks: 1" + (f" with engine_service_mode: {mode}" if speculating else ""),
            required="banks of 2 or more, or continuous: false with engine_service_mode: plain",
            cure="raise engine_service_settings.banks, or remove it and let the engine size it",
        )
    if values.get("continuous") is False and speculating:
        judgement.error(
            "Speculation runs in the continuous batch only",
            found=f"continuous: false with engine_service_mode: {mode}",
            required="continuous: true, or engine_service_mode: plain",
            cure="remove engine_service_settings.continuous, or set engine_service_mode: plain",
        )
    if values.get("continuous") is False and values.get("serial_lane") is False:
        judgement.error(
            "Without the continuous batch and without the serial lane no request can be served",
            found="continuous: false with serial_lane: false",
            required="one of them",
            cure="remove one of them from engine_service_settings",
        )
    if values.get("full_stack_required") and mode != "dspark":
        judgement.error(
            "full_stack_required demands the drafter, which this mode leaves out",
            found=f"full_stack_required: true with engine_service_mode: {mode}",
            required="engine_service_mode: dspark",
            cure="remove engine_service_settings.full_stack_required, or set engine_service_mode: dspark",
        )
    elif (
        values.get("full_stack_required")
        and lineage(catalogue, "base", file_name(files.get("base"))) == "legacy"
        and not files.get("mtp")
    ):
        judgement.error(
            "full_stack_required demands the MTP file as well beside a legacy base",
            found="files " + ", ".join(sorted(files)),
            required="a file with the role mtp",
            cure="add mtp to this generation in ds4_weights_extra, or remove engine_service_settings.full_stack_required",
        )
    for prefix, wanted in (("mtp_", "mtp"), ("dspark_", "dspark")):
        for name in values:
            if name.startswith(prefix) and mode != wanted:
                judgement.warn(f"{name} has no effect in mode {mode}: it belongs to engine_service_mode: {wanted}.")
    cold, least = effective(catalogue, values, "kv_cold_max_tokens"), effective(catalogue, values, "kv_min_tokens")
    if 0 < cold < least:
        judgement.error(
            "The longest first prompt to keep is shorter than the shortest prefix to keep; the engine refuses that",
            found=f"kv_cold_max_tokens {cold}, kv_min_tokens {least}",
            required="kv_cold_max_tokens of 0, or of at least kv_min_tokens",
            cure="correct engine_service_settings.kv_cold_max_tokens or kv_min_tokens",
        )
    if not effective(catalogue, values, "kv_persistence"):
        idle = sorted(
            name
            for name in values
            if name.startswith("kv_") and name != "kv_persistence" and origin[name] == "operator"
        )
        if idle:
            judgement.warn(f"{', '.join(idle)} have no effect while kv_persistence is false.")
    if values.get("tool_call_reminder") is False and "tool_call_reminder_min_bytes" in values:
        judgement.warn("tool_call_reminder_min_bytes has no effect while tool_call_reminder is false.")
    if values.get("memory_floor_gib") == 0:
        judgement.warn(
            "memory_floor_gib: 0 turns off the guard that keeps the whole machine from running out of memory."
        )
    if (values.get("dspark_max_live_requests") or 1) > 1:
        judgement.warn("dspark_max_live_requests above 1: the engine has been reported to crash at 2.")
    context, output = effective(catalogue, values, "context_tokens"), values.get("max_output_tokens")
    if output is not None and output > context:
        judgement.warn(f"max_output_tokens {output} is cut to the context of {context} tokens.")
    if "tool_slip_dump_directory" in values:
        judgement.warn("tool_slip_dump_directory collects whole requests and answers in plain text.")
    if values.get("reasoning_effort") in ("high", "max") and context < 393216:
        judgement.warn(
            f"reasoning_effort {values['reasoning_effort']} with a context below 393216 tokens: long thinking can hit the limit."
        )


# -------------------------------------------------------------------------------------------------- network


def check_network(
    catalogue: Mapping[str, Any], values: Mapping[str, Any], expose: str, judgement: Judgement
) -> tuple[str, int]:
    """Address and port; anything but loopback must have been asked for in so many words."""
    host = str(effective(catalogue, values, "host"))
    port = int(effective(catalogue, values, "port"))
    if expose not in EXPOSE:
        judgement.error(
            "engine_service_expose is not a known word",
            found=repr(expose),
            required="none or lan",
            cure="set engine_service_expose to one of them",
        )
    elif ipaddress.ip_address(host) not in LOOPBACK:
        if expose != "lan":
            judgement.error(
                "The engine would listen beyond this machine, and it has no authentication",
                found=f"host: {host}",
                required="a loopback address, or engine_service_expose: lan",
                cure=(
                    "remove engine_service_settings.host and reach the service through SSH or a reverse proxy, "
                    "or accept the risk with engine_service_expose: lan"
                ),
            )
        else:
            judgement.warn(
                f"The engine listens on {host}:{port} without authentication or encryption: whoever reaches that port can use it, "
                "read its metrics and occupy its memory. Let a firewall or an authenticating reverse proxy stand before it."
            )
    elif expose == "lan":
        judgement.warn(
            f"engine_service_expose: lan has no effect while host is {host}: set engine_service_settings.host."
        )
    if port < 1024:
        judgement.error(
            "The service user may not bind a port below 1024",
            found=f"port: {port}",
            required="1024 or above",
            cure="raise engine_service_settings.port and put a reverse proxy before it",
        )
    return host, port


# -------------------------------------------------------------------------------------------------- weights and mode


def file_path(entry: Optional[Mapping[str, Any]]) -> str:
    """Path of a weights file; its name alone while it is only planned (before any host has been asked)."""
    return str((entry or {}).get("path") or (entry or {}).get("file") or "")


def file_name(entry: Optional[Mapping[str, Any]]) -> str:
    """Name of a weights file."""
    return os.path.basename(file_path(entry))


def lineage(catalogue: Mapping[str, Any], role: str, name: str) -> str:
    """Checkpoint that a file belongs to, by its name as the engine does it; empty for a name that tells nothing."""
    found = [known for known, marks in catalogue["lineages"].items() if marks[role] in name]
    return found[0] if found else ""


def check_newer(what: str, newest_without: str, release: str, otherwise: str, judgement: Judgement) -> None:
    """Refuse what came after a release of the engine, when that release or an older one is pinned."""
    pinned = version(release)
    if pinned and not older(version(newest_without) or (), release):
        judgement.error(
            f"{what} needs a newer engine",
            found=f"engine {release}",
            required=f"an engine newer than v{newest_without}",
            cure=f"pin a newer ds4_release, or {otherwise}",
        )


def choose_mode(
    catalogue: Mapping[str, Any],
    mode: str,
    weights: Mapping[str, Any],
    values: Mapping[str, Any],
    release: str,
    judgement: Judgement,
) -> tuple[str, list[str], list[str]]:
    """Mode in force, the arguments that name its files, none left for the engine to pick up by itself, and their roles.

    ``auto`` walks the engine's ladder: DSpark, then MTP for a base that has such a head, then plain.
    """
    files = weights.get("files") or {}
    generation = str(weights.get("generation", ""))
    if mode not in MODES:
        judgement.error(
            "engine_service_mode is not a known mode",
            found=repr(mode),
            required="one of " + ", ".join(MODES),
            cure=f"set engine_service_mode: {nearest(mode, MODES) or 'auto'}",
        )
        return "plain", [], []
    if not files.get("base"):
        judgement.error(
            f"Generation {generation!r} names no base model",
            required="a file with the role base",
            cure="add base to this generation in ds4_weights_extra",
        )
        return mode, [], []
    base, drafter = file_name(files["base"]), file_name(files.get("drafter"))
    kin = lineage(catalogue, "base", base)
    marks = catalogue["lineages"].get(kin, {"mtp": True})
    if mode == "auto":
        mode = "dspark" if drafter else "mtp" if files.get("mtp") and marks["mtp"] else "plain"
        if mode != "dspark":
            judgement.warn(
                f"Generation {generation} has no drafter, so the engine serves "
                + ("with MTP speculation, slower than DSpark." if mode == "mtp" else "without speculation.")
            )
    if marks.get("newer_than"):
        check_newer(
            f"The base model {base}", marks["newer_than"], release, "choose another weights_generation", judgement
        )
    role = {"dspark": "drafter", "mtp": "mtp"}.get(mode, "base")
    if mode == "mtp" and not marks["mtp"]:
        judgement.error(
            f"The MTP head belongs to the legacy generation and fits no {kin} base",
            found=f"engine_service_mode: mtp with {base}",
            required="engine_service_mode dspark or plain, or weights_generation: legacy",
            cure="set engine_service_mode: dspark",
        )
    elif not files.get(role):
        others = [other for other in ("auto", "mtp", "plain") if other != mode and (other != "mtp" or marks["mtp"])]
        judgement.error(
            f"Mode {mode} needs a file that generation {generation} does not have",
            found="files " + ", ".join(sorted(files)),
            required=f"a file with the role {role}",
            cure=f"add {role} to this generation in ds4_weights_extra, or set engine_service_mode: {' or '.join(others)}",
        )
    if mode == "dspark" and drafter:
        drawn = lineage(catalogue, "drafter", drafter)
        if any(mark in drafter for mark in catalogue["foreign_drafters"]):
            judgement.error(
                "The drafter is made for the upstream engine, and this one cannot read it",
                found=drafter,
                required="a drafter such as DSpark-drafter-Q2K-Q8-0731.gguf",
                cure="correct this generation in ds4_weights_extra",
            )
        elif kin and drawn and kin != drawn:
            judgement.error(
                "The drafter was trained against another generation of the base model and would never help",
                found=f"{drafter} ({drawn}) with {base} ({kin})",
                required="base and drafter of one generation",
                cure="correct this generation in ds4_weights_extra",
            )
    roles = {"dspark": ["drafter"], "mtp": ["mtp"]}.get(mode, [])
    switches = {"dspark": [], "mtp": ["--no-dspark"]}.get(mode, ["--no-spec"])
    if mode == "dspark" and marks["mtp"]:  # the engine would look for such a head next to the base
        if files.get("mtp"):
            roles.append("mtp")
        elif not values.get("full_stack_required"):
            switches.append("--no-mtp")
    named = [word for role in roles for word in (SPECULATION_FLAGS[role], file_path(files.get(role)))]
    return mode, ["-m", file_path(files["base"]), *named, *switches], ["base", *roles]


# -------------------------------------------------------------------------------------------------- rendering


def render_setting(
    name: str, spec: Mapping[str, Any], value: Any, kv_directory: str
) -> tuple[list[str], dict[str, str]]:
    """One setting as arguments and environment."""
    how = spec.get("render", "value")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if how == "value_unless":
        if value == spec["omit"]:
            return [], {}
    elif how == "one_zero":
        text = "1" if value else "0"
    elif how == "on_off":
        text = "on" if value else "off"
    elif how == "kv_directory":
        return ([spec["flag"], kv_directory], {}) if value else ([], {})
    elif how in ("switch_when_true", "switch_when_false"):
        return (spec["flag"].split(" "), {}) if value == (how == "switch_when_true") else ([], {})
    return ([spec["flag"], text], {}) if "flag" in spec else ([], {spec["env"]: text})


def kv_directory(root: str, engine: str, weights: Mapping[str, Any]) -> str:
    """Own directory per engine and model, so that no other model's state is ever read; upgrades of the engine keep it."""
    base = (weights.get("files") or {}).get("base") or {}
    identity = str(base.get("sha256", ""))[:8]
    parts = [engine, str(weights.get("generation", "")), identity]
    return os.path.join(root, "-".join(re.sub(r"[^A-Za-z0-9._]+", "_", part) for part in parts if part))


def check_extra(
    catalogue: Mapping[str, Any],
    arguments: Any,
    environment: Any,
    values: Mapping[str, Any],
    release: str,
    judgement: Judgement,
) -> tuple[list[str], dict[str, str]]:
    """The operator's own flags and variables: nothing that is decided elsewhere, nothing that cannot serve."""
    flags: dict[str, str] = dict(catalogue["twins"])
    variables: dict[str, str] = {}
    for readable, spec in catalogue["settings"].items():
        if "flag" in spec:
            flags.setdefault(spec["flag"].split(" ")[0], readable)
        else:
            variables[spec["env"]] = readable
    variables.update({name: readable for name, readable in catalogue["twins"].items() if not name.startswith("-")})

    extra_arguments: list[str] = []
    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        judgement.error(
            "engine_service_extra_args is not a list",
            found=type(arguments).__name__,
            required='a list of words, such as ["--threads", "8"]',
            cure="write engine_service_extra_args as a list, one word an item",
        )
        arguments = []
    for position, raw in enumerate(arguments):
        where = f"engine_service_extra_args[{position}]"
        if isinstance(raw, bool) or not isinstance(raw, (str, int, float)):
            judgement.error(
                f"{where} is no word", found=type(raw).__name__, required="text or a number", cure=f"correct {where}"
            )
            continue
        word = str(raw)
        flag = word.split("=", 1)[0]
        if not word or not word.isprintable():
            judgement.error(
                f"{where} is empty or contains control characters", required="printable text", cure=f"correct {where}"
            )
        elif flag.startswith("-") and "=" in word and not re.fullmatch(r"-[\d.].*", word):
            judgement.error(
                f"The engine does not understand {flag}=value",
                required="flag and value as two items of the list",
                cure=f"split {where}",
            )
        elif flag in catalogue["refused_flags"]:
            judgement.error(
                f"{flag} may not come in through engine_service_extra_args: {catalogue['refused_flags'][flag]}",
                cure=f"remove {where}",
            )
        elif flag in flags:
            judgement.error(
                f"{flag} has a setting of its own, which checks it and keeps everything that follows from it in step",
                cure=f"remove {where} and set engine_service_settings.{flags[flag]}",
            )
        else:
            if flag in catalogue["newer_flags"]:
                check_newer(flag, catalogue["newer_flags"][flag], release, f"remove {where}", judgement)
            if flag in catalogue["warned_flags"]:
                judgement.warn(f"{flag}: {catalogue['warned_flags'][flag]}.")
            elif flag.startswith("--") and flag not in catalogue["known_flags"]:
                close = nearest(flag, list(catalogue["known_flags"]) + list(flags))
                judgement.warn(
                    f"{flag} is not known here{f' (did you mean {close}?)' if close else ''}; the engine's binary is asked before it is used."
                )
            extra_arguments.append(word)

    extra_environment: dict[str, str] = {}
    if not isinstance(environment, Mapping):
        judgement.error(
            "engine_service_extra_env is not a table of names and values",
            found=type(environment).__name__,
            required="a mapping such as {DS4_SERVER_WARM: 0}",
            cure="write engine_service_extra_env as a mapping",
        )
        environment = {}
    for name, raw in environment.items():
        where = f"engine_service_extra_env.{name}"
        if not isinstance(name, str) or not NAME.match(name):
            judgement.error(
                f"{where} is no name of an environment variable",
                required="letters, digits and _, not beginning with a digit",
                cure=f"correct {where}",
            )
        elif name in catalogue["refused_variables"]:
            judgement.error(
                f"{name} may not come in through engine_service_extra_env: {catalogue['refused_variables'][name]}",
                cure=f"remove {where}",
            )
        elif name in variables:
            judgement.error(
                f"{name} has a setting of its own, which checks it and keeps everything that follows from it in step",
                cure=f"remove {where} and set engine_service_settings.{variables[name]}",
            )
        elif not isinstance(raw, (str, int, float)) or (isinstance(raw, str) and not raw.isprintable()):
            judgement.error(
                f"{where} has a value that no environment can carry",
                found=type(raw).__name__ if not isinstance(raw, str) else "control characters",
                required="printable text or a number",
                cure=f"correct {where}",
            )
        else:
            if name in catalogue["warned_variables"]:
                judgement.warn(f"{name}: {catalogue['warned_variables'][name]}.")
            elif name.startswith("DS4_") and name not in catalogue["known_variables"]:
                close = nearest(name, list(catalogue["known_variables"]) + list(variables))
                judgement.warn(
                    f"{name} is not known here{f' (did you mean {close}?)' if close else ''}; the engine is silent about variables that it does not know."
                )
            extra_environment[name] = str(int(raw)) if isinstance(raw, bool) else str(raw)
    if "weight_residency" in values and "DS4_CUDA_NO_HBM_CACHE" in extra_environment:
        judgement.error(
            "DS4_CUDA_NO_HBM_CACHE is the old name of weight_residency: lazy, and the engine refuses both together",
            cure="remove engine_service_extra_env.DS4_CUDA_NO_HBM_CACHE",
        )
    single = sorted(name for name in extra_environment if name.startswith("DS4_WEIGHT_RESIDENCY_"))
    if single and "DS4_CUDA_NO_HBM_CACHE" in extra_environment:
        judgement.warn(
            f"DS4_CUDA_NO_HBM_CACHE with {', '.join(single)}: both say how weights come into memory, and the engine may refuse to start."
        )
    return extra_arguments, extra_environment


def engine_config(
    settings: Mapping[str, Any],
    catalogue: Mapping[str, Any],
    *,
    profile: str = "standard",
    release: str = "",
    paths: Mapping[str, Any],
    weights: Mapping[str, Any],
    extra_args: Sequence[Any] = (),
    extra_env: Optional[Mapping[str, Any]] = None,
    expose: str = "none",
    mode: str = "auto",
    engine: str = "ds4",
    serving_mode: str = "",
) -> dict[str, Any]:
    """Arguments and environment of one deployment, or everything that is wrong with what was asked for.

    Args:
        settings: readable names and values (engine_service_settings).
        catalogue: the loaded data file of settings.
        profile: bundle to start from.
        release: pinned engine release (``v0.6.5``); text that is no release number skips the check of versions.
        paths: ``kv`` = parent of the directories of kept conversations; ``codex_models`` = file to serve to Codex, or empty.
        weights: ``{generation, files: {base|drafter|mtp: {path, sha256, bytes}}}`` as the weights role returns it.
        extra_args: further words for the command line.
        extra_env: further environment variables.
        expose: ``lan`` accepts an address that is not loopback.
        mode: ``auto``, ``dspark``, ``mtp`` or ``plain``.
        engine: short name of the engine's lineage; part of the directory of kept conversations.
        serving_mode: wanted serving mode (unmanaged, serving or desktop), for profiles that demand one; empty skips that check.

    Returns:
        ``args`` (without the program), ``env``, ``warnings``, ``errors``, ``message`` (all errors as one text), ``context``
        (tokens), ``max_output_tokens``, ``host``, ``port``, ``mode``, ``profile``, ``settings`` (values in force that were
        set), ``weights_bytes`` (of the files that the mode loads), ``banks`` (or null),
        ``memory_floor_gib``, ``kv`` (``enabled``, ``directory``, ``budget_mib``, ``mode``), ``requires_serving_mode``.
    """
    settings, weights, extra_args, extra_env = (
        plain(settings),
        plain(weights),
        plain(extra_args),
        plain(extra_env or {}),
    )
    profile, release, expose, mode = str(profile), str(release), str(expose), str(mode)
    judgement = Judgement()
    catalogue = of_release(catalogue, release)
    values, origin = effective_settings(catalogue, profile, settings, judgement)
    check_release(catalogue, values, profile, release, judgement)
    check_profile(catalogue, profile, serving_mode, judgement)
    mode, file_arguments, roles = choose_mode(catalogue, mode, weights, values, release, judgement)
    check_combinations(catalogue, values, origin, mode, weights.get("files") or {}, judgement)
    host, port = check_network(catalogue, values, expose, judgement)
    extra_arguments, extra_environment = check_extra(catalogue, extra_args, extra_env, values, release, judgement)

    pinned = version(release)
    directory = kv_directory(str(paths["kv"]), engine, weights)
    arguments, environment = list(file_arguments), {}
    for name, spec in catalogue[
        "settings"
    ].items():  # the order of the data file, so that a deployment's text is stable
        if name in values and not (name.startswith("kv_") and not values.get("kv_persistence")):
            more, variables = render_setting(name, spec, values[name], directory)
            arguments += more
            environment.update(variables)
    for item in catalogue["always"]:
        if pinned is None or not older(pinned, item["since"]):
            arguments.append(item["flag"])
    codex, served = str(paths.get("codex_models") or ""), catalogue["served_catalogue"]
    if codex and (pinned is None or not older(pinned, served["since"])):
        environment[served["env"]] = codex
    environment.update(extra_environment)
    return {
        "args": arguments + extra_arguments,
        "env": dict(sorted(environment.items())),
        "errors": judgement.errors,
        "message": "\n".join(judgement.errors),
        "warnings": judgement.warnings,
        "context": effective(catalogue, values, "context_tokens"),
        "host": host,
        "port": port,
        "mode": mode,
        "profile": profile,
        "settings": values,
        "max_output_tokens": effective(catalogue, values, "max_output_tokens"),
        "weights_bytes": sum(int((weights["files"].get(role) or {}).get("bytes") or 0) for role in roles),
        "banks": effective(catalogue, values, "banks"),
        "memory_floor_gib": effective(catalogue, values, "memory_floor_gib"),
        "kv": {
            "enabled": bool(effective(catalogue, values, "kv_persistence")),
            "directory": directory,
            "budget_mib": effective(catalogue, values, "kv_budget_mib"),
            "mode": "0700",
        },
        "requires_serving_mode": bool(catalogue["profiles"].get(profile, {}).get("requires_serving_mode", False)),
    }
