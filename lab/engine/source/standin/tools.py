"""The other programs: the CLI, the benchmark, and three that only know their usage. All but the last hold the lock."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

import answers
import weights
from common import FAULTS, RUNTIME_KIB, FatalError, Memory, log, record, take_lock

CSV_HEADER = "ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,gen_tps_ss,first_token_sec,kvcache_bytes"


def main(name: str, arguments: list[str]) -> int:
    parsers = {"ds4": _cli, "ds4-bench": _bench}
    if name not in parsers:
        log(f"usage: {name} (this program of the stand-in engine does nothing)")
        return 2
    memory = Memory()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        return parsers[name](arguments, memory)
    except FatalError as error:
        log(str(error))
        return error.code
    finally:
        memory.give_back()


def _common(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    parser.add_argument("-m", default="ds4flash.gguf")
    parser.add_argument("--mtp")
    parser.add_argument("-n", "--gen-tokens", type=int, default=128)
    parser.add_argument("-sys", default="")
    parser.add_argument("--power", type=int)
    for switch in ("--cuda", "--cpu", "--metal", "--quality", "--warm-weights"):
        parser.add_argument(switch, action="store_true")
    return parser


def _load(name: str, path: str, arguments: list[str], memory: Memory) -> weights.Weights:
    take_lock()
    memory.take(RUNTIME_KIB + weights.SIMULATED_KIB["base"], 0)
    loaded = weights.load(path, "base")
    record(name, [name, *arguments], weights=[loaded._asdict()])
    log(f"{name}: {loaded.name} loaded")
    return loaded


def _text(prompt: str | None, file: str | None) -> str:
    if prompt is not None:
        return prompt
    if file is None:
        raise FatalError("a prompt is needed", 2)
    try:
        with open(file, encoding="utf-8") as stream:
            return stream.read()
    except OSError as error:
        raise FatalError(f"cannot read {file}: {error.strerror}") from None


def _cli(arguments: list[str], memory: Memory) -> int:
    parser = _common("ds4")
    parser.add_argument("-p", "--prompt")
    parser.add_argument("--prompt-file")
    parser.add_argument("-c", type=int, default=32768)
    for option in ("--temp", "--top-p", "--min-p", "--seed"):
        parser.add_argument(option, type=float)
    for switch in ("--think", "--think-max", "--nothink", "--inspect"):
        parser.add_argument(switch, action="store_true")
    options: Any = parser.parse_args(arguments)
    prompt = _text(options.prompt, options.prompt_file)
    loaded = _load("ds4", options.m, arguments, memory)
    print("".join(answers.answer(prompt, prompt, intact=loaded.intact, think=False).text))
    return 0


def _bench(arguments: list[str], memory: Memory) -> int:
    parser = _common("ds4-bench")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt-file")
    group.add_argument("--chat-prompt-file")
    parser.add_argument("--ctx-start", type=int, default=2048)
    parser.add_argument("--ctx-max", type=int, default=32768)
    parser.add_argument("--ctx-alloc", type=int)
    parser.add_argument("--step-mul", type=float, default=1)
    parser.add_argument("--step-incr", type=int, default=2048)
    parser.add_argument("--csv")
    options: Any = parser.parse_args(arguments)
    prompt = _text(None, options.prompt_file or options.chat_prompt_file)
    if answers.tokens(prompt) < options.ctx_max:
        raise FatalError(f"ds4-bench: the prompt has fewer than {options.ctx_max} tokens", 2)
    _load("ds4-bench", options.m, arguments, memory)
    rows, size = [CSV_HEADER], options.ctx_start
    prefill, decode = (figure * float(FAULTS.get("speed", 1.0)) for figure in (990.0, 22.7))
    while size <= options.ctx_max:
        first = size / prefill
        rows.append(f"{size},{size},{prefill},{options.gen_tokens},{decode},{decode},{first:.3f},{size * 4403}")
        size = max(int(size * options.step_mul) + options.step_incr, size + 1)
    text = "\n".join(rows) + "\n"
    if options.csv:
        with open(options.csv, "w", encoding="utf-8") as stream:
            stream.write(text)
    else:
        sys.stdout.write(text)
    return 0
