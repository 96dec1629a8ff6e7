"""The HTTP surfaces: model list, metrics, statistics, and the four ways to ask for a completion."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import answers
from engine import Engine, Job, RefusedError

if TYPE_CHECKING:
    from server import Handler

CREATED = 1767225600
DEFAULT_MAX_TOKENS = 32768


def model(engine: Engine, name: str) -> dict[str, Any]:
    limit = min(engine.options["--tokens"], engine.ctx)
    return {
        "id": name,
        "object": "model",
        "created": CREATED,
        "owned_by": "ds4.c",
        "name": "DeepSeek V4 Flash",
        "context_length": engine.ctx,
        "top_provider": {"context_length": engine.ctx, "max_completion_tokens": limit, "is_moderated": False},
        "supported_parameters": ["max_tokens", "temperature", "top_p", "stream", "tools"],
    }


def models(engine: Engine) -> dict[str, Any]:
    content: dict[str, Any] = {"object": "list", "data": [model(engine, "deepseek-v4-flash")]}
    if engine.catalogue is not None:
        content["models"] = engine.catalogue
    return content


def metrics(engine: Engine) -> str:
    counters = engine.counters
    ratio = counters["hits"] / counters["drafts"] if counters["drafts"] else 0.0
    values: list[tuple[str, str, float]] = [
        ("ds4_uptime_seconds", "", time.monotonic() - engine.started),
        ("ds4_requests_inflight", "", engine.inflight),
        ("ds4_requests_started_total", "", counters["started"]),
        *(
            ("ds4_requests_total", f'{{outcome="{outcome}"}}', counters.get(outcome, 0))
            for outcome in ("completed", "failed", "canceled", "refused_deep_serial")
        ),
        ("ds4_queue_depth", "", engine.waiting),
        ("ds4_banks_live", "", engine.inflight - engine.waiting),
        ("ds4_banks_total", "", engine.banks),
        *(("ds4_requests_shed_total", f'{{reason="{reason}"}}', count) for reason, count in engine.shed.items()),
        ("ds4_decode_tok_s", "", engine.last["decode_tok_s"]),
        ("ds4_prefill_tok_s", "", engine.last["prefill_tok_s"]),
        ("ds4_tok_per_step", "", engine.last["tok_per_step"]),
        ("ds4_tokens_prefilled_total", '{kind="fresh"}', counters["prefilled"]),
        ("ds4_tokens_prefilled_total", '{kind="cached"}', counters["cached"]),
        ("ds4_tokens_decoded_total", "", counters["decoded"]),
        ("ds4_decode_steps_total", "", counters["steps"]),
        ("ds4_spec_drafts_total", "", counters["drafts"]),
        ("ds4_spec_hits_total", "", counters["hits"]),
        ("ds4_spec_accept_ratio", "", ratio),
    ]
    return "".join(f"{name}{labels} {value:g}\n" for name, labels, value in values)


def stats(engine: Engine) -> dict[str, Any]:
    counters = engine.counters
    return {
        "server": {
            "model": "deepseek-v4-flash",
            "context": engine.ctx,
            "max_seq": engine.banks,
            "uptime_seconds": round(time.monotonic() - engine.started, 3),
            "requests_inflight": engine.inflight,
            "artifact_source": "built",
            "derived_artifacts": 0,
        },
        "serving": {name: counters[name] for name in ("started", "completed", "failed", "canceled")},
        "routes": {},
        "route_decisions": {},
        "think_modes": {},
        "sheds": engine.shed,
        "backpressure": {"queue_depth": engine.waiting},
        "speculation": {"drafts": counters["drafts"], "hits": counters["hits"]},
        "cache": {"prefill_cached_tokens": counters["cached"]},
        "memory": {"observation": {}, "reconcile": {}},
        "governor": {"modes": {}, "leases": {}, "decisions": {}},
    }


class Surface:
    """One request on one POST endpoint. Subclasses say how it is read and how its answer is written."""

    prefix = ""

    def __init__(self, handler: Handler, engine: Engine, body: dict[str, Any]) -> None:
        self.handler, self.engine, self.body = handler, engine, body
        self.job = Job()
        self.id = f"{self.prefix}{uuid.uuid4().hex[:24]}"
        self.model = str(body.get("model") or "deepseek-v4-flash")
        self.thinking = self.text = ""

    def prompt(self) -> tuple[str, str]:
        return answers.chat_text(self.body)

    def limit(self) -> int:
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            value = self.body.get(name)
            if value is not None:
                if not isinstance(value, int) or value < 1:
                    raise RefusedError(400, f"{name} must be a positive integer")
                return min(value, self.engine.options["--tokens"])
        return DEFAULT_MAX_TOKENS

    def thinks(self) -> bool:
        return self.model != "deepseek-chat" and self.engine.options["--reasoning-effort"] != "off"

    def pieces(self) -> Iterator[tuple[str, str]]:
        try:
            prompt, question = self.prompt()
        except ValueError as error:
            raise RefusedError(400, str(error)) from None
        kind = self.body.get("response_format")
        if isinstance(kind, dict) and str(kind.get("type", "")).startswith("json"):
            raise RefusedError(400, "response_format json is not supported")
        for kind, piece in self.engine.run(self.job, prompt, question, self.limit(), think=self.thinks()):
            if kind == "thinking":
                self.thinking += piece
            else:
                self.text += piece
            yield kind, piece

    def serve(self) -> None:
        pieces = self.pieces()
        if not self.body.get("stream"):
            for _ in pieces:
                pass
            self.handler.reply(200, self.whole())
            return
        first = next(pieces, None)  # a refusal comes before the status line
        self.handler.begin(200, "text/event-stream", {"Cache-Control": "no-cache"})
        try:
            for event in self.before():
                self.event(event)
            while first is not None:
                for event in self.piece(*first):
                    self.event(event)
                first = next(pieces, None)
            for event in self.after():
                self.event(event)
        finally:
            pieces.close()

    def event(self, content: dict[str, Any] | str) -> None:
        data = content if isinstance(content, str) else json.dumps(content)
        name = content.get("type") if isinstance(content, dict) else None
        self.handler.wfile.write((f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode())

    def usage(self) -> dict[str, int]:
        sent, got = self.job.prompt_tokens, self.job.decoded
        return {"prompt_tokens": sent, "completion_tokens": got, "total_tokens": sent + got}

    def usage_in_out(self) -> dict[str, int]:
        sent, got = self.job.prompt_tokens, self.job.decoded
        return {"input_tokens": sent, "output_tokens": got}

    def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def before(self) -> list[dict[str, Any]]:
        return []

    def piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def after(self) -> list[dict[str, Any] | str]:
        raise NotImplementedError


class Chat(Surface):
    prefix = "chatcmpl-"

    def envelope(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, **choice}]
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model, "choices": choices}

    def whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        content = self.envelope("chat.completion", {"message": message, "finish_reason": self.job.finish})
        return {**content, "usage": self.usage(), "timings": self.job.timings}

    def before(self) -> list[dict[str, Any]]:
        return [self.chunk({"role": "assistant"})]

    def chunk(self, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self.envelope("chat.completion.chunk", {"delta": delta, "finish_reason": finish})

    def piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        return [self.chunk({"reasoning_content" if kind == "thinking" else "content": text})]

    def after(self) -> list[dict[str, Any] | str]:
        last = {**self.chunk({}, self.job.finish), "usage": self.usage(), "timings": self.job.timings}
        return [last, "[DONE]"]


class Completions(Chat):
    prefix = "cmpl-"

    def prompt(self) -> tuple[str, str]:
        text = self.body.get("prompt")
        if isinstance(text, list) and len(text) == 1:
            text = text[0]
        if not isinstance(text, str) or not text:
            raise ValueError("prompt must be a non-empty string")
        return text, text

    def thinks(self) -> bool:
        return False

    def whole(self) -> dict[str, Any]:
        content = self.envelope("text_completion", {"text": self.text, "finish_reason": self.job.finish})
        return {**content, "usage": self.usage(), "timings": self.job.timings}

    def before(self) -> list[dict[str, Any]]:
        return []

    def piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        return [self.envelope("text_completion", {"text": text, "finish_reason": None})]

    def after(self) -> list[dict[str, Any] | str]:
        last = self.envelope("text_completion", {"text": "", "finish_reason": self.job.finish})
        return [{**last, "usage": self.usage(), "timings": self.job.timings}, "[DONE]"]


class Responses(Surface):
    prefix = "resp_"
    place: ClassVar[dict[str, Any]] = {"item_id": "msg_0", "output_index": 0, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": []}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": "msg_0", "status": status, "role": "assistant", "content": content}

    def whole(self) -> dict[str, Any]:
        complete = self.job.finish == "stop"
        content: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed" if complete else "incomplete",
            "model": self.model,
            "output": [self.item("completed", [self.part(self.text)])],
            "usage": {**self.usage_in_out(), "total_tokens": self.job.prompt_tokens + self.job.decoded},
            "timings": self.job.timings,
        }
        if not complete:
            content["incomplete_details"] = {"reason": "max_output_tokens"}
        return content

    def before(self) -> list[dict[str, Any]]:
        response = {"id": self.id, "object": "response", "status": "in_progress", "model": self.model, "output": []}
        return [
            {"type": "response.created", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": self.item("in_progress", [])},
            {"type": "response.content_part.added", **self.place, "part": self.part("")},
        ]

    def piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        if kind == "thinking":
            return []
        return [{"type": "response.output_text.delta", **self.place, "delta": text}]

    def after(self) -> list[dict[str, Any] | str]:
        return [
            {"type": "response.output_text.done", **self.place, "text": self.text},
            {"type": "response.content_part.done", **self.place, "part": self.part(self.text)},
            {
                "type": "response.output_item.done",
                "output_index": 0,
                "item": self.item("completed", [self.part(self.text)]),
            },
            {"type": "response.completed", "response": self.whole()},
        ]


class Messages(Surface):
    prefix = "msg_"

    def stop_reason(self) -> str:
        return "end_turn" if self.job.finish == "stop" else "max_tokens"

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [{"type": "text", "text": self.text}],
            "stop_reason": self.stop_reason(),
            "stop_sequence": None,
            "usage": self.usage_in_out(),
            "timings": self.job.timings,
        }

    def before(self) -> list[dict[str, Any]]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": []}
        message["usage"] = self.usage_in_out()
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        ]

    def piece(self, kind: str, text: str) -> list[dict[str, Any]]:
        if kind == "thinking":
            return []
        return [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}]

    def after(self) -> list[dict[str, Any] | str]:
        return [
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": self.stop_reason(), "stop_sequence": None},
                "usage": self.usage_in_out(),
            },
            {"type": "message_stop"},
        ]


class Batch(Surface):
    """The engine has this endpoint; nothing of ours uses it, so the stand-in only refuses politely."""

    def serve(self) -> None:
        raise RefusedError(400, "the stand-in engine does not serve batches")


SURFACES: dict[str, type[Surface]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completions,
    "/v1/responses": Responses,
    "/v1/messages": Messages,
    "/v1/batch": Batch,
}
