"""Which requests are the same request: the digest that every stored answer is found by.

    request digest R  = xxh3-128( prefix | scope | vary | request ), parts tagged by kind and length-prefixed
    check digest      = BLAKE2b-64 of the same bytes, keyed by the deployment's secret; stored and compared on every hit,
                        since xxh3 is fast but somebody may construct collisions
    entry key         = xxh3-128( R | fingerprint of the model that answers )

The prefix holds surface, policy, `cache.version`, route digest and the rules of the key themselves (so that changing
`bucket` or `drop` never meets answers keyed by the old rules). Never in: request id, `stream`, `stream_options`.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from backends.api import ChatRequest, EmbeddingsRequest, Request, Surface, Tensor, TensorRequest
from policies.language.schema import Cache

_encode = msgspec.json.Encoder(order="sorted").encode
_xxh3_128 = xxhash.xxh3_128_digest

#: How an answer travels, not what it says.
_TRANSPORT = {
    Surface.CHAT: frozenset({"stream", "stream_options"}),
    # Vectors are stored as numbers: in which form a client wants them is not part of the question.
    Surface.EMBEDDINGS: frozenset({"stream", "stream_options", "encoding_format"}),
    # Parameters of a tensor request.
    Surface.TENSOR: frozenset({"priority", "timeout", "binary_data_output"}),
}
#: Prefixes kept ready, one a tenant.
_PREFIXES_KEPT = 4096


class Scope(msgspec.Struct, frozen=True, gc=False):
    """Whose request it is. `user` None = the one that the request itself names, if any."""

    tenant: str
    user: str | None = None


class RequestDigest(msgspec.Struct, frozen=True, gc=False):
    """`key`: 16 bytes, the request digest. `check`: 8 bytes, what a stored answer must also carry."""

    key: bytes
    check: bytes


def entry_key(key: bytes, fingerprint: str) -> bytes:
    """16 bytes: where the answer of the model `fingerprint` to the request `key` is stored."""
    return _xxh3_128(key + fingerprint.encode())


def is_deterministic(request: Request) -> bool:
    """Does the same request get the same answer? Chat: temperature 0, or a seed. Tensors and embeddings: yes."""
    if isinstance(request, ChatRequest):
        body = request.body
        return body.get("temperature") == 0 or body.get("seed") is not None
    return True


class KeyRules:
    """A policy's rules for the keys of one kind of traffic, compiled once per policy version.

    `route_digest` stands for all that decides which model answers: classify section, routes, head files.
    """

    def __init__(self, cache: Cache, policy: str, route_digest: bytes, surface: Surface, secret: bytes) -> None:
        self._scope = cache.scope
        self._user_tensor = cache.user_tensor
        self._vary = cache.vary
        self._bucket = dict(cache.bucket)
        self._dropped = frozenset(cache.drop)
        self._skip = _TRANSPORT[surface] | frozenset(cache.ignore)
        if surface is not Surface.TENSOR:
            self._skip |= self._dropped
        # BLAKE2b takes keys of up to 64 bytes; a longer secret is digested first.
        self._secret = secret if len(secret) <= 64 else blake2b(secret).digest()
        self._check = blake2b(digest_size=8, key=self._secret)
        rules = (cache.scope, cache.user_tensor, cache.vary, sorted(cache.ignore), sorted(cache.drop), cache.bucket)
        version = str(cache.version).encode()
        self._common = _parts((b"gwc1", surface.encode(), policy.encode(), version, route_digest, _encode(rules)))
        self._prefixes: dict[str, bytes] = {}

    def digest(self, request: Request, scope: Scope, vary: Mapping[str, str]) -> RequestDigest | None:
        """The request's digests, or None when it may not be cached (user scope, and it names no user).

        `vary` holds the values of the policy's `vary` headers, by the name that the policy gives. A `scope` without a
        user gets the one that the request names. `request` is not changed.
        """
        prefix = self._prefixes.get(scope.tenant)
        if prefix is None:
            prefix = self._prefix(scope.tenant)
        if self._scope == "user":
            user = scope.user or self.user_of(request)
            if user is None:
                return None
            prefix += _part(user.encode())
        for name in self._vary:
            value = vary.get(name)
            prefix += b"-" if value is None else b"+" + _part(value.encode())
        whole = prefix + (self._tensors(request) if isinstance(request, TensorRequest) else self._json(request))
        check = self._check.copy()
        check.update(whole)
        return RequestDigest(_xxh3_128(whole), check.digest())

    def user_of(self, request: Request) -> str | None:
        """The user a request names, hashed: the policy's `user_tensor`, or `safety_identifier`, or `user`."""
        if isinstance(request, TensorRequest):
            tensors = (tensor for tensor in request.inputs if tensor.name == self._user_tensor)
            raw = next((_tensor_bytes(tensor) for tensor in tensors), b"")
        else:
            named = request.body.get("safety_identifier") or request.body.get("user")
            raw = named.encode() if isinstance(named, str) else b""
        return blake2b(raw, digest_size=16, key=self._secret).hexdigest() if raw else None

    def _prefix(self, tenant: str) -> bytes:
        prefix = self._common + (b"all" if self._scope == "all" else _part(tenant.encode()))
        if len(self._prefixes) >= _PREFIXES_KEPT:
            self._prefixes.clear()
        self._prefixes[tenant] = prefix
        return prefix

    def _json(self, request: ChatRequest | EmbeddingsRequest) -> bytes:
        skip = self._skip
        body = {name: value for name, value in request.body.items() if name not in skip}
        for name, width in self._bucket.items():
            if name in body:
                body[name] = _bucketed(body[name], width)
        return canonical_json(body)

    def _tensors(self, request: TensorRequest) -> bytes:
        parameters = {name: value for name, value in request.parameters.items() if name not in self._skip}
        parts = [request.model.encode(), canonical_json(parameters), _parts(name.encode() for name in request.outputs)]
        for tensor in sorted(request.inputs, key=lambda tensor: tensor.name):
            if tensor.name not in self._dropped:
                shape = ",".join(map(str, tensor.data.shape))
                width = self._bucket.get(tensor.name)
                content = _tensor_bytes(tensor) if width is None else _bucketed_tensor(tensor.data, width)
                parts += (tensor.name.encode(), tensor.datatype.encode(), shape.encode(), content)
        return _parts(parts)


