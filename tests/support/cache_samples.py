"""Answers, metas and caches that the cache's tests share."""

from __future__ import annotations

import json
from typing import Any

from backends.api import ChatAnswer, ChatRequest, Surface, Usage
from cache.key import KeyRules, RequestDigest, Scope
from cache.result import EntryMeta
from policies.language.schema import Cache, ResultCache

SECRET = b"a deployment's secret"
LIFE = ResultCache(ttl=600.0, swr=60.0, stale=3600.0)
TENANT = Scope("acme")


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "auto", "messages": [{"role": "user", "content": "What is a heron?"}], **fields}


def rules(surface: Surface = Surface.CHAT, policy: str = "chatbot", route: bytes = b"route", **cache: Any) -> KeyRules:
    return KeyRules(Cache(**cache), policy, route, surface, SECRET)


def digest_of(body: dict[str, Any], whose: Scope = TENANT, **cache: Any) -> RequestDigest:
    digest = rules(**cache).digest(ChatRequest(body), whose, {})
    assert digest is not None
    return digest


def chat_answer(text: str = "A wading bird.", finish_reason: str = "stop", **message: Any) -> ChatAnswer:
    body = {
        "object": "chat.completion",
        "choices": [
            {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish_reason, "index": 0}
        ],
    }
    return ChatAnswer(json.dumps(body).encode(), "heavy-model", finish_reason, Usage(7, 5), "fp_upstream")


def meta(fingerprint: str = "F1", **fields: Any) -> EntryMeta:
    return EntryMeta(fingerprint=fingerprint, rule="hard", backend="heavy", **fields)
