"""The scripted upstream's built-in models: the name of a fault is the name of a model. Each takes (stream?, request JSON)."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

from backends.scripted_steps import USAGE, Head, Reply, Step, Tokens, chunk, completion

Script = tuple[Step, ...]
Model = Callable[[bool, dict[str, Any]], Script]

SSE = {"content-type": "text/event-stream", "cache-control": "no-cache"}
_HEAD = Step(head=Head(headers=SSE))
_JSON = {"content-type": "application/json"}
#: CJK, an accent, a family of three joined by ZWJ, a flag.
UNICODE_TEXT = "你好，世界 é 👨‍👩‍👧 🇨🇳 done"


def _ok(_stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(answer="hello there, how can I help?"),)


def _echo(_stream: bool, body: dict[str, Any]) -> Script:
    messages = body.get("messages") or [{}]
    return (Step(answer=str(messages[-1].get("content", ""))),)


def _slow_first_token(_stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(wait_s=0.3), Step(answer="late but good"))


def _never(_stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(hang=True),)


def _close_before_content(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(head=Head(headers={**_JSON, "content-length": "200"}, framing="length")), Step(close=True))
    return (_HEAD, Step(sse=chunk({"role": "assistant", "content": ""})), Step(close=True))


def _malformed_line(stream: bool, body: dict[str, Any]) -> Script:
    if not stream:
        return _ok(stream, body)
    return (_HEAD, Step(sse='{"choices": [{"delta": {"conte'), *_good_events("good after all"))


def _cut_after_40(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        head = Head(headers={**_JSON, "content-length": "4000"}, framing="length")
        return (
            Step(head=head),
            Step(send='{"id":"chatcmpl-1","choices":[{"message":{"content":"tok0 tok1'),
            Step(close=True),
        )
    return (_HEAD, Step(tokens=Tokens(count=40)), Step(close=True))


def _no_finish(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(reply=Reply(headers=_JSON, json=completion({"content": "half an ans"}, None))),)
    return (_HEAD, Step(tokens=Tokens(count=3)), Step(sse="[DONE]"), Step(end=True))


_ERROR = {"error": {"message": "scripted: the engine is out of memory", "type": "server_error", "code": "engine_oom"}}


def _error_first(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(reply=Reply(headers=_JSON, json=_ERROR)),)
    return (_HEAD, Step(sse=_ERROR), Step(sse="[DONE]"), Step(end=True))


def _error_after_content(stream: bool, body: dict[str, Any]) -> Script:
    if not stream:
        return _error_first(stream, body)
    return (_HEAD, Step(tokens=Tokens(count=3)), Step(sse=_ERROR), Step(sse="[DONE]"), Step(end=True))


def _html(_stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(reply=Reply(headers={"content-type": "text/html"}, text="<html><body>Welcome</body></html>")),)


def _gzip(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(reply=Reply(headers=_JSON, json=completion({"content": "unzipped"}), gzip=True)),)
    text = "".join(step.payload().decode() for step in _good_events("unzipped") if step.sse is not None)
    return (Step(reply=Reply(headers=SSE, text=text, gzip=True)),)


def _empty(stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(reply=Reply(headers=SSE if stream else _JSON)),)


def _invalid_json(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(reply=Reply(headers=_JSON, text='{"choices": [')),)
    return (_HEAD, Step(sse="{not json"), Step(sse="[DONE]"), Step(end=True))


def _status(status: int, code: str, headers: dict[str, str] | None = None) -> Model:
    error = {"error": {"message": f"scripted {status}", "type": "scripted_error", "code": code}}
    steps = (Step(reply=Reply(status=status, headers={**_JSON, **(headers or {})}, json=error)),)
    return lambda _stream, _body: steps


def _endless_error(_stream: bool, _body: dict[str, Any]) -> Script:
    head = Head(status=500, headers={**_JSON, "content-length": "1000000"}, framing="length")
    return (Step(head=head), Step(send='{"error": "and then nothing'), Step(hang=True))


def _call(index: int, **function: str) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": function}]}


def _tools_interleaved(stream: bool, _body: dict[str, Any]) -> Script:
    names = ("get_weather", "get_time", "get_news")
    ids = [{"id": f"call_{i}", "type": "function"} for i in range(3)]
    arguments = [f'{{"city": "北京", "n": {i}}}' for i in range(3)]
    if not stream:
        calls = [
            {**ids[i], "function": {"name": names[i], "arguments": arguments[i]}} for i in range(3)
        ]  # fmt: skip
        message = {"content": None, "tool_calls": calls}
        return (Step(reply=Reply(headers=_JSON, json=completion(message, "tool_calls"))),)
    starts = [
        chunk({"tool_calls": [{"index": i, **ids[i], "function": {"name": names[i], "arguments": ""}}]})
        for i in range(3)
    ]
    halves = [chunk(_call(i, arguments=arguments[i][:9])) for i in (2, 0, 1)]
    rests = [chunk(_call(i, arguments=arguments[i][9:])) for i in (1, 2, 0)]
    events = [chunk({"role": "assistant", "content": None}), *starts, *halves, *rests, chunk({}, "tool_calls")]
    events.append({**chunk(None), "usage": USAGE})
    return (_HEAD, *(Step(sse=value) for value in events), Step(sse="[DONE]"), Step(end=True))


def _reasoning(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        message = {"reasoning_content": "Let me think.", "content": "42"}
        return (Step(reply=Reply(headers=_JSON, json=completion(message))),)
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"reasoning_content": "Let me "},
        {"reasoning_content": "think."},
    ]
    deltas.append({"content": "42"})
    return (_HEAD, *(Step(sse=chunk(delta)) for delta in deltas), *_good_events(""))


def _bytewise_unicode(stream: bool, _body: dict[str, Any]) -> Script:
    if not stream:
        return (
            Step(head=Head(headers=_JSON)),
            Step(send=_json_text(completion({"content": UNICODE_TEXT})), bytewise=True),
        )
    steps = [_HEAD]
    steps += [Step(sse=chunk({"content": letter}), bytewise=True) for letter in UNICODE_TEXT]
    return (*steps, *_good_events(""))


def _json_text(value: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(value).decode()


def _paced(stream: bool, body: dict[str, Any]) -> Script:
    if not stream:
        return (Step(wait_s=0.2), *_ok(stream, body))
    return (_HEAD, Step(tokens=Tokens(count=10, every_s=0.02)), *_good_events(""))


def _huge_line(stream: bool, _body: dict[str, Any]) -> Script:
    text = "x" * (600 << 10)
    if not stream:
        return (Step(reply=Reply(headers=_JSON, json=completion({"content": text}))),)
    return (_HEAD, *_good_events(text))


def _keepalive_close(_stream: bool, _body: dict[str, Any]) -> Script:
    return (Step(close_if_reused=True), Step(answer="answered on a fresh connection"))


def _usage(stream: bool, body: dict[str, Any]) -> Script:
    """Usage is sent whether or not it was asked for."""
    return (_HEAD, *_good_events("with usage")) if stream else _ok(stream, body)


def _good_events(text: str) -> Script:
    first = (Step(sse=chunk({"role": "assistant", "content": text})),) if text else ()
    usage = {**chunk(None), "usage": USAGE}
    return (*first, Step(sse=chunk({}, "stop")), Step(sse=usage), Step(sse="[DONE]"), Step(end=True))


MODELS: dict[str, Model] = {
    "ok": _ok,
    "echo": _echo,
    "slow-first-token": _slow_first_token,
    "never": _never,
    "close-before-content": _close_before_content,
    "close-at-once": lambda _stream, _body: (Step(close=True),),
    "reset": lambda _stream, _body: (Step(reset=True),),
    "malformed-line-then-good": _malformed_line,
    "cut-after-40": _cut_after_40,
    "no-finish": _no_finish,
    "error-first": _error_first,
    "error-after-content": _error_after_content,
    "html": _html,
    "gzip": _gzip,
    "empty": _empty,
    "invalid-json": _invalid_json,
    "not-http": lambda _stream, _body: (Step(raw="I am not an HTTP server\r\n\r\n"), Step(close=True)),
    "status-500": _status(500, "internal"),
    "status-503": _status(503, "overloaded", {"retry-after": "2"}),
    "status-429": _status(429, "rate_limited", {"retry-after": "1"}),
    "status-401": _status(401, "invalid_api_key"),
    "status-404": _status(404, "model_not_found"),
    "status-400": _status(400, "invalid_request"),
    "status-422": _status(422, "unprocessable"),
    "status-302": _status(302, "moved", {"location": "http://127.0.0.1:1/elsewhere"}),
    "status-400-context": _status(400, "context_length_exceeded"),
    "status-500-endless": _endless_error,
    "tools-interleaved": _tools_interleaved,
    "reasoning": _reasoning,
    "bytewise-unicode": _bytewise_unicode,
    "paced-20ms": _paced,
    "huge-line": _huge_line,
    "keepalive-close": _keepalive_close,
    "usage": _usage,
}


def _tensor_ok(_stream: bool, body: dict[str, Any]) -> Script:
    """Every input comes back as the output of the same name, as it came (JSON or binary)."""
    answer = {"model_name": "scripted", "outputs": body.get("inputs", [])}
    head = _json_text(answer)
    tail = base64.b64decode(body.get("_binary", ""))
    headers = {"content-type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head.encode()))}
    length = {"content-length": str(len(head.encode()) + len(tail))}
    return (
        Step(head=Head(headers={**headers, **length}, framing="length")),
        Step(send=head),
        Step(send_base64=base64.b64encode(tail).decode()),
    )


TENSOR_MODELS: dict[str, Model] = {
    "ok": _tensor_ok,
    "never": _never,
    "error": lambda _stream, _body: (Step(reply=Reply(status=500, headers=_JSON, json={"error": "scripted"})),),
    "bad-input": lambda _stream, _body: (Step(reply=Reply(status=400, headers=_JSON, json={"error": "bad shape"})),),
    "error-first": lambda _stream, _body: (Step(reply=Reply(headers=_JSON, json={"error": "scripted"})),),
    "malformed": lambda _stream, _body: (Step(reply=Reply(headers=_JSON, json={"outputs": [{"name": "x"}]})),),
    "empty": _empty,
}
