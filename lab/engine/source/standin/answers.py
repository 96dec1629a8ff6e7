"""The stand-in's model: it knows one fact, and only with intact weights."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from common import FAULTS


class Answer(NamedTuple):
    thinking: list[str]
    text: list[str]


def tokens(text: str) -> int:
    """What a prompt costs: about four bytes a token."""
    return len(text.encode()) // 4 + 1


def pieces(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text)


def answer(prompt: str, question: str, *, intact: bool, think: bool) -> Answer:
    if FAULTS.get("garbage") or not intact:
        return Answer([], pieces("the the of of \u2581\u2581 qz the qz of \u2581 the the"))
    if re.search(r"capital\b.*\bfrance", question, re.IGNORECASE | re.DOTALL):
        text = "The capital of France is Paris."
    else:
        text = f"This is the stand-in engine; your message has {len(question.split())} words."
    return Answer(pieces("The user asks one short question; I answer it.") if think else [], pieces(text))


def chat_text(body: dict[str, Any]) -> tuple[str, str]:
    """The whole conversation as one prompt, and the last thing a user said."""
    turns, question = [], ""
    system = body.get("system") or body.get("instructions")
    if system:
        turns.append(content_text(system))
    messages = body.get("messages", body.get("input", []))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a non-empty array")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError("a message must be an object")
        text = content_text(message.get("content"))
        turns.append(text)
        if message.get("role", "user") == "user":
            question = text
    return "\n".join(turns), question


def content_text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    raise ValueError("content must be a string or an array")
