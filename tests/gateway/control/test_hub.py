from typing import Any

from gateway.control.hub import InProcessHub, WorkerPort


def hub_with(*names: str) -> tuple[InProcessHub, list[WorkerPort]]:
    hub, ports = InProcessHub(), [WorkerPort(name) for name in names]
    for port in ports:
        hub.attach(port)
    return hub, ports


async def test_a_command_reaches_every_worker_and_says_which_failed() -> None:
    hub, ports = hub_with("a", "b", "c")

    async def good(payload: dict[str, Any]) -> Any:
        return payload["n"] + 1

    async def bad(payload: dict[str, Any]) -> Any:
        raise ValueError("no room")

    ports[0].commands["add"] = good
    ports[1].commands["add"] = bad
    acks = {ack.worker: ack for ack in await hub.command("add", {"n": 1})}
    assert acks["a"].value == 2
    assert acks["a"].error == ""
    assert "no room" in acks["b"].error
    assert "does not know" in acks["c"].error


async def test_payloads_are_what_a_socket_could_carry() -> None:
    hub, (port,) = hub_with("a")

    async def echo(payload: dict[str, Any]) -> Any:
        return {"type": type(payload["pair"]).__name__}

    port.queries["echo"] = echo
    (ack,) = await hub.query("echo", {"pair": (1, 2)})
    assert ack.value == {"type": "list"}


async def test_what_workers_publish_is_heard() -> None:
    hub, (port,) = hub_with("a")
    heard: list[tuple[str, str, dict[str, Any]]] = []
    hub.subscribe(lambda worker, topic, payload: heard.append((worker, topic, payload)))
    port.publish("sample", {"n": 1})
    assert heard == [("a", "sample", {"n": 1})]
