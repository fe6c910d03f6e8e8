"""Who asks: an API key -> key id, tenant, class, and what it may do. Never taken from any other header.

    no key, from this machine     tenant `local`, class normal (unless the operator turned that off)
    no keys file, this machine    any key is as good as none, so that clients which insist on one work out of the box
    a key in the file             its entry, until it expires or is taken out
    anything else                 Unauthenticated

`reload()` is called when the file changes. A broken file changes nothing: the last good keys hold, and `problem` says why.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from pathlib import Path

from backends.api import Priority
from gateway.keys import ApiKey, digest, parse_keys
from policies.core.clock import Clock
from policies.core.errors import ConfigError, NotPermitted, Unauthenticated
from policies.language.yaml_reader import read_bytes

_CLASSES = {"vip": Priority.VIP, "normal": Priority.NORMAL, "batch": Priority.BATCH}
#: Ways in which known keys were presented. More than that is somebody playing with spaces; then we start anew.
_MAX_PRESENTED = 4_096
_MAX_HEADER = 1_024


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
    """The keys in force. Not shared between threads: `identify` and `reload` run on the event loop.

    path
        The keys file; None or a file that does not exist = no keys.
    anonymous
        May requests from this machine come without a key?
    """

    __slots__ = ("_anonymous", "_by_digest", "_clock", "_data", "_has_file", "_path", "_presented", "problem")

    def __init__(self, path: Path | None, clock: Clock, *, anonymous: bool = True) -> None:
        self._path = path
        self._clock = clock
        self._anonymous = anonymous
        self._has_file = False
        self._data: bytes | None = None
        self._by_digest: dict[str, _Entry] = {}
        #: The Authorization header as presented -> (identity, expiry), for keys that were found in the file.
        self._presented: dict[str, _Entry] = {}
        #: Why the file on disk is not in force; empty when it is.
        self.problem = ""

    @classmethod
    def load(cls, path: Path | None, clock: Clock, *, anonymous: bool = True) -> Identities:
        """Raises ConfigError when the file is there but cannot be used: at a start there is no last good one."""
        identities = cls(path, clock, anonymous=anonymous)
        identities.reload()
        if identities.problem:
            raise ConfigError(identities.problem.split("\n"))
        return identities

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

    def reload(self) -> bool:
        """Read the file again; True when other keys are in force afterwards. Never raises: see `problem`."""
        if self._path is None:
            return False
        if not self._path.exists():
            # Gone after it was there: an editor in between two steps, or a mistake. Revoke with an empty list instead.
            gone = (
                f"{self._path}: the file has gone; the keys that it held are still in force" if self._has_file else ""
            )
            self.problem = gone
            return False
        try:
            data = read_bytes(self._path)
            if data == self._data:
                self.problem = ""
                return False
            keys = parse_keys(data, self._path)
        except ConfigError as error:
            self.problem = "\n".join(error.problems)
            return False
        self._data, self._has_file, self.problem = data, True, ""
        self._by_digest = {key.sha256: (_identity(key), key.expires, key.sha256) for key in keys}
        self._presented = {}
        return True


def _identity(key: ApiKey) -> Identity:
    return Identity(
        key_id=key.id,
        tenant=key.tenant,
        priority=_CLASSES[key.priority],
        policies=None if key.policies is None else frozenset(key.policies),
    )
