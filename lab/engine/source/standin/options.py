"""Command line of ds4-server: every option, its rules and its defaults."""

from __future__ import annotations

import ipaddress
from typing import Any, Callable

from common import BUILD, FAULTS, RELEASE, FatalError


class BadValueError(Exception):
    pass


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise BadValueError("a whole number is needed") from None
        if value < low or (high is not None and value > high):
            raise BadValueError(f"{low} or more is needed" if high is None else f"{low} to {high} is needed")
        return value

    return parse


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadValueError("a number is needed") from None


def one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise BadValueError(f"one of {', '.join(words)} is needed")
        return text

    return parse


def host(text: str) -> str:
    if text == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise BadValueError("an IPv4 address is needed") from None


# name → (short name, parser or None for a switch, default, first version that knows it)
OPTIONS: dict[str, tuple[str, Any, Any, str]] = {
    "--version": ("", None, False, ""),
    "--check-update": ("", None, False, ""),
    "--upgrade": ("", None, False, ""),
    "--no-update-check": ("", None, False, ""),
    "--help": ("-h", None, False, ""),
    "--model": ("-m", str, None, ""),
    "--mtp": ("", str, None, ""),
    "--dspark": ("", str, None, ""),
    "--preset": ("", one_of("spark"), None, ""),
    "--no-mtp": ("", None, False, ""),
    "--no-dspark": ("", None, False, ""),
    "--no-spec": ("", None, False, ""),
    "--mtp-draft": ("", whole(1), 1, ""),
    "--mtp-margin": ("", number, 3.0, ""),
    "--dir-steering-file": ("", str, None, ""),
    "--dir-steering-ffn": ("", number, None, ""),
    "--dir-steering-attn": ("", number, None, ""),
    "--warm-weights": ("", None, False, ""),
    "--quality": ("", None, False, ""),
    "--power": ("", whole(1, 100), 100, ""),
    "--cuda": ("", None, False, ""),
    "--metal": ("", None, False, ""),
    "--cpu": ("", None, False, ""),
    "--backend": ("", one_of("cuda", "metal", "cpu"), None, ""),
    "--threads": ("-t", whole(1), None, ""),
    "--chdir": ("", str, None, ""),
    "--ctx": ("-c", whole(1), 262144, ""),
    "--tokens": ("-n", whole(1), 393216, ""),
    "--host": ("", host, "127.0.0.1", ""),
    "--port": ("", whole(1, 65535), 8000, ""),
    "--cors": ("", None, False, ""),
    "--reasoning-replay": ("", one_of("keep", "drop"), "keep", ""),
    "--reasoning-effort": ("", one_of("low", "high", "max", "off"), "low", ""),
    "--reasoning-effort-native": ("", None, False, ""),
    "--tool-call-reminder": ("", one_of("on", "off"), "on", "0.6.5"),
    "--tool-slip-resample": ("", None, False, ""),
    "--tool-slip-dump": ("", str, None, ""),
    "--disable-exact-dsml-tool-replay": ("", None, False, ""),
    "--tool-memory-max-ids": ("", whole(0), 100000, ""),
    "--mem-floor-gb": ("", whole(0), 4, ""),
    "--no-serial": ("", None, False, ""),
    "--kv-disk-dir": ("", str, None, ""),
    "--kv-disk-space-mb": ("", whole(1), 4096, ""),
    "--kv-cache-min-tokens": ("", whole(0), 512, ""),
    "--kv-cache-cold-max-tokens": ("", whole(0), 30000, ""),
    "--kv-cache-continued-interval-tokens": ("", whole(0), 10000, ""),
    "--kv-cache-boundary-trim-tokens": ("", whole(0), 32, ""),
    "--kv-cache-boundary-align-tokens": ("", whole(0), 2048, ""),
    "--kv-cache-reject-different-quant": ("", None, False, ""),
    "--trace": ("", str, None, ""),
    "--role": ("", str, None, ""),
    "--layers": ("", str, None, ""),
    "--listen": ("", str, None, ""),
    "--coordinator": ("", str, None, ""),
    "--dist-prefill-chunk": ("", whole(1), None, ""),
    "--dist-prefill-window": ("", whole(1), None, ""),
    "--dist-activation-bits": ("", whole(1), None, ""),
    "--dist-replay-check": ("", None, False, ""),
    "--debug": ("", None, False, ""),
    "--vision": ("", str, None, "0.6.6"),
    "--validate-vision": ("", None, False, "0.6.6"),
}


def _version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def known() -> dict[str, tuple[str, Any, Any, str]]:
    refused = FAULTS.get("refuse_flag")
    return {
        name: entry
        for name, entry in OPTIONS.items()
        if name != refused and (not entry[3] or _version(RELEASE["version"]) >= _version(entry[3]))
    }


def usage() -> str:
    lines = ["usage: ds4-server [options]", ""]
    for name, (short, parser, default, _since) in known().items():
        words = f"{short}, {name}" if short else name
        value = "" if parser is None else " VALUE"
        lines.append(f"  {words}{value}" + ("" if default in (None, False) else f"  [{default}]"))
    return "\n".join(lines)


def parse(arguments: list[str]) -> dict[str, Any]:
    """Values by long name. The last occurrence of an option wins."""
    table = known()
    names = {entry[0]: name for name, entry in table.items() if entry[0]} | {name: name for name in table}
    values = {name: entry[2] for name, entry in table.items()}
    rest = iter(arguments)
    for word in rest:
        name = names.get(word)
        if name is None:
            raise FatalError(f"ds4-server: unknown option: {word}", 2)
        parser = table[name][1]
        if parser is None:
            values[name] = True
            continue
        text = next(rest, None)
        if text is None:
            raise FatalError(f"ds4-server: {word} needs a value", 2)
        try:
            values[name] = parser(text)
        except BadValueError as error:
            raise FatalError(f"ds4-server: {word} {text}: {error}", 2) from None
    _conflicts(values)
    return values


def _conflicts(values: dict[str, Any]) -> None:
    pairs = [
        ("--mtp", "--no-mtp"),
        ("--dspark", "--no-dspark"),
        ("--no-spec", "--mtp"),
        ("--no-spec", "--dspark"),
        ("--preset", "--no-mtp"),
        ("--preset", "--no-dspark"),
        ("--preset", "--no-spec"),
    ]
    for one, other in pairs:
        if values[one] and values[other]:
            raise FatalError(f"ds4-server: {one} and {other} exclude each other", 2)
    cold, least = values["--kv-cache-cold-max-tokens"], values["--kv-cache-min-tokens"]
    if cold and cold < least:
        raise FatalError(f"ds4-server: --kv-cache-cold-max-tokens {cold}: 0 or at least {least} is needed", 2)


def version_line() -> str:
    return f"ds4-server {BUILD['version']}"
