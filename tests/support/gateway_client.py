"""A client of the gateway for black-box tests: real sockets, whole answers and streams read the same way."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

#: Asks for thinking, by a word of the test policy: goes to heavy. The other goes to light.
HARD = "prove that the sum of two even numbers is even"
EASY = "what is your phone number"

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Got:
    """One answer, completely read."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def said(self, name: str) -> str | None:
        """The header `x-gateway-NAME`."""
        return self.headers.get(f"x-gateway-{name}")

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[str]:
        """What stands behind `data: `, event by event."""
        return [part.removeprefix("data: ") for part in self.body.decode().split("\n\n") if part]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events that are JSON."""
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def text(self) -> str:
        """The answer's content, however it came."""
        return str(self.message.get("content") or "")

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message; a stream is put together."""
        if not self.is_stream:
            message: dict[str, Any] = self.json["choices"][0]["message"]
            return message
        built: dict[str, Any] = {"content": ""}
        calls: dict[int, dict[str, str]] = {}
        for chunk in self.chunks:
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                for key in ("content", "reasoning_content"):
                    if delta.get(key):
                        built[key] = built.get(key, "") + delta[key]
                for call in delta.get("tool_calls") or ():
                    held = calls.setdefault(call["index"], {"name": "", "arguments": "", "id": ""})
                    held["id"] += call.get("id", "")
                    for key, piece in call.get("function", {}).items():
                        held[key] += piece
        if calls:
            built["calls"] = [calls[index] for index in sorted(calls)]
        return built

    @property
    def finish_reason(self) -> str | None:
        if not self.is_stream:
            return str(self.json["choices"][0]["finish_reason"])
        reasons = [c["finish_reason"] for chunk in self.chunks for c in chunk.get("choices", ()) if c["finish_reason"]]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def models(self) -> set[str]:
        """Every `model` the answer names."""
        return {chunk["model"] for chunk in self.chunks} if self.is_stream else {self.json["model"]}

    @property
    def error(self) -> dict[str, Any]:
        """The error of an OpenAI-shaped body; fails when it has another shape."""
        body = self.json
        assert set(body) == {"error"}, body
        error: dict[str, Any] = body["error"]
        assert isinstance(error["message"], str), error
        assert error["message"], error
        assert {"message", "type", "code"} <= set(error), error
        return error

    @property
    def oip_error(self) -> str:
        """The error of an Open Inference Protocol body."""
        body = self.json
        assert set(body) == {"error"}, body
        assert isinstance(body["error"], str), body
        assert body["error"], body
        return str(body["error"])


class Client:
    """Asks one gateway. Times out after 20 s, so that what hangs is an error of the test that hangs."""

    def __init__(self, url: str, admin_url: str) -> None:
        self.url = url
        self.admin_url = admin_url
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=20)
        )

    async def aclose(self) -> None:
        await self.session.close()

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, *, admin: bool = False
    ) -> Got:
        """One request; `body` is bytes, or anything else as JSON."""
        if body is not None and not isinstance(body, bytes | AsyncIterator):
            body = json.dumps(body, ensure_ascii=False).encode()
        if isinstance(body, bytes) and len(body) > 1 << 19:
            body = io.BytesIO(body)  # aiohttp warns of large bytes
        base = self.admin_url if admin else self.url
        given = {**(JSON if body is not None else {}), **(headers or {})}
        async with self.session.request(method, base + path, data=body, headers=given, allow_redirects=False) as http:
            return Got(http.status, http.headers, await http.read())

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Got:
        return await self.send("GET", path, headers=headers)

    async def admin(self, path: str, headers: Mapping[str, str] | None = None) -> Got:
        return await self.send("GET", path, headers=headers, admin=True)

    async def chat(
        self, text: str = HARD, *, model: str = "auto", headers: Mapping[str, str] | None = None, **fields: Any
    ) -> Got:
        """A chat request of one user message."""
        return await self.send("POST", "/v1/chat/completions", question(text, model=model, **fields), headers)

    async def infer(
        self, values: list[float] | None = None, *, model: str = "recommend", headers: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Got:  # fmt: skip
        """A tensor request with one FP32 input `x`."""
        return await self.send("POST", f"/v2/models/{model}/infer", tensors(values or [1.0, 2.0], **fields), headers)

    async def why(self, got: Got) -> dict[str, Any]:
        """What the admin API tells about an answer's request."""
        told = await self.admin(f"/debug/requests/{got.said('request-id')}")
        assert told.status == 200, told.body
        found: dict[str, Any] = told.json
        return found

    async def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of a metric with these labels."""
        from prometheus_client.parser import text_string_to_metric_families

        text = (await self.admin("/metrics")).body.decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @asynccontextmanager
    async def streaming(
        self, text: str = HARD, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> AsyncIterator[Events]:
        """A chat stream to be read event by event; leaving the block closes the connection."""
        body = json.dumps(question(text, stream=True, **fields)).encode()
        given = {**JSON, **(headers or {})}
        async with self.session.post(f"{self.url}/v1/chat/completions", data=body, headers=given) as http:
            try:
                yield Events(http)
            finally:
                http.close()


class Events:
    """A stream as it arrives."""

    def __init__(self, http: aiohttp.ClientResponse) -> None:
        self.http = http
        self._buffer = b""

    async def next(self) -> str:
        """The next event's data; "" at the end of the body."""
        while b"\n\n" not in self._buffer:
            piece = await self.http.content.readany()
            if not piece:
                return ""
            self._buffer += piece
        event, _, self._buffer = self._buffer.partition(b"\n\n")
        return event.decode().removeprefix("data: ")

    async def rest(self) -> list[str]:
        events = []
        while event := await self.next():
            events.append(event)
        return events

    async def first_content(self) -> str:
        """The first piece of content."""
        while event := await self.next():
            for choice in json.loads(event).get("choices", ()):
                if choice["delta"].get("content"):
                    return str(choice["delta"]["content"])
        raise AssertionError("the stream ended without content")


def question(text: str = HARD, *, model: str = "auto", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def tensors(values: list[float], **fields: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [len(values)], "datatype": "FP32", "data": values}], **fields}


async def raw(url: str, request: bytes, *, within_s: float = 5.0) -> bytes:
    """Bytes in, bytes out, until the other side closes: for requests that no library would send."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(within_s):
            try:
                writer.write(request)
                await writer.drain()
                return await reader.read()
            except ConnectionError:
                return b""
    finally:
        writer.close()


async def open_raw(
    url: str, path: str, body: Any, headers: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A POST on a connection of its own, not waiting for an answer; the test decides when to leave."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n{headers}"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    return reader, writer
