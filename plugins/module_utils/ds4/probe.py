# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Ask a served engine what it must be able to answer: through the running service only, past any proxy, bounded.

Endpoints, ids and answer shapes: ds4_server.c and the engine's README (OpenAI chat, completions and responses,
Anthropic messages; /metrics in Prometheus text).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .files import read_json, write_json

if TYPE_CHECKING:
    import http.client

_LONGEST_ANSWER = 4 << 20  # bytes; a smoke question never needs more
_EVIDENCE_TEXT = 4000  # characters kept of an answer


class Answer(NamedTuple):
    """HTTP answer. ``status`` is 0 when there was none, and ``error`` says why."""

    status: int
    body: str
    seconds: float
    error: str = ""

    def json(self) -> Any:
        """Body as JSON, or None."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


class Check(NamedTuple):
    """One judged property of a served engine."""

    name: str
    ok: bool
    text: str


def reach(host: str) -> str:
    """Address to ask a service on: a wildcard address is asked on loopback."""
    return "127.0.0.1" if host in ("", "0.0.0.0", "localhost") else host  # noqa: S104


def request(host: str, port: int, path: str, body: Any = None, *, timeout_seconds: float) -> Answer:
    """One HTTP request straight to ``host``: no proxy variable is ever looked at. Never raises for a bad server."""
    import http.client  # many import this part who ask nothing, and a module's imports are compiled at each call

    start = time.monotonic()
    connection = http.client.HTTPConnection(reach(host), port, timeout=timeout_seconds)
    headers = {"Accept": "application/json, text/event-stream, text/plain", "Connection": "close"}
    try:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            headers.update({"Content-Type": "application/json", "anthropic-version": "2023-06-01"})
            connection.request("POST", path, body=json.dumps(body).encode(), headers=headers)
        reply = connection.getresponse()
        text = _read_bounded(reply, start + timeout_seconds)
        return Answer(reply.status, text, time.monotonic() - start)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, "", time.monotonic() - start, f"{type(error).__name__}: {error}")
    finally:
        connection.close()


def _read_bounded(reply: http.client.HTTPResponse, deadline: float) -> str:
    """Whole body, within a total time: a socket time-out alone lets a trickle last for ever."""
    parts: list[bytes] = []
    size = 0
    while size < _LONGEST_ANSWER:
        part = reply.read1(65536)
        if not part:
            break
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    return b"".join(parts).decode(errors="replace")


# ----------------------------------------------------------------------------------------------------- readiness


def models(answer: Answer) -> list[str]:
    """Model ids of a ``/v1/models`` answer."""
    body = answer.json()
    rows = body.get("data") if isinstance(body, dict) else None
    return [str(row.get("id", "")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def is_ready(host: str, port: int, timeout_seconds: float = 5) -> bool:
    """True when ``/v1/models`` answers 200: the engine binds its port only after the model is loaded."""
    return request(host, port, "/v1/models", timeout_seconds=timeout_seconds).status == 200


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text → value per metric name, labels summed up."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = re.match(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^}]*\})?\s+(\S+)", line)
        if found:
            try:
                values[found.group(1)] = values.get(found.group(1), 0.0) + float(found.group(2))
            except ValueError:
                continue
    return values


def metrics(host: str, port: int, timeout_seconds: float = 5) -> dict[str, float]:
    """Metrics of a served engine; empty when it does not answer."""
    answer = request(host, port, "/metrics", timeout_seconds=timeout_seconds)
    return parse_metrics(answer.body) if answer.status == 200 else {}


# ----------------------------------------------------------------------------------------------------- questions


class Reply(NamedTuple):
    """What a model said: its text and the word for why it stopped."""

    text: str
    finish: str


_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def question_body(question: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Body of a question in the words of its API."""
    api, prompt, limit = question["api"], question["prompt"], int(question.get("max_tokens", 64))
    body: dict[str, Any] = {"model": model, "temperature": question.get("temperature", 0)}
    if api == "completions":
        body.update(prompt=prompt, max_tokens=limit)
    elif api == "responses":
        body.update(input=prompt, max_output_tokens=limit)
    else:
        body.update(messages=[{"role": "user", "content": prompt}], max_tokens=limit)
    if question.get("stream"):
        body["stream"] = True
    return body


