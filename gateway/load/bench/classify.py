"""What deciding costs: all cheap signals and the route of the shipped chat policy, warm, in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

from backends.api import BackendInfo, ChatRequest, Role
from gateway.load.bench.goals import Goal
from policies.language.schema import Policy
from routing.classifier import Classifier
from routing.heads import Heads
from routing.router import Router
from routing.view import RequestView

#: About 200 tokens each.
_ENGLISH = "Our two warehouses report different stock for the same article since the move to the new system. " * 9
_CHINESE = "自从换了新系统之后两个仓库对同一件商品报出的库存数量一直不一样。" * 7
_LIMIT_US = 100.0
_ROUNDS = 2_000


def classify_goals(policy: Policy) -> list[Goal]:
    """p50 in microseconds for a prompt of 200 tokens in English and in Chinese, with the policy's own signals and rules."""
    backends: Mapping[str, BackendInfo] = {
        role.value: BackendInfo(name=role.value, role=role, model=role.value, fingerprint=role.value) for role in Role
    }
    classifier, router = Classifier(policy, Heads.shipped()), Router(policy, backends)
    return [
        Goal(f"classify_{name}_us", _median_us(classifier, router, text), _LIMIT_US, at_least=False)
        for name, text in (("english", _ENGLISH), ("chinese", _CHINESE))
    ]


def _median_us(classifier: Classifier, router: Router, text: str) -> float:
    spent = []
    for number in range(_ROUNDS):
        request = ChatRequest({"messages": [{"role": "user", "content": f"{text} {number}"}]})
        began = time.perf_counter()
        router.route(classifier.read(RequestView(request)))
        spent.append(time.perf_counter() - began)
    return round(statistics.median(spent) * 1e6, 1)
