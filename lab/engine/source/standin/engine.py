"""The engine behind the HTTP surface: loading, admission, simulated speed, counters, shutdown."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import answers
import weights
from common import BUILD, FAULTS, RUNTIME_KIB, FatalError, Memory, log, record
from kv import DiskCache

# Ten times the speed of a GB10, so that tests are quick; the timings in the answers are the true ones of this process.
PREFILL_TOK_S = 10000.0
DECODE_STEP_S = 1 / 150.0
TOK_PER_STEP = 2.1
ACCEPT_RATE = 0.71
LOAD_SECONDS = 0.5


class RefusedError(Exception):
    def __init__(self, status: int, message: str, *, retry_after: int = 0, **extra: Any) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.extra = status, retry_after, extra


class Job:
    """One completion: pieces as they are decoded, then its figures."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached = self.decoded = 0
        self.finish = "stop"
        self.timings: dict[str, float] = {}


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.memory = Memory()
        self.ctx: int = options["--ctx"]
        self.stopping = False
        self.speculates = False
        self.catalogue: list[Any] | None = None
        self.started = self.listening = time.monotonic()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self.inflight = 0
        self.waiting = 0
        self._prompts: dict[str, int] = {}
        self.counters = dict.fromkeys(
            ["started", "completed", "failed", "canceled", "prefilled", "cached", "decoded", "steps", "drafts", "hits"],
            0,
        )
        self.shed: dict[str, int] = {}
        self.last = {"prefill_tok_s": 0.0, "decode_tok_s": 0.0, "tok_per_step": 0.0}

    # -- start -------------------------------------------------------------------------------------------------------
    def open(self) -> None:
        environ, options = os.environ, self.options
        if environ.get("DS4_CUDA_NO_HBM_CACHE") and environ.get("DS4_WEIGHT_RESIDENCY"):
            raise FatalError("ds4: DS4_CUDA_NO_HBM_CACHE and DS4_WEIGHT_RESIDENCY are both set")
        base, drafter, mtp = self._stack()
        log(
            f"ds4-server: launch defaults: model={base} mtp={mtp or ('retired' if '0731' in base else 'none')}"
            f" dspark={drafter or 'none'}"
        )
        parts = [("base", base), ("drafter", drafter), ("mtp", mtp)]
        kib = RUNTIME_KIB + sum(weights.SIMULATED_KIB[role] for role, path in parts if path)
        self.memory.take(kib, options["--mem-floor-gb"])
        loaded = [weights.load(path, role) for role, path in parts if path]
        for other in loaded[1:]:
            if other.generation != loaded[0].generation:
                raise FatalError(
                    f"ds4: {other.path}: {other.role} of generation {other.generation or 'unknown'} does not match the"
                    f" base of generation {loaded[0].generation or 'unknown'}"
                )
        self.base = loaded[0]
        self.intact = all(part.intact for part in loaded)
        record("ds4-server", [*_command_line()], weights=[part._asdict() for part in loaded])
        self._fail_as_told()
        self.kv = DiskCache(options["--kv-disk-dir"], options["--kv-disk-space-mb"], self.base.generation)
        self._arm(drafter)
        self._boot_lines()
        self._read_catalogue()

    def _stack(self) -> tuple[str, str | None, str | None]:
        """The three files: given ones, else the launch defaults."""
        options = self.options
        home = os.environ.get("HOME", "/")
        directory = os.environ.get("DS4_GGUF_DIR") or os.path.join(home, "gguf")
        base = options["--model"] or weights.find(directory, "GGUF_FILE", weights.BASE_NAMES) or "ds4flash.gguf"
        beside = os.path.dirname(os.path.abspath(base))
        wants_speculation = not options["--no-spec"]
        drafter = mtp = None
        if wants_speculation and not options["--no-dspark"]:
            drafter = options["--dspark"] or os.environ.get("DS4_DSPARK_MODEL")
            drafter = drafter or weights.find(beside, "DSPARK_FILE", weights.DRAFTER_NAMES)
        if wants_speculation and not options["--no-mtp"] and "0731" not in os.path.basename(base):
            mtp = options["--mtp"] or weights.find(beside, "MTP_FILE", weights.MTP_NAMES)
        if options["--preset"]:
            missing = [path or "drafter" for path in (base, drafter) if not path or not os.path.isfile(path)]
            if missing:
                raise FatalError(f"ds4-server: --preset spark: incomplete stack: {', '.join(missing)}", 2)
        return base, drafter, mtp

    def _fail_as_told(self) -> None:
        code = FAULTS.get("exit_at_start")
        if code is not None:
            raise FatalError("ds4: CUDA error: an illegal memory access was encountered", int(code))
        until = time.monotonic() + float(FAULTS.get("start_seconds", LOAD_SECONDS))
        while time.monotonic() < until or FAULTS.get("never_ready"):
            time.sleep(0.05)

    def _arm(self, drafter: str | None) -> None:
        environ = os.environ
        wanted = environ.get("DS4_CONT_DSPARK", "1") not in ("", "0") and not self.options["--no-spec"]
        if environ.get("DS4_SERVER_COALESCE", "1") == "0" or environ.get("DS4_SERVER_COALESCE_MAX") == "1":
            log("ds4-server: WARNING: the continuous lane is off, so speculation is off too")
            wanted = False
        if wanted and not drafter:
            log("ds4-server: WARNING: speculation is armed but no engine for it exists (no drafter)")
        self.speculates = bool(wanted and drafter)

    def _boot_lines(self) -> None:
        environ = os.environ
        chosen = environ.get("DS4_SERVER_COALESCE_MAX")
        self.banks = int(chosen) if chosen else (9 if self.ctx <= 262144 else 6)
        if BUILD["cuda_arch"] != "sm_121" and _compute_cap() == "12.1":
            log(
                "ds4: WARNING: this binary is a generic CUDA build; prefill and decode are much slower than they could be"
            )
        log("memgov modes: default")
        log(f"memory census: weights {self.base.name}")
        log(f"persistent batch ctx ready (max_seq={self.banks}, ctx={self.ctx})")
        self.max_clients = int(environ.get("DS4_SERVER_MAX_CLIENTS", "256"))
        self.max_queue = int(environ.get("DS4_SERVER_MAX_QUEUE", "256"))
        log(f"admission bounds: clients={self.max_clients} queue={self.max_queue}")
        log("continuation retention: grace=60s ttl=300s")
        log("mem reconcile: baseline armed")

    def _read_catalogue(self) -> None:
        path = os.environ.get("DS4_CODEX_MODELS_FILE")
        if not path:
            return
        try:
            with open(path, encoding="utf-8") as stream:
                text = stream.read()
            content = json.loads(text)
        except (OSError, ValueError):
            text = ""
        if not text or len(text) >= 4 * 1024 * 1024:
            log("ds4-server: DS4_CODEX_MODELS_FILE unreadable (or empty/oversized), /v1/models stays plain OpenAI")
            return
        if not isinstance(content, dict) or not isinstance(content.get("models"), list):
            log(f'ds4-server: {path} has no top-level "models" array, ignored')
            return
        self.catalogue = content["models"]
        log("ds4-server: codex models catalog spliced into /v1/models")
        window = next((model["context_window"] for model in self.catalogue if "context_window" in model), None)
        if window is not None and window != self.ctx:
            log(
                f"ds4-server: codex models file declares context_window={window} but this boot is -c {self.ctx}"
                f" -- edit {path} to match"
            )

    # -- work --------------------------------------------------------------------------------------------------------
    def refuse_if_busy(self) -> None:
        if time.monotonic() < self.listening + float(FAULTS.get("busy_seconds", 0)):
            raise RefusedError(503, "Server is temporarily at capacity", retry_after=10)

    def run(self, job: Job, prompt: str, question: str, max_tokens: int, *, think: bool) -> Iterator[tuple[str, str]]:
        """Yield ("thinking" or "text", piece); ``job`` is complete when the iterator ends."""
        with self._lock:
            if self.stopping:
                raise RefusedError(503, "server shutting down")
            if self.waiting >= self.max_queue:
                self.shed["queue_depth"] = self.shed.get("queue_depth", 0) + 1
                raise RefusedError(429, "too many requests are queued", retry_after=5)
            self.waiting += 1
            self.inflight += 1
            self.counters["started"] += 1
        outcome = "canceled"  # a client that goes away closes this iterator
        try:
            with self._lock:
                while self.inflight - self.waiting >= self.banks:
                    self._idle.wait()
                self.waiting -= 1
            yield from self._decode(job, prompt, question, max_tokens, think)
            outcome = "completed"
        except RefusedError:
            outcome = "failed"
            raise
        finally:
            with self._lock:
                self.inflight -= 1
                self.counters[outcome] += 1
                self._idle.notify_all()

    def _decode(self, job: Job, prompt: str, question: str, limit: int, think: bool) -> Iterator[tuple[str, str]]:
        job.prompt_tokens = answers.tokens(prompt)
        if job.prompt_tokens >= self.ctx:
            raise RefusedError(
                400,
                f"prompt has {job.prompt_tokens} tokens, the context {self.ctx}",
                code="context_length_exceeded",
                param="messages",
                n_prompt_tokens=job.prompt_tokens,
                n_ctx=self.ctx,
            )
        done = self.counters["completed"]
        if done >= FAULTS.get("poison_after", done + 1):
            raise RefusedError(500, "CUDA error: an illegal memory access was encountered")
        if len(prompt.encode()) > FAULTS.get("fail_above_bytes", len(prompt.encode())):
            raise RefusedError(500, "CUDA error: misaligned address")
        if done >= FAULTS.get("crash_after", done + 1):
            log("ds4: CUDA error: unspecified launch failure")
            self.memory.give_back()
            os._exit(1)
        speed = float(FAULTS.get("speed", 1.0))
        speculates = self.speculates and not FAULTS.get("speculation_off")
        started = time.monotonic()
        job.cached = job.prompt_tokens if self.kv.holds(prompt) or prompt in self._prompts else 0
        time.sleep((job.prompt_tokens - job.cached) / (PREFILL_TOK_S * speed))
        first = time.monotonic()
        reply = answers.answer(prompt, question, intact=self.intact, think=think)
        words = [("thinking", word) for word in reply.thinking] + [("text", word) for word in reply.text]
        per_step = TOK_PER_STEP if speculates else 1.0
        for kind, word in words[:limit]:
            time.sleep(DECODE_STEP_S / per_step / speed)
            job.decoded += 1
            yield kind, word
        if len(words) > limit:
            job.finish = "length"
        self._account(job, started, first, per_step if speculates else 1.0, ACCEPT_RATE if speculates else 0.0)
        self._prompts[prompt] = job.prompt_tokens + job.decoded

    def _account(self, job: Job, started: float, first: float, per_step: float, accept: float) -> None:
        ended = time.monotonic()
        fresh = job.prompt_tokens - job.cached
        job.timings = {
            "ttft_ms": round((first - started) * 1000, 3),
            "prefill_tokens": fresh,
            "prefill_cached_tokens": job.cached,
            "prefill_tok_s": round(fresh / max(first - started, 1e-6), 2),
            "decode_tok_s": round(job.decoded / max(ended - first, 1e-6), 2),
            "spec_accept_rate": accept,
            "tok_per_step": per_step,
        }
        steps = max(1, round(job.decoded / per_step))
        with self._lock:
            counters = self.counters
            counters["prefilled"] += fresh
            counters["cached"] += job.cached
            counters["decoded"] += job.decoded
            counters["steps"] += steps
            if accept:
                counters["drafts"] += steps * 2
                counters["hits"] += round(steps * 2 * accept)
            for name in self.last:
                self.last[name] = job.timings[name]

    # -- stop --------------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Let running and queued jobs end, then keep their KV."""
        with self._lock:
            while self.inflight:
                self._idle.wait()
        time.sleep(float(FAULTS.get("drain_seconds", 0)))
        prompts = dict(list(self._prompts.items())[-self.banks :])
        self.kv.store(prompts, "bank-shutdown")


def _command_line() -> list[str]:
    with open("/proc/self/cmdline", "rb") as stream:
        return [word.decode(errors="replace") for word in stream.read().split(b"\0")[:-1]]


def _compute_cap() -> str:
    """Of the GPU, as nvidia-smi says; a GB10 where it says nothing."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=3,
            check=True,
        )
        return ran.stdout.strip() or "12.1"
    except (OSError, subprocess.SubprocessError):
        return "12.1"
