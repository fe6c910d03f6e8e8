"""`gateway serve` as a process: start, readiness, logs, drain, exit codes."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import time
from pathlib import Path

import pytest

from backends.scripted_steps import Head, Step, Tokens, chunk
from tests.support.gateway import GatewayProcess, Serve, chat_policy, write_policies
from tests.support.gateway_client import HARD, Client, raw
from tests.support.redis_server import free_port
from tests.support.settable_upstream import SettableUpstream
from tests.support.waiting import eventually, until

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))
END = (Step(sse=chunk({}, "stop")), Step(sse="[DONE]"), Step(end=True))


async def test_it_starts_serves_logs_in_json_and_ends_with_zero(serve: Serve, up: SettableUpstream) -> None:
    began = time.monotonic()
    process = await serve()
    client = await process.ready()
    assert time.monotonic() - began < 10
    try:
        assert (await client.get("/readyz")).status == 200
        for stream in (False, True):
            assert (await client.chat(f"{HARD} {stream}", stream=stream)).said("rung") == "heavy"
            assert (await client.chat(f"{HARD} {stream}", stream=stream)).said("rung") == "hit-l1"
        quiet = len(process.lines)
        up.play(heavy="cut-after-40")
        await client.chat(f"{HARD} cut", stream=True)
        await until(lambda: process.events("request_cut"))
        (line,) = process.events("request_cut")
        assert {"request_id", "policy", "status", "reason", "ms", "level", "timestamp"} <= set(line)
        assert all(set(told) >= {"event", "level", "timestamp"} for told in map(json.loads, process.lines))
        assert quiet < 10  # answers that went well wrote no line
    finally:
        await client.aclose()
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert process.events("stopped")
    assert process.errors == ""


async def test_junk_from_clients_writes_few_lines_and_all_of_them_json(serve: Serve) -> None:
    process = await serve()
    client = await process.ready()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n"
    zipped = head % 9 + b"Content-Encoding: gzip\r\n\r\n" + b"not gzip!"
    cut_short = head % 20 + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"x" * 99)[:20]
    chunked = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    junk = (zipped, cut_short, chunked, b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"NONSENSE\r\n\r\n")
    try:
        for _ in range(30):
            for answer in await asyncio.gather(*(raw(process.url, request) for request in junk)):
                assert answer.split(b" ", 2)[1].startswith(b"4"), answer
        assert (await client.chat(HARD)).status == 200
    finally:
        await client.aclose()
    process.signal(signal.SIGTERM)
    assert await process.ended() == 0
    assert process.errors == ""
    told = [json.loads(line) for line in process.lines]
    assert 1 <= len(process.events("connection_refused")) <= 6
    assert len(told) < 20, told
    assert not [line for line in told if line["level"] in ("error", "critical")]


async def test_a_stream_under_way_is_finished_before_the_end(serve: Serve, up: SettableUpstream) -> None:
    """From SIGTERM on: not ready at once, no new work, the stream complete, exit 0."""
    process = await serve(drain="10s")
    client = await process.ready()
    up.play(heavy=(SSE, Step(tokens=Tokens(count=40, every_s=0.03)), *END))
    try:
        async with client.streaming(HARD) as events:
            await events.first_content()
            process.signal(signal.SIGTERM)
            began = time.monotonic()

            async def not_ready() -> bool:
                return (await client.get("/readyz")).status == 503

            await eventually(not_ready, within_s=0.5)
            assert "draining" in (await client.get("/readyz")).body.decode()
            assert (await client.get("/livez")).status == 200
            rest = await events.rest()
        assert rest[-1] == "[DONE]"
        assert '"finish_reason":"stop"' in rest[-2].replace(" ", "")
        assert len([event for event in rest if '"tok' in event]) == 39
        assert await process.ended() == 0
        assert time.monotonic() - began < 4
    finally:
        await client.aclose()


async def test_what_outlasts_the_drain_limit_is_cut(serve: Serve, up: SettableUpstream) -> None:
    process = await serve(drain="300ms")
    client = await process.ready()
    up.play(heavy=(SSE, Step(tokens=Tokens(count=1)), Step(hang=True)))
    try:
        async with client.streaming(HARD) as events:
            await events.first_content()
            process.signal(signal.SIGTERM)
            began = time.monotonic()
            assert await process.ended() == 0
            assert 0.2 < time.monotonic() - began < 5
        await until(lambda: up.last_seen("heavy").closed_at is not None)
    finally:
        await client.aclose()
    assert process.events("drain_limit_reached")
    assert "Traceback" not in process.output


async def test_interrupt_ends_it_as_well(serve: Serve) -> None:
    process = await serve()
    client = await process.ready()
    await client.aclose()
    process.signal(signal.SIGINT)
    assert await process.ended() == 0
    assert "Traceback" not in process.output


async def test_an_edit_of_the_running_gateway(serve: Serve, tmp_path: Path) -> None:
    process = await serve()
    client = await process.ready()
    try:
        write_policies(tmp_path / "policies", chat_policy(version=4))

        async def live() -> bool:
            return (await client.chat(HARD)).said("policy") == "support@4"

        await eventually(live, within_s=2.0)
        await until(lambda: process.events("policy_applied"))
        (tmp_path / "policies" / "support.yaml").write_text("policy: support\nversion: five\n")
        await until(lambda: process.events("policy_refused"), within_s=3.0)
        assert "support.yaml:" in process.events("policy_refused")[0]["reason"]
        assert (await client.chat(HARD)).said("policy") == "support@4"
    finally:
        await client.aclose()
    # A restart with the broken file serves the last good version, and says so.
    process.signal()
    assert await process.ended() == 0


async def test_a_restart_with_a_broken_file_serves_the_last_good_version(
    serve: Serve, up: SettableUpstream, tmp_path: Path
) -> None:
    from tests.support.gateway import environment, gateway_here, write_config

    config, env = write_config(tmp_path, up.url), environment(tmp_path)
    async with gateway_here(config, env):
        pass
    (tmp_path / "policies" / "support.yaml").write_text("policy: support\nversion: five\n")
    async with gateway_here(config, env) as gateway:
        assert (await gateway.client.chat(HARD)).said("policy") == "support@3"
        ready = await gateway.client.get("/readyz")
        assert ready.status == 200
        assert ready.json["degraded"] == ["policy files have problems: see the log and the admin API"]
        assert "support.yaml" in json.dumps((await gateway.client.admin("/notices")).json["worker-1"]["policies"])


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"backends": {"heavy": {"kind": "opneai"}}}, ("gateway.yaml:", "openai")),
        ({"listen": None, "listne": {"port": 0}}, ("gateway.yaml:", "did you mean `listen`?")),
        ({"drain": "5x"}, ("gateway.yaml:", "drain")),
        ({"admin": {"host": "0.0.0.0"}}, ("gateway.yaml:", "token_env")),
    ],
    ids=["value", "key", "unit", "open-admin"],
)
async def test_a_wrong_configuration_is_exit_two_with_the_place(
    serve: Serve, sections: dict[str, object], told: tuple[str, ...]
) -> None:
    process = await serve(**sections)
    assert await process.ended() == 2
    for words in told:
        assert words in process.errors
    assert "Traceback" not in process.output


async def test_wrong_policies_without_a_last_good_version_are_exit_two(serve: Serve) -> None:
    process = await serve(chat_policy(ladder=["heavy", "light", "heavy"], deadline="5x"))
    assert await process.ended() == 2
    assert "support.yaml:" in process.errors
    assert "circle" in process.errors
    assert "`deadline`" in process.errors  # all mistakes at once
    assert "Traceback" not in process.output


async def test_a_missing_environment_variable_is_exit_two(serve: Serve) -> None:
    process = await serve(env={"TEST_CREDENTIAL": ""})
    assert await process.ended() == 2
    assert "TEST_CREDENTIAL" in process.errors


@pytest.mark.parametrize("listener", ["listen", "admin"])
async def test_a_port_that_is_taken_is_said_in_a_sentence(serve: Serve, up: SettableUpstream, listener: str) -> None:
    process = await serve(**{listener: {"port": up.port}})
    assert await process.ended() == 1
    assert str(up.port) in process.output
    assert "Traceback" not in process.output


async def test_a_redis_that_is_away_takes_a_few_lines_not_thousands(serve: Serve) -> None:
    process = await serve(redis={"url": f"redis://127.0.0.1:{free_port()}/0"})
    client = await process.ready()
    try:
        for turn in range(10):
            got = await asyncio.gather(*(client.chat(f"{HARD} {turn} {number}") for number in range(50)))
            assert {answer.status for answer in got} == {200}
        assert len(process.lines) <= 10
        assert any("redis" in line for line in process.lines)
    finally:
        await client.aclose()


async def test_burst_of_new_streams_does_not_open_the_breaker(serve: Serve, up: SettableUpstream) -> None:
    """Two hundred clients at once, each with a connection of its own to a healthy backend, at the default connect limit."""
    process = await serve(backends={"heavy": {"timeouts": {"connect": "250ms"}}})
    client: Client = await process.ready()
    try:
        got = await asyncio.gather(*(client.chat(f"{HARD} {number}", stream=True) for number in range(200)))
        assert {answer.said("rung") for answer in got} == {"heavy"}
    finally:
        await client.aclose()


async def test_a_home_that_cannot_be_written_is_not_called_a_taken_port(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "no-folder").write_text("")
    process = await serve(env={"GATEWAY_HOME": str(tmp_path / "no-folder")})
    assert await process.ended() == 2
    assert "no-folder/state/cache.secret: the cache's secret cannot be kept here" in process.errors
    assert "listen" not in process.errors
    assert "Traceback" not in process.output


async def test_a_hang_up_during_the_start_waits_for_the_end_of_it(serve: Serve) -> None:
    """Whoever reloads a service right after it was started must not end it."""
    gateway = await serve()
    await until(lambda: _blocks(gateway, signal.SIGHUP), 5.0)
    gateway.signal(signal.SIGHUP)
    await gateway.ready()
    await until(lambda: gateway.events("rolling_restart_done"), 10.0)
    gateway.signal()
    assert await gateway.ended() == 0


def _blocks(gateway: GatewayProcess, number: signal.Signals) -> bool:
    status = Path(f"/proc/{gateway._process.pid}/status").read_text()
    (mask,) = re.findall(r"^SigBlk:\t(\w+)$", status, re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)
