"""Several workers: one gateway to everybody outside, whatever happens to its processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path

from backends.scripted_steps import Head, Step, Tokens, chunk
from tests.support.gateway import chat_policy, write_config, write_policies
from tests.support.gateway_client import EASY, HARD
from tests.support.steady_load import steady_load
from tests.support.waiting import eventually, until

SSE = Step(head=Head(headers={"content-type": "text/event-stream"}))
END = (Step(sse=chunk({}, "stop")), Step(sse="[DONE]"), Step(end=True))


async def places(client) -> dict[str, dict]:
    told = await client.admin("/workers")
    assert told.status == 200, told.body
    return {place["name"]: place for place in told.json["workers"]}


async def pids(client) -> dict[str, int]:
    return {name: place["pid"] for name, place in (await places(client)).items()}


async def all_serving(client, within_s: float = 15.0) -> dict[str, dict]:
    async def serving():
        found = await places(client)
        return found if all(place["state"] == "serving" for place in found.values()) else None

    return await eventually(serving, within_s)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A zombie is nobody's process any more.
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


async def test_requests_are_spread_and_found_whoever_served_them(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    workers = set()
    for number in range(40):
        got = await client.send(
            "POST", "/v1/chat/completions", {"model": "auto", "messages": [{"role": "user", "content": f"n {number}"}]},
            {"connection": "close"},
        )  # fmt: skip
        assert got.status == 200
        workers.add((await client.why(got))["worker"])
    assert workers == {"worker-1", "worker-2"}
    assert await client.metric("gateway_requests_total") == 40
    listed = (await client.admin("/debug/requests")).json["requests"]
    assert len(listed) == 40
    assert listed[0] == got.said("request-id")
    for path in ("/backends", "/policies", "/cache", "/models", "/notices"):
        assert set((await client.admin(path)).json) == {"worker-1", "worker-2"}, path


async def test_policies_change_everywhere_at_once(serve, tmp_path):
    gateway = await serve(workers=2)
    client = await gateway.ready()

    async def versions() -> set[str]:
        told = (await client.admin("/policies")).json
        return {plan["policy"] for plans in told.values() for plan in plans if plan["policy"].startswith("support")}

    assert await versions() == {"support@3"}
    write_policies(tmp_path / "policies", chat_policy(version=4))
    told = await client.send("POST", "/policies/reload", {}, admin=True)
    assert told.json["workers_behind"] == {}
    assert await versions() == {"support@4"}
    # A worker that starts later has what the others have, not what the file says: the file is broken now.
    (tmp_path / "policies" / "support.yaml").write_text("policy: [")
    os.kill((await pids(client))["worker-2"], signal.SIGKILL)
    await until(lambda: gateway.events("process_ended"), 5.0)
    await all_serving(client)
    assert await versions() == {"support@4"}

    async def flagged() -> bool:
        return "degraded" in (await client.get("/readyz")).json

    await eventually(flagged, 5.0)


async def test_keys_are_revoked_everywhere(serve, tmp_path):
    from gateway.keys import ApiKey, create_key, digest, revoke_key

    path = tmp_path / "keys.yaml"
    create_key(path, ApiKey(id="k", sha256=digest("gw-1"), tenant="shop", priority="normal"))
    gateway = await serve(workers=2, listen={"anonymous_loopback": False})
    client = await gateway.ready()
    header = {"authorization": "Bearer gw-1", "connection": "close"}

    async def statuses() -> set[int]:
        return {(await client.chat(EASY, headers=header)).status for _ in range(12)}

    assert await statuses() == {200}
    revoke_key(path, "k")

    async def refused() -> bool:
        return await statuses() == {401}

    await eventually(refused, 4.0)
    # Also with a worker that starts now, while the file is no good.
    path.write_text("keys: {")
    await until(lambda: gateway.events("keys_not_reloaded"), 4.0)
    os.kill((await pids(client))["worker-1"], signal.SIGKILL)
    await until(lambda: gateway.events("process_ended"), 5.0)
    await all_serving(client)
    assert await statuses() == {401}


async def test_a_killed_worker_costs_its_own_connections_only(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    victim = (await pids(client))["worker-1"]
    async with steady_load(gateway.url, clients=8) as load:
        await until(lambda: load.answered > 100, 10.0)
        os.kill(victim, signal.SIGKILL)
        before = load.answered
        await until(lambda: load.answered > before + 300, 15.0)
    # Eight clients, one connection each: at most those that the victim had.
    assert sum(load.failed.values()) <= 8, (load.failed, load.errors)
    assert set(load.failed) <= {"ServerDisconnectedError", "ClientOSError"}, load.errors
    found = await all_serving(client)
    assert found["worker-1"]["pid"] != victim
    assert (found["worker-1"]["ended"], found["worker-2"]["ended"]) == (1, 0)
    assert "SIGKILL" in gateway.events("process_ended")[0]["how"]
    # What it had counted is not lost, but for at most its last second.
    assert await client.metric("gateway_requests_total") >= 0.5 * load.answered
    assert await client.metric("gateway_process_ends_total", process="worker-1") == 1


async def test_a_frozen_worker_keeps_nobody_waiting_for_long(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    victim = (await pids(client))["worker-1"]
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: gateway.events("process_silent"), 5.0)
    # New connections are taken by the neighbour, all of them, also those that the kernel gives to the frozen one.
    async with asyncio.timeout(5.0):
        for number in range(20):
            got = await client.chat(f"{EASY} {number}", headers={"connection": "close"})
            assert got.status == 200
            assert (await client.why(got))["worker"] == "worker-2"
    # Commands say who did not take part; the others did.
    told = (await client.send("POST", "/policies/reload", {}, admin=True)).json
    assert told["problems"] == []
    await until(lambda: gateway.events("process_killed"), 8.0)
    found = await all_serving(client)
    assert found["worker-1"]["pid"] != victim


async def test_a_thawed_worker_has_what_it_missed(serve, tmp_path):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    victim = (await pids(client))["worker-2"]
    os.kill(victim, signal.SIGSTOP)
    await until(lambda: gateway.events("process_silent"), 5.0)
    write_policies(tmp_path / "policies", chat_policy(version=9))
    told = (await client.send("POST", "/policies/reload", {}, admin=True)).json
    assert list(told["workers_behind"]) == ["worker-2"]
    assert "not been heard of" in told["workers_behind"]["worker-2"]
    os.kill(victim, signal.SIGCONT)
    await until(lambda: gateway.events("process_is_back"), 5.0)

    async def agreed():
        plans = (await client.admin("/policies")).json
        return all("support@9" in [plan["policy"] for plan in told] for told in plans.values())

    await eventually(agreed, 5.0)
    assert (await pids(client))["worker-2"] == victim


async def test_a_rolling_restart_drops_nothing(serve, up):
    up.play(heavy=(SSE, Step(tokens=Tokens(count=100, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="20s")
    client = await gateway.ready()
    before = await pids(client)
    async with client.streaming(HARD, {"connection": "close"}) as stream:
        await stream.first_content()
        async with steady_load(gateway.url, clients=8) as load:
            await until(lambda: load.answered > 50, 10.0)
            gateway.signal(signal.SIGHUP)
            await until(lambda: gateway.events("rolling_restart_done"), 40.0)
            now = load.answered
            await until(lambda: load.answered > now + 50, 10.0)
        assert (await stream.rest())[-1] == "[DONE]"
    assert load.failed == {}, load.errors
    after = await pids(client)
    assert all(after[name] != before[name] for name in before)
    assert all(gone(pid) for pid in before.values())
    assert gateway.events("rolling_restart_done")[0]["problems"] == 0
    assert [place["ended"] for place in (await places(client)).values()] == [0, 0]


async def test_a_graceful_stop_drops_nothing(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    inside = [*(await pids(client)).values()]
    async with steady_load(gateway.url, clients=8) as load:
        await until(lambda: load.answered > 100, 10.0)
        gateway.signal(signal.SIGTERM)
        code = await gateway.ended()
        load.stop()
    assert code == 0
    # Once nobody listens clients are refused; no request that was let in has gone without its answer.
    assert set(load.failed) <= {"ClientConnectorError"}, (load.failed, load.errors[:3])
    assert all(gone(pid) for pid in inside)


async def test_streams_finish_within_the_drain_limit(serve, up):
    up.play(heavy=(SSE, Step(tokens=Tokens(count=40, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="5s")
    client = await gateway.ready()
    async with client.streaming(HARD) as stream:
        await stream.first_content()
        gateway.signal(signal.SIGTERM)

        async def not_ready() -> bool:
            return (await client.get("/readyz")).status == 503

        await eventually(not_ready, 0.5)
        events = await stream.rest()
    assert events[-1] == "[DONE]"
    assert await gateway.ended() == 0


async def test_without_a_supervisor_workers_finish_and_end(serve, up):
    up.play(heavy=(SSE, Step(tokens=Tokens(count=40, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="5s")
    client = await gateway.ready()
    workers = [*(await pids(client)).values()]
    async with client.streaming(HARD) as stream:
        await stream.first_content()
        gateway.signal(signal.SIGKILL)
        assert (await stream.rest())[-1] == "[DONE]"
    await until(lambda: all(gone(pid) for pid in workers), 8.0)


async def test_workers_go_on_while_the_supervisor_stands_still(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    gateway.signal(signal.SIGSTOP)
    try:
        for number in range(20):
            got = await client.chat(f"{EASY} {number}", headers={"connection": "close"})
            assert got.status == 200
    finally:
        gateway.signal(signal.SIGCONT)
    await all_serving(client)
    assert gateway.events("process_killed") == []


async def test_a_breaker_that_opens_here_is_open_there(serve, up):
    """Two workers: what one has found out, the other knows within a second."""
    up.play(heavy="status-500")
    breaker = {"consecutive": 3, "open": "30s", "open_max": "30s"}
    gateway = await serve(chat_policy(ladder=["heavy", "default"]), workers=2, backends={"heavy": {"breaker": breaker}})
    client = await gateway.ready()
    # One connection: one worker sees all the failures.
    for number in range(4):
        await client.chat(f"{HARD} {number}")

    async def guards() -> list[str]:
        told = (await client.admin("/backends")).json
        return [backend["guard"] for backends in told.values() for backend in backends if backend["name"] == "heavy"]

    async def open_everywhere() -> bool:
        return all("CircuitBreaker(OPEN" in guard for guard in await guards())

    await eventually(open_everywhere, 1.0)


async def test_a_hundred_policy_changes_in_a_minute_s_pace(serve, tmp_path):
    """Each change reaches all workers, and costs no request."""
    gateway = await serve(workers=2)
    client = await gateway.ready()
    async with steady_load(gateway.url, clients=4) as load:
        for version in range(4, 29):
            write_policies(tmp_path / "policies", chat_policy(version=version))
            told = (await client.send("POST", "/policies/reload", {}, admin=True)).json
            assert told["workers_behind"] == {}
            assert f"support@{version}" in told["policies"]
            plans = (await client.admin("/policies")).json
            seen = {plan["policy"] for told in plans.values() for plan in told if plan["policy"].startswith("support")}
            assert seen == {f"support@{version}"}
    assert load.failed == {}, load.errors
    assert load.answered > 20


async def test_one_log_line_is_one_line(serve):
    """Several processes write to one pipe; their lines never mix, and each says whose it is."""
    gateway = await serve(workers=2)
    await gateway.ready()
    gateway.signal(signal.SIGTERM)
    await gateway.ended()
    told = [json.loads(line) for line in gateway.lines]
    assert {line.get("worker") for line in told if line["event"] == "stopping"} == {None, "worker-1", "worker-2"}


async def test_a_second_gateway_cannot_share_the_port(serve, tmp_path):
    gateway = await serve(workers=2)
    await gateway.ready()
    port = int(gateway.url.rpartition(":")[2])
    other = await serve(workers=2, listen={"port": port})
    assert await other.ended() == 1
    assert re.search(rf"cannot listen on 127\.0\.0\.1:{port}: ", other.errors)


async def test_a_hang_up_takes_up_the_operator_s_file(serve, up, tmp_path):
    """One worker in the process, and several: the same."""
    for workers in (1, 2):
        up.play(heavy="ok")
        gateway = await serve(workers=workers)
        client = await gateway.ready()
        # No connection stays open that the restart would wait for.
        got = await client.chat(f"{HARD} {workers}", headers={"connection": "close"})
        assert got.said("served-by") == "heavy"
        write_config(tmp_path, up.url, workers=workers, limits={"body_bytes": "300B"}, admin={"port": 1})
        gateway.signal(signal.SIGHUP)
        await until(lambda: gateway.events("rolling_restart_done"), 20.0)
        assert "`admin` has changed" in gateway.events("configuration_needs_full_restart")[0]["note"]
        assert (await client.chat(f"{HARD} {workers}" + "x" * 300)).status == 413
        # A file with a mistake changes nothing, and says where the mistake is.
        (tmp_path / "gateway.yaml").write_text("workers: none\n")
        told = await client.send("POST", "/workers/restart", {}, admin=True)
        assert told.status == 500
        assert any("gateway.yaml:1:" in line for line in told.json["problems"]), told.json
        assert (await client.chat(HARD)).status == 200
        gateway.signal(signal.SIGTERM)
        assert await gateway.ended() == 0


async def test_one_worker_is_replaced_without_a_dropped_request_too(serve, up):
    gateway = await serve(workers=1)
    client = await gateway.ready()
    async with steady_load(gateway.url, clients=6) as load:
        await until(lambda: load.answered > 50, 10.0)
        gateway.signal(signal.SIGHUP)
        await until(lambda: gateway.events("rolling_restart_done"), 20.0)
        now = load.answered
        await until(lambda: load.answered > now + 50, 10.0)
    assert load.failed == {}, load.errors
    assert (await places(client))["worker-1"]["process"] == "worker-1.2"
    assert await client.metric("gateway_requests_total") >= load.answered


async def test_an_end_in_the_middle_of_a_restart_drops_nothing(serve, up):
    """Of one worker in the process, and of several: who is being replaced finishes what it has, and is still counted."""
    for workers in (1, 2):
        up.play(heavy=(SSE, Step(tokens=Tokens(count=100, every_s=0.03)), *END))
        gateway = await serve(workers=workers, drain="20s")
        client = await gateway.ready()
        # No connection stays open that the restart would wait for.
        assert (await client.chat(EASY, headers={"connection": "close"})).status == 200
        async with client.streaming(f"{HARD} {workers}", {"connection": "close"}) as stream:
            await stream.first_content()
            gateway.signal(signal.SIGHUP)

            async def leaving() -> bool:
                # Or is it the other one that has the stream?
                return any(place["leaving"] for place in (await places(client)).values())

            await eventually(leaving, 15.0)
            assert await client.metric("gateway_requests_total") == 1
            gateway.signal(signal.SIGTERM)
            assert (await stream.rest())[-1] == "[DONE]"
        assert await gateway.ended() == 0


async def test_a_crash_loop_is_reported_and_does_not_take_the_others(serve):
    gateway = await serve(workers=2)
    client = await gateway.ready()
    other = (await pids(client))["worker-2"]
    async with steady_load(gateway.url, clients=4) as load:
        while not gateway.events("crash_loop"):
            place = (await places(client))["worker-1"]
            if place["pid"] is not None:
                os.kill(place["pid"], signal.SIGKILL)
                await until(lambda pid=place["pid"]: any(e["pid"] == pid for e in gateway.events("process_ended")), 5.0)
            await asyncio.sleep(0.02)
        before = load.answered
        await until(lambda: load.answered > before + 100, 10.0)
    (told,) = gateway.events("crash_loop")
    assert (told["worker"], told["ended_times"]) == ("worker-1", 5)
    found = await places(client)
    assert found["worker-1"]["crash_loop"]
    assert found["worker-2"] | {"up_s": 0, "in_flight": 0} == {
        "name": "worker-2", "process": "worker-2", "state": "serving", "pid": other, "up_s": 0, "in_flight": 0, "ended": 0,
        "crash_loop": False, "leaving": [],
    }  # fmt: skip
    assert await client.metric("gateway_process_crash_loop", process="worker-1") == 1
    # Commands say who is not there, and the others do what they are told.
    told = (await client.send("POST", "/policies/reload", {}, admin=True)).json
    assert told["problems"] == []
    gateway.signal(signal.SIGTERM)
    assert await gateway.ended() == 0


async def test_an_admin_port_that_is_taken_ends_everything(serve):
    first = await serve(workers=1)
    await first.ready()
    port = int(first.admin_url.rpartition(":")[2])
    other = await serve(workers=2, admin={"port": port})
    assert await other.ended() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in other.errors
    assert "Traceback" not in other.output


async def test_an_end_asked_of_every_process_is_graceful(serve, up):
    """systemd signals all of them, and the supervisor signals its own once more: that is not twice the wish."""
    up.play(heavy=(SSE, Step(tokens=Tokens(count=80, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="5s")
    client = await gateway.ready()
    inside = [*(await pids(client)).values()]
    async with client.streaming(HARD) as stream:
        await stream.first_content()
        for pid in inside:
            os.kill(pid, signal.SIGTERM)
        gateway.signal(signal.SIGTERM)
        assert (await stream.rest())[-1] == "[DONE]"
    assert await gateway.ended() == 0


async def test_a_second_signal_no_longer_waits(serve, up):
    up.play(heavy=(SSE, Step(tokens=Tokens(count=2000, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="60s")
    client = await gateway.ready()
    async with client.streaming(HARD) as stream:
        await stream.first_content()
        gateway.signal(signal.SIGTERM)
        await until(lambda: gateway.events("stopping"))
        gateway.signal(signal.SIGTERM)
        async with asyncio.timeout(8.0):
            assert await gateway.ended() == 0


async def test_an_interrupt_from_the_terminal_is_graceful(serve, up):
    """Ctrl-C reaches the whole process group: only the supervisor acts on it."""
    up.play(heavy=(SSE, Step(tokens=Tokens(count=20, every_s=0.03)), *END))
    gateway = await serve(workers=2, drain="5s")
    client = await gateway.ready()
    inside = [*(await pids(client)).values()]
    async with client.streaming(HARD) as stream:
        await stream.first_content()
        for pid in inside:
            os.kill(pid, signal.SIGINT)
        gateway.signal(signal.SIGINT)
        assert (await stream.rest())[-1] == "[DONE]"
    assert await gateway.ended() == 0
    assert "Traceback" not in gateway.output
