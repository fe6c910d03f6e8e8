import json

from backends.api import BackendInfo, Role
from backends.scripted import Outcome, ScriptedBackend, chat
from backends.slot import Slot
from gateway.readiness import Readiness
from policies.core.clock import FakeClock
from policies.core.events import Observers


def slot(name: str) -> Slot:
    clock = FakeClock()
    info = BackendInfo(name=name, role=Role.LIGHT, model=name, fingerprint=name)

    async def load() -> ScriptedBackend:
        return ScriptedBackend(info, [Outcome(chat("x"))], clock)

    return Slot(info, load, clock, Observers())


def report(readiness: Readiness) -> tuple[bool, dict[str, object]]:
    ready, body = readiness.report()
    return ready, json.loads(body)


async def test_required_models_decide_and_optional_ones_are_named() -> None:
    readiness = Readiness()
    must, may = slot("must"), slot("may")
    readiness.watch(must, required=True)
    readiness.watch(may, required=False)
    readiness.warming = False
    ready, told = report(readiness)
    assert not ready
    assert "must" in str(told["reasons"])
    assert "may" in str(told["degraded"])
    await must.fill()
    ready, told = report(readiness)
    assert ready
    assert "may" in str(told["degraded"])
    await may.fill()
    assert report(readiness) == (True, {"status": "ready"})
    assert readiness.model_ready("may") is True
    assert readiness.model_ready("other") is None


def test_warming_draining_and_notes() -> None:
    readiness = Readiness()
    assert report(readiness) == (False, {"status": "not ready", "reasons": ["warming up"]})
    readiness.warming = False
    readiness.note(lambda: "Redis is away")
    readiness.policy_notices = ["chatbot.yaml:1:1: bad"]
    told = "policy files have problems: see the log and the admin API"
    assert report(readiness)[1]["degraded"] == ["Redis is away", told]
    readiness.draining = True
    assert report(readiness)[0] is False