def question_errors(questions: Any) -> list[str]:
    """Why questions prove nothing, as sentences; None stands for ours. The form of each is judged by the spec of smoke_test."""
    if not isinstance(questions, list):
        return []
    told = [question for question in questions if isinstance(question, Mapping)]
    empty = [str(question.get("name", "")) for question in told if not str(question.get("prompt", "x")).strip()]
    errors = [
        f"the prompt of {name or 'a question'} in smoke_test_questions is empty; required: a text. Cure: write it, or "
        "remove smoke_test_questions for ours"
        for name in empty
    ]
    if not any(question.get("expect") for question in told):
        errors.append(
            f"smoke_test_questions has {len(questions)} question(s), none with expect; required: one at least, so that a wrong "
            "answer can be told. Cure: give one of them expect, or remove smoke_test_questions for ours"
        )
    return errors


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(parts: Any) -> str:
    """Joined ``text`` of a list of content blocks."""
    return "".join(str(_as_dict(part).get("text") or "") for part in parts) if isinstance(parts, list) else ""


def read_reply(api: str, body: Any) -> Reply | None:
    """Text and finish reason of an answer, or None when it has not the shape of its API."""
    body = _as_dict(body)
    if api in ("chat", "completions"):
        choices = body.get("choices")
        if not isinstance(choices, list) or not choices:
            return None
        choice = _as_dict(choices[0])
        text = _as_dict(choice.get("message")).get("content") if api == "chat" else choice.get("text")
        return Reply(str(text or ""), str(choice.get("finish_reason") or ""))
    if api == "messages":
        return Reply(_texts(body.get("content")), str(body.get("stop_reason") or "")) if "content" in body else None
    output = body.get("output")
    if not isinstance(output, list):
        return None
    text = "".join(_texts(item.get("content")) for item in map(_as_dict, output) if item.get("type") == "message")
    return Reply(text, str(body.get("status") or ""))


def read_stream(text: str) -> Reply | None:
    """Text and finish reason of a streamed chat answer (server-sent events), or None when it is none."""
    said, finish, events, done = [], "", 0, False
    for line in text.splitlines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            done = True
            continue
        try:
            choices = _as_dict(json.loads(data)).get("choices")
        except ValueError:
            return None
        events += 1
        if isinstance(choices, list) and choices:
            choice = _as_dict(choices[0])
            said.append(str(_as_dict(choice.get("delta")).get("content") or ""))
            finish = str(choice.get("finish_reason") or finish)
    return Reply("".join(said), finish) if events and done else None


def ask(
    host: str, port: int, model: str, question: Mapping[str, Any], timeout_seconds: float
) -> tuple[Check, dict[str, Any]]:
    """Put one question; returns the judgement and what was said, for the transcript."""
    api = str(question["api"])
    body = question_body(question, model)
    answer = request(host, port, _PATHS[api], body, timeout_seconds=timeout_seconds)
    streamed = bool(question.get("stream"))
    reply = read_stream(answer.body) if streamed else read_reply(api, answer.json())
    check = Check(str(question["name"]), *_judge(question, answer, reply))
    said = {
        "question": question["name"],
        "path": _PATHS[api],
        "request": body,
        "status": answer.status,
        "seconds": round(answer.seconds, 3),
        "answer": answer.body[:_EVIDENCE_TEXT],
        "error": answer.error,
        "ok": check.ok,
        "judgement": check.text,
    }
    return check, said


def _judge(question: Mapping[str, Any], answer: Answer, reply: Reply | None) -> tuple[bool, str]:
    if answer.status != 200:
        return False, answer.error or f"HTTP {answer.status}: {answer.body[:300]}"
    if reply is None:
        return False, f"the answer has not the shape of this API: {answer.body[:300]}"
    if not reply.text.strip():
        return False, f"an empty answer (finish reason {reply.finish or 'absent'})"
    expected = str(question.get("expect") or "")
    if expected and expected.lower() not in reply.text.lower():
        return False, f"{expected!r} expected, the answer was {reply.text.strip()[:200]!r}"
    allowed = [str(word) for word in question.get("finish") or []]
    if allowed and reply.finish not in allowed:
        return False, f"finish reason {reply.finish or 'absent'!r}, expected {' or '.join(allowed)}"
    return True, reply.text.strip()[:200]


# --------------------------------------------------------------------------------------------------------- smoke


class Smoke(NamedTuple):
    """Outcome of a smoke test: its length, when the first question was answered well, and JSON-able evidence."""

    ok: bool
    checks: list[Check]
    seconds: float
    first_answer_seconds: float
    transcript: dict[str, Any]

    @property
    def failures(self) -> list[str]:
        return [f"{check.name}: {check.text}" for check in self.checks if not check.ok]


