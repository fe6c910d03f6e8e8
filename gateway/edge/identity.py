"""Who asks: an API key -> key id, tenant, class, and what it may do. Never taken from any other header.

    no key, from this machine     tenant `local`, class normal (unless the operator turned that off)
    no keys file, this machine    any key is as good as none, so that clients which insist on one work out of the box
    a key in the file             its entry, until it expires or is taken out
    anything else                 Unauthenticated

The file is read by `gateway.control.key_store`; `take()` is called with what is in force whenever that changes.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path

from backends.api import Priority
from gateway.keys import ApiKey, digest, parse_keys
from policies.core.clock import Clock
from policies.core.errors import NotPermitted, Unauthenticated

_CLASSES = {"vip": Priority.VIP, "normal": Priority.NORMAL, "batch": Priority.BATCH}
#: Ways in which known keys were presented. More than that is somebody playing with spaces; then we start anew.
_MAX_PRESENTED = 4_096
_MAX_HEADER = 1_024
#: The data has been checked where it was read; no message will name a file.
_NOWHERE = Path("keys")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is. `policies` None = may use all."""

    key_id: str
    tenant: str
    priority: Priority
    policies: frozenset[str] | None = None

    def require_policy(self, policy: str) -> None:
        """Raises NotPermitted unless this key may use `policy`."""
        if self.policies is not None and policy not in self.policies:
            raise NotPermitted(f"the API key {self.key_id!r} may not use the policy {policy!r}")


LOCAL = Identity(key_id="", tenant="local", priority=Priority.NORMAL)
#: Identity, expiry (seconds since 1970 UTC, None = never), digest of the key.
_Entry = tuple[Identity, float | None, str]
_LOCAL_ENTRY: _Entry = (LOCAL, None, "")


class Identities:
    """The keys in force; none until `take` is called. Not shared between threads.

    anonymous
        May requests from this machine come without a key?
    """

    __slots__ = ("_anonymous", "_by_digest", "_clock", "_has_file", "_presented", "problem")

    def __init__(self, clock: Clock, *, anonymous: bool = True) -> None:
        self._clock = clock
        self._anonymous = anonymous
        self._has_file = False
        self._by_digest: dict[str, _Entry] = {}
        #: The Authorization header as presented -> (identity, expiry), for keys that were found in the file.
        self._presented: dict[str, _Entry] = {}
        #: Why the file on disk is not in force; empty when it is.
        self.problem = ""

    def __len__(self) -> int:
        return len(self._by_digest)

    def identify(self, authorization: str | None, loopback: bool) -> Identity:
        """Whose request this is.

        authorization
            The header's value, `Bearer KEY`.
        loopback
            Does the connection come from this machine?

        Raises Unauthenticated.
        """
        if authorization is None:
            if loopback and self._anonymous:
                return LOCAL
            raise Unauthenticated("an API key is needed: send it as `Authorization: Bearer KEY`")
        known = self._presented.get(authorization)
        if known is None:
            known = self._look_up(authorization, loopback)
        identity, expires, _ = known
        if expires is not None and expires <= self._clock.wall():
            raise Unauthenticated("this API key has expired")
        return identity

    def _look_up(self, authorization: str, loopback: bool) -> _Entry:
        if not self._has_file and loopback and self._anonymous:
            return _LOCAL_ENTRY
        scheme, _, key = authorization[:_MAX_HEADER].strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthenticated("the Authorization header is not of the form `Bearer KEY`")
        presented = digest(key)
        found = self._by_digest.get(presented)
        # Whatever the look-up's timing could tell is about a digest, from which no key can be guessed; the comparison
        # that decides takes the same time for every digest.
        if found is None or not hmac.compare_digest(presented, found[2]):
            raise Unauthenticated("this API key is not known here; it may have been revoked")
        if len(self._presented) >= _MAX_PRESENTED:
            self._presented.clear()
        self._presented[authorization] = found
        return found

    def take(self, data: bytes | None, problem: str = "") -> None:
        """Put the keys of `data` (a keys file that is known to be good; None = there is no file) in force. `problem`: why
        the file on disk is another one."""
        self.problem = problem
        self._has_file = data is not None
        keys = parse_keys(data, _NOWHERE) if data is not None else ()
        self._by_digest = {key.sha256: (_identity(key), key.expires, key.sha256) for key in keys}
        self._presented = {}


def _identity(key: ApiKey) -> Identity:
    return Identity(
        key_id=key.id,
        tenant=key.tenant,
        priority=_CLASSES[key.priority],
        policies=None if key.policies is None else frozenset(key.policies),
    )