def canonical_json(body: dict[str, Any]) -> bytes:
    """One form for all bodies that mean the same: keys sorted, no blanks, one way to escape, text and names in NFC.

    Numbers must have been normalised when `body` was read (`backends.json_codec.decode_object`).
    """
    encoded = _encode(body)
    if not encoded.isascii():
        text = encoded.decode()
        # `normalize` returns the same object when nothing changes. Escapes are ASCII, so no composition hides in them
        # except across an escaped character's end; walking the decoded strings gets that right.
        if unicodedata.normalize("NFC", text) is not text:
            encoded = _encode(_nfc(body))
    return encoded


def _nfc(value: Any) -> Any:
    if type(value) is str:
        return unicodedata.normalize("NFC", value)
    if type(value) is dict:
        return {_nfc(name): _nfc(member) for name, member in value.items()}
    if type(value) is list:
        return [_nfc(member) for member in value]
    return value


def _part(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def _parts(contents: Iterable[bytes]) -> bytes:
    """A list of parts as one string of bytes that no other list gives."""
    pieces: list[bytes] = []
    for content in contents:
        pieces += (len(content).to_bytes(4, "little"), content)
    return b"".join(pieces)


def _bucketed(value: Any, width: float) -> Any:
    """The index of the bucket that holds `value`; what is no number, or beyond exact doubles, stays as it is."""
    if type(value) is int and float(width).is_integer():
        return value // int(width)
    if type(value) is float or (type(value) is int and abs(value) < 1 << 53):
        index = value / width
        return math.floor(index) if math.isfinite(index) else value
    return value


def _bucketed_tensor(data: NDArray[Any], width: float) -> bytes:
    if data.dtype.kind not in "iuf":
        return _array_bytes(data)
    exact = data.dtype.kind in "iu" and float(width).is_integer() and width <= np.iinfo(data.dtype).max
    index = data // data.dtype.type(width) if exact else np.floor(data.astype(np.float64) / width) + 0.0
    return _array_bytes(index)


def _tensor_bytes(tensor: Tensor) -> bytes:
    return _array_bytes(tensor.data)


def _array_bytes(data: NDArray[Any]) -> bytes:
    """Row-major bytes in the machine's order; BYTES tensors as length-prefixed elements."""
    if data.dtype.kind == "O":
        return _parts(data.ravel().tolist())
    if not data.dtype.isnative:
        data = data.astype(data.dtype.newbyteorder("="))
    return data.tobytes()