def smoke(
    host: str,
    port: int,
    *,
    model: str,
    questions: Sequence[Mapping[str, Any]],
    timeout_seconds: float,
    total_seconds: float,
    speculation: bool,
    forbidden_log: Sequence[str],
    journal: str,
) -> Smoke:
    """Everything a served engine must show.

    Args:
        model: id that ``/v1/models`` must list and that is asked.
        questions: ``{name, api: chat|completions|responses|messages, prompt, expect, finish[], max_tokens,
            temperature, stream}``.
        timeout_seconds: limit of one question. total_seconds: limit of all; what is left then counts as failed.
        speculation: a drafter is configured, so drafts must be counted while the questions are answered.
        forbidden_log: strings that must not be in ``journal`` (this start's log).
    """
    start = time.monotonic()
    checks: list[Check] = []
    said: list[dict[str, Any]] = []
    answered: float | None = None
    listing = request(host, port, "/v1/models", timeout_seconds=timeout_seconds)
    ids = models(listing)
    text = (
        f"{model} listed"
        if model in ids
        else f"{model} is not listed ({', '.join(ids) or listing.error or listing.status})"
    )
    checks.append(Check("model", model in ids, text))
    before = metrics(host, port, timeout_seconds)
    for question in questions:
        left = total_seconds - (time.monotonic() - start)
        if left <= 0:
            checks.append(
                Check(str(question["name"]), False, f"not asked: {total_seconds:g} s for all questions are over")
            )
            continue
        check, record = ask(host, port, model, question, min(timeout_seconds, left))
        checks.append(check)
        said.append(record)
        if check.ok and answered is None:
            answered = time.monotonic() - start
    if speculation:
        checks.append(_speculation(before, metrics(host, port, timeout_seconds)))
    found = [text for text in forbidden_log if text in journal]
    checks.append(Check("boot log", not found, f"it says {found[0]!r}" if found else "no sign of a wrong build"))
    seconds = time.monotonic() - start
    ok = all(check.ok for check in checks)
    transcript = {
        "schema": 1,
        "ok": ok,
        "url": f"http://{reach(host)}:{port}",
        "model": model,
        "seconds": round(seconds, 3),
        "checks": [check._asdict() for check in checks],
        "questions": said,
    }
    return Smoke(ok, checks, seconds, seconds if answered is None else answered, transcript)


def _speculation(before: Mapping[str, float], after: Mapping[str, float]) -> Check:
    name = "ds4_spec_drafts_total"
    if name not in after:
        return Check(
            "speculation", False, f"/metrics has no {name}: a drafter is configured, but nothing shows that it works"
        )
    drafts = after[name] - before.get(name, 0.0)
    if drafts <= 0:
        return Check(
            "speculation", False, "a drafter is configured, but nothing was drafted while the questions were answered"
        )
    return Check("speculation", True, f"{drafts:.0f} drafts")


def main(argv: list[str] | None = None) -> int:
    """Entry of ``python3 -m ds4.probe``: the host's own smoke questions, by hand. 0 when everything holds."""
    from .service import Service

    parser = argparse.ArgumentParser(prog="ds4.probe", description="Ask the served engine its smoke questions.")
    parser.add_argument("--state-dir", default="/var/lib/ds4/state")
    parser.add_argument("--transcript", help="write what was said to this file")
    options = parser.parse_args(argv)
    policy = read_json(f"{options.state_dir}/policy.json")
    if not isinstance(policy, dict):
        print(f"no policy in {options.state_dir}: run site.yml first", file=sys.stderr)
        return 2
    from .deployment import Layout, running_deployment

    layout = Layout(**policy["layout"])
    state = Service(layout.unit).state()
    manifest = layout.manifest(running_deployment(state))
    if manifest is None:
        print(f"{layout.unit} runs no deployment of ours: {state.describe()}", file=sys.stderr)
        return 1
    result = smoke_deployment(manifest, policy, Service(layout.unit).journal(state.invocation, 5000))
    if options.transcript:
        write_json(options.transcript, result.transcript)
    for check in result.checks:
        print(f"{'ok    ' if check.ok else 'FAILED'} {check.name}: {check.text}")
    return 0 if result.ok else 1


def smoke_deployment(manifest: Mapping[str, Any], policy: Mapping[str, Any], journal: str) -> Smoke:
    """Smoke test of a running deployment with the questions kept on the host."""
    wanted, service = policy["smoke"], manifest["service"]
    return smoke(
        service["host"],
        service["port"],
        model=wanted["model"],
        questions=wanted["questions"],
        timeout_seconds=wanted["timeout_seconds"],
        total_seconds=wanted["total_seconds"],
        speculation=bool(service["speculation"]) and bool(wanted["speculation"]),
        forbidden_log=wanted["forbidden_log"],
        journal=journal,
    )


if __name__ == "__main__":
    sys.exit(main())
