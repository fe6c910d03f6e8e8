"""Two requests have one key exactly when they ask the same."""

import json
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.api import ChatRequest, EmbeddingsRequest, Surface, Tensor, TensorRequest
from backends.json_codec import decode_object
from cache.key import Scope, canonical_json, entry_key, is_deterministic
from tests.support.cache_samples import TENANT, chat_body, digest_of, rules

# Every documented field that can change an answer, with two values each.
AFFECTING: dict[str, tuple[Any, Any]] = {
    "model": ("auto", "support-bot"),
    "messages": ([{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]),
    "temperature": (0, 0.1),
    "top_p": (1, 0.9),
    "seed": (1, 2),
    "max_tokens": (10, 11),
    "max_completion_tokens": (10, 11),
    "n": (1, 2),
    "stop": ("x", ["x", "y"]),
    "tools": ([{"type": "function", "function": {"name": "f"}}], [{"type": "function", "function": {"name": "g"}}]),
    "tool_choice": ("auto", "required"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "reasoning_effort": ("low", "high"),
    "logit_bias": ({"1": 1}, {"1": 2}),
    "logprobs": (True, False),
    "top_logprobs": (1, 2),
    "presence_penalty": (0, 1),
    "frequency_penalty": (0, 1),
    "modalities": (["text"], ["text", "audio"]),
    "prediction": ({"type": "content", "content": "a"}, {"type": "content", "content": "b"}),
    "verbosity": ("low", "high"),
    "service_tier": ("auto", "flex"),
    "a_field_we_do_not_know": (1, 2),
}


@pytest.mark.parametrize("field", AFFECTING)
def test_each_field_that_affects_the_answer_is_in_the_key(field: str) -> None:
    first, second = AFFECTING[field]
    keys = {digest_of(chat_body(**{field: value})).key for value in (first, second)}
    if field not in chat_body():
        keys.add(digest_of(chat_body()).key)
        assert len(keys) == 3
    assert len(keys) >= 2


def test_ignored_and_transport_fields_are_not_in_the_key() -> None:
    plain = digest_of(chat_body())
    noisy = chat_body(
        user="u1", safety_identifier="s", metadata={"a": 1}, store=True, stream=True, stream_options={"x": 1}
    )
    assert digest_of(noisy) == plain
    assert (
        digest_of(chat_body(verbosity="low"), ignore=("verbosity",)).key
        == digest_of(chat_body(), ignore=("verbosity",)).key
    )


def test_the_request_is_left_as_it_was() -> None:
    body = chat_body(stream=True, user="u", age=31)
    before = json.dumps(body)
    digest_of(body, bucket={"age": 10.0})
    assert json.dumps(body) == before


def test_a_request_id_is_no_part_of_the_key() -> None:
    one, two = (rules().digest(ChatRequest(chat_body(), id=name), TENANT, {}) for name in ("r-1", "r-2"))
    assert one == two


@pytest.mark.parametrize("text", ['{"t":"e\u0301"}', '{"t":"\\n\u0303"}', '{"e\u0301":1,"f":2}', '{"t":"\u2126"}'])
def test_unicode_forms_and_escapes_are_one(text: str) -> None:
    decoded = json.loads(text)
    nfc = {unicodedata.normalize("NFC", k): unicodedata.normalize("NFC", v) if isinstance(v, str) else v
           for k, v in decoded.items()}  # fmt: skip
    escaped = json.dumps(nfc, ensure_ascii=True).encode()
    assert canonical_json(decode_object(text.encode())) == canonical_json(decode_object(escaped))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"t":"1"}', '{"t":1}'),
        ('{"t":true}', '{"t":1}'),
        ('{"t":null}', "{}"),
        ('{"t":[1,2]}', '{"t":[2,1]}'),
        ('{"t":""}', '{"t":null}'),
        ('{"t":0.1}', '{"t":0.2}'),
        ('{"a":"b"}', '{"b":"a"}'),
    ],
)
def test_what_differs_in_meaning_differs(one: str, other: str) -> None:
    assert canonical_json(decode_object(one.encode())) != canonical_json(decode_object(other.encode()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
bodies = st.dictionaries(st.text(min_size=1, max_size=8), json_values, max_size=6)


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


def _nfd(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFD", value)
    if isinstance(value, dict):
        return {_nfd(key): _nfd(member) for key, member in value.items()}
    return [_nfd(item) for item in value] if isinstance(value, list) else value


@given(bodies)
def test_order_blanks_escapes_number_and_unicode_form_do_not_change_the_key(body: dict[str, Any]) -> None:
    plain = decode_object(json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    key = digest_of(plain)
    for form in (
        json.dumps(_reversed(body), indent=2, ensure_ascii=False),
        json.dumps(body, ensure_ascii=True),
    ):
        assert digest_of(decode_object(form.encode())) == key
    # Names that are one in NFC may collide; then the body says two things and either will do.
    if len(json.dumps(_nfd(body))) == len(json.dumps(_nfd(_reversed(body)))) and _names_stay_apart(body):
        assert digest_of(decode_object(json.dumps(_nfd(body), ensure_ascii=False).encode())) == key


def _names_stay_apart(value: Any) -> bool:
    if isinstance(value, dict):
        apart = len({unicodedata.normalize("NFC", key) for key in value}) == len(value)
        return apart and all(map(_names_stay_apart, value.values()))
    return all(map(_names_stay_apart, value)) if isinstance(value, list) else True


def _meaning(body: dict[str, Any]) -> Any:
    ignored = {"user", "safety_identifier", "metadata", "store", "stream", "stream_options"}
    return json.loads(canonical_json({name: value for name, value in body.items() if name not in ignored}))


@given(bodies, bodies)
def test_bodies_that_mean_different_things_have_different_keys(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (decode_object(json.dumps(body).encode()) for body in (one, other))
    same = json.dumps(_meaning(first), sort_keys=True) == json.dumps(_meaning(second), sort_keys=True)
    assert (digest_of(first) == digest_of(second)) == same


def test_scopes() -> None:
    body = chat_body(user="u1")
    a, b = Scope("acme"), Scope("umbrella")
    assert digest_of(body, a) != digest_of(body, b)
    assert digest_of(body, a, scope="all") == digest_of(body, b, scope="all")
    by_user = rules(scope="user")
    first = by_user.digest(ChatRequest(body), a, {})
    assert first is not None
    assert first != by_user.digest(ChatRequest(chat_body(user="u2")), a, {})
    assert first == by_user.digest(ChatRequest(chat_body(safety_identifier="u1")), a, {})
    assert first != by_user.digest(ChatRequest(body), b, {})
    assert by_user.digest(ChatRequest(chat_body()), a, {}) is None
    assert by_user.digest(ChatRequest(chat_body()), Scope("acme", "u9"), {}) is not None


def test_the_user_of_tensor_traffic_is_a_named_tensor() -> None:
    by_user = rules(Surface.TENSOR, scope="user", user_tensor="user_id")

    def ask(user: int | None) -> TensorRequest:
        inputs = [Tensor("x", "FP32", np.zeros((1, 2), np.float32))]
        if user is not None:
            inputs.append(Tensor("user_id", "INT64", np.array([user])))
        return TensorRequest("rec", inputs)

    assert by_user.digest(ask(None), TENANT, {}) is None
    assert by_user.digest(ask(1), TENANT, {}) != by_user.digest(ask(2), TENANT, {})


def test_what_else_keeps_answers_apart() -> None:
    request = ChatRequest(chat_body())
    digests = [
        made.digest(request, TENANT, {})
        for made in (
            rules(),
            rules(policy="other"),
            rules(route=b"other"),
            rules(version=2),
            rules(drop=("x",)),
            rules(bucket={"x": 2.0}),
            rules(Surface.EMBEDDINGS),
        )
    ]
    assert len({digest.key for digest in digests if digest}) == len(digests)


def test_vary_headers() -> None:
    varying, request = rules(vary=("Accept-Language",)), ChatRequest(chat_body())
    values: list[dict[str, str]] = [{}, {"Accept-Language": ""}, {"Accept-Language": "de"}, {"Accept-Language": "en"}]
    digests = [varying.digest(request, TENANT, value) for value in values]
    assert len({digest.key for digest in digests if digest}) == 4
    assert rules().digest(request, TENANT, {"Accept-Language": "de"}) == rules().digest(request, TENANT, {})


def test_buckets_and_dropped_fields() -> None:
    def key(age: float) -> bytes:
        return digest_of(chat_body(age=age, mood="x"), bucket={"age": 10.0}).key

    assert key(31) == key(38) == key(30) == key(31.5)
    assert key(29) != key(31)
    assert key(-1) != key(1)
    assert digest_of(chat_body(age="31"), bucket={"age": 10.0}) != digest_of(chat_body(age=31), bucket={"age": 10.0})
    assert digest_of(chat_body(mood="x"), drop=("mood",)) == digest_of(chat_body(mood="y"), drop=("mood",))


@given(st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.text()))
def test_a_bucket_takes_any_value(value: Any) -> None:
    for width in (10.0, 0.3, 1e-9):
        assert digest_of(chat_body(age=value), bucket={"age": width})


def test_check_digest_needs_the_secret() -> None:
    from cache.key import KeyRules
    from policies.language.schema import Cache

    digests = [
        KeyRules(Cache(), "p", b"r", Surface.CHAT, secret).digest(ChatRequest(chat_body()), TENANT, {})
        for secret in (b"one", b"two", b"x" * 200)
    ]
    assert len({digest.key for digest in digests if digest}) == 1
    assert len({digest.check for digest in digests if digest}) == 3
    assert all(digest and len(digest.key) == 16 and len(digest.check) == 8 for digest in digests)


def test_entry_keys_differ_by_model() -> None:
    key = digest_of(chat_body()).key
    assert entry_key(key, "F1") != entry_key(key, "F2")
    assert entry_key(key, "F1") == entry_key(key, "F1")
    assert len(entry_key(key, "F1")) == 16


# ------------------------------------------------------------------------------------------------------------ tensors


def _tensors(*inputs: Tensor, model: str = "m", outputs: tuple[str, ...] = (), **parameters: Any) -> bytes:
    digest = rules(Surface.TENSOR).digest(TensorRequest(model, list(inputs), outputs, parameters), TENANT, {})
    assert digest is not None
    return digest.key


def test_tensor_requests_that_differ_in_anything_differ() -> None:
    ones = np.arange(6, dtype=np.int32)
    keys = [
        _tensors(Tensor("x", "INT32", ones.reshape(2, 3))),
        _tensors(Tensor("x", "INT32", ones.reshape(3, 2))),
        _tensors(Tensor("x", "FP32", ones.reshape(2, 3).view(np.float32))),
        _tensors(Tensor("y", "INT32", ones.reshape(2, 3))),
        _tensors(Tensor("x", "INT32", ones.reshape(2, 3)), model="n"),
        _tensors(Tensor("x", "INT32", ones.reshape(2, 3)), outputs=("a",)),
        _tensors(Tensor("x", "INT32", ones.reshape(2, 3)), outputs=("b",)),
        _tensors(Tensor("x", "INT32", ones.reshape(2, 3)), sequence_id=1),
        _tensors(Tensor("x", "INT32", ones[:0].reshape(0, 3))),
        _tensors(),
        _tensors(Tensor("x", "BYTES", np.array([b"ab", b"c"], dtype=object))),
        _tensors(Tensor("x", "BYTES", np.array([b"a", b"bc"], dtype=object))),
    ]
    assert len(set(keys)) == len(keys)


def test_what_does_not_matter_to_a_tensor_request() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    x, y = Tensor("x", "FP32", data), Tensor("y", "FP32", data + 1)
    plain = _tensors(x, y)
    assert _tensors(y, x) == plain
    assert _tensors(x, y, priority=1, timeout=5, binary_data_output=True) == plain
    assert _tensors(Tensor("x", "FP32", np.asfortranarray(data)), y) == plain
    assert _tensors(Tensor("x", "FP32", data.astype(">f4")), y) == plain


def test_buckets_and_drops_of_tensors() -> None:
    compiled = rules(Surface.TENSOR, bucket={"age": 10.0, "score": 0.5}, drop=("noise",))

    def key(age: int, score: float = 0.6, noise: int = 0) -> bytes:
        inputs = [
            Tensor("age", "INT64", np.array([age])),
            Tensor("score", "FP32", np.array([score], np.float32)),
            Tensor("noise", "INT64", np.array([noise])),
        ]
        digest = compiled.digest(TensorRequest("m", inputs), TENANT, {})
        assert digest is not None
        return digest.key

    assert key(31) == key(38, 0.9, 5)
    assert key(29) != key(31)
    assert key(31, 0.4) != key(31, 0.6)
    assert key(31, float("nan")) == key(31, float("nan"))


def test_how_vectors_travel_is_no_part_of_an_embeddings_key() -> None:
    compiled = rules(Surface.EMBEDDINGS)

    def key(**fields: Any) -> bytes:
        digest = compiled.digest(EmbeddingsRequest({"model": "e", "input": "a", **fields}, ["a"]), TENANT, {})
        assert digest is not None
        return digest.key

    assert key() == key(encoding_format="base64")
    assert key() != key(dimensions=8)


def test_which_requests_are_deterministic() -> None:
    assert is_deterministic(ChatRequest(chat_body(temperature=0)))
    assert is_deterministic(ChatRequest(chat_body(seed=0, temperature=1)))
    assert not is_deterministic(ChatRequest(chat_body()))
    assert not is_deterministic(ChatRequest(chat_body(temperature=0.7, seed=None)))
    assert is_deterministic(TensorRequest("m", []))
    assert is_deterministic(EmbeddingsRequest({}, []))
