"""The result cache: whole answers by entry key, with the rules of when one may be served and when one may be stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from backends.api import Answer
from cache.api import MISS, Item, Kind, Store
from cache.entry import Entry, EntryCodec, Header, owned, surface_of
from cache.memory import Memory
from cache.storable import refusal
from cache.tiered import Tiered
from policies.core.clock import Clock
from policies.language.schema import ResultCache as Life
from policies.rules.freshness import Freshness, freshness, may_be_early

__all__ = ["EntryMeta", "Found", "Freshness", "Header", "ResultCache"]

#: A ttl varies by this much to either side, so that entries stored together do not expire together.
_JITTER = 0.1

Tier = Literal["l1", "l2"]


class EntryMeta(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before it exists.

    `fingerprint` and `generation` (`ResultCache.generation`) are taken when its computation begins; a computation during
    which the model was switched is then not stored. `generation` None = only switches away from `fingerprint` count.
    """

    fingerprint: str
    rule: str
    backend: str
    first_choice: bool = True
    generation: int | None = None
    #: A fault was injected somewhere on the way.
    tainted: bool = False
    epochs: dict[str, int] = {}
    tags: tuple[str, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """A stored answer that may be served. `key`: the entry key under which it lay."""

    key: bytes
    answer: Answer
    header: Header
    age_s: float
    tier: Tier
    state: Freshness


class ResultCache:
    """Answers in memory and, when given, in a shared store. Look-ups never raise and never return what must not be served.

    `random` is uniform in [0, 1).
    """

    def __init__(
        self, capacity_bytes: int, clock: Clock, random: Callable[[], float], store: Store | None = None
    ) -> None:
        self._clock = clock
        self._random = random
        self._codec = EntryCodec()
        self._store = store
        self._tiered: Tiered[Entry] = Tiered(Kind.RESULT, Memory(capacity_bytes, clock), store, self._codec, clock)
        self._get_now = self._tiered.get_now
        self._switches = 0
        #: Fingerprint -> the switch that brought it in; -1 = switched away from.
        self._generations: dict[str, int] = {}
        self._counts = dict.fromkeys(
            ("hits_l1", "hits_l2", "misses", "stale_served", "dirty_reads", "fenced", "check_mismatches", "stored"), 0
        )
        self._refused: dict[str, int] = {}
        self._saved_ms = 0.0

    @property
    def has_l2(self) -> bool:
        return self._store is not None

    # ----------------------------------------------------------------------------------------------------- reading

    def lookup_now(self, keys: Sequence[bytes], check: bytes, life: Life, any_choice: bool = False) -> Found | None:
        """The best answer in memory that is fresh or to be refreshed; of equals the one with the earlier key.

        `any_choice`: also an answer that was not its decision's first choice (only for the rung of that very model).
        Without an L2 a None counts as a miss; with one, `lookup_l2` decides.
        """
        best: Found | None = None
        for key in keys:
            item = self._get_now(key)
            if item is not MISS:
                found = self._judge(key, item, check, life, "l1", any_choice=any_choice)
                if found is not None:
                    if found.state is Freshness.FRESH:
                        return self._hit(found)
                    if found.state is Freshness.REFRESH and best is None:
                        best = found
        if best is not None:
            return self._hit(best)
        if self._store is None:
            self._counts["misses"] += 1
        return None

    async def lookup_l2(
        self, keys: Sequence[bytes], check: bytes, life: Life, any_choice: bool = False
    ) -> Found | None:
        """The same in L2, for whoever has just found nothing in memory. One round trip."""
        best = await self._best_l2(keys, check, life, any_choice)
        if best is not None and best.state <= Freshness.REFRESH:
            return self._hit(best)
        self._counts["misses"] += 1
        return None

    async def lookup(self, keys: Sequence[bytes], check: bytes, life: Life, any_choice: bool = False) -> Found | None:
        """Memory, then L2."""
        found = self.lookup_now(keys, check, life, any_choice)
        if found is None and self._store is not None:
            found = await self.lookup_l2(keys, check, life, any_choice)
        return found

    async def stale(self, keys: Sequence[bytes], check: bytes, life: Life) -> Found | None:
        """For the ladder's stale rung: the youngest answer not beyond `life.stale`, in memory or else in L2."""
        here = (
            self._judge(key, item, check, life, "l1", any_choice=False)
            for key, item in ((key, self._get_now(key)) for key in keys)
            if item is not MISS
        )
        found = min((one for one in here if one is not None), key=lambda one: one.age_s, default=None)
        if found is None and self._store is not None:
            found = await self._best_l2(keys, check, life, any_choice=False)
        if found is not None:
            self._counts["stale_served"] += 1
            self._saved_ms += found.header.compute_ms
        return found

    async def _best_l2(self, keys: Sequence[bytes], check: bytes, life: Life, any_choice: bool) -> Found | None:
        switches = self._switches
        best: Found | None = None
        for key, item in zip(keys, await self._tiered.get_l2(keys), strict=True):
            if item is not MISS:
                if self._switches != switches and self._generations.get(item.value.header.fingerprint, 0) < 0:
                    # The model was switched while we waited: not wrong when asked for, but no longer to be served.
                    self._counts["fenced"] += 1
                    continue
                found = self._judge(key, item, check, life, "l2", any_choice=any_choice)
                if found is not None and (best is None or found.state < best.state):
                    best = found
        return best

    def _judge(
        self, key: bytes, item: Item[Entry], check: bytes, life: Life, tier: Tier, *, any_choice: bool
    ) -> Found | None:
        """`item` as something that may be served in some way, or None."""
        entry = item.value
        header = entry.header
        if entry.check != check:
            self._counts["check_mismatches"] += 1
            return None
        if not header.first_choice and not any_choice:
            return None
        if self._generations and self._generations.get(header.fingerprint, 0) < 0:
            self._counts["dirty_reads"] += 1
            return None
        age_s = max(0.0, header.life_s - (item.expires_at - self._clock.now()))
        delta_s = header.compute_ms / 1000.0
        if age_s <= life.stale and not may_be_early(age_s, life, header.jitter, delta_s):
            # Far from its expiry, as nearly always: no draw could make it anything but fresh.
            return Found(key, entry.answer, header, age_s, tier, Freshness.FRESH)
        state = freshness(age_s, life, jitter=header.jitter, delta_s=delta_s, u=1.0 - self._random())
        return None if state is Freshness.DEAD else Found(key, entry.answer, header, age_s, tier, state)

    def _hit(self, found: Found) -> Found:
        self._counts["hits_l1" if found.tier == "l1" else "hits_l2"] += 1
        self._saved_ms += found.header.compute_ms
        return found

    # ----------------------------------------------------------------------------------------------------- writing

    def put(self, key: bytes, check: bytes, answer: Answer, meta: EntryMeta, compute_ms: float, life: Life) -> bool:
        """Store `answer`, which took `compute_ms` to compute, for `life.stale` seconds. False = it must not be stored."""
        reason = self._refusal(key, answer, meta, life)
        if reason:
            self._refused[reason] = self._refused.get(reason, 0) + 1
            return False
        header = Header(
            fingerprint=meta.fingerprint,
            backend=meta.backend,
            rule=meta.rule,
            surface=surface_of(answer),
            # Redis counts in milliseconds; what memory and L2 say about an age must be the same.
            life_s=int(life.stale * 1000) / 1000,
            first_choice=meta.first_choice,
            compute_ms=compute_ms,
            jitter=1.0 + _JITTER * (2.0 * self._random() - 1.0),
            epochs=meta.epochs,
            tags=meta.tags,
        )
        self._tiered.put(key, Entry(check, header, owned(answer)), header.life_s)
        self._counts["stored"] += 1
        return True

    def _refusal(self, key: bytes, answer: Answer, meta: EntryMeta, life: Life) -> str:
        if meta.tainted:
            return "tainted"
        generation = self._generations.get(meta.fingerprint, 0)
        if generation < 0 or (meta.generation is not None and meta.generation != generation):
            return "model_switched"
        if life.stale <= 0:
            return "no_life"
        reason = refusal(answer)
        if not reason and not meta.first_choice:
            # The same model's answer, still fresh and readable by more: keep it.
            known = self._get_now(key)
            if known is not MISS and known.value.header.first_choice:
                age_s = known.value.header.life_s - (known.expires_at - self._clock.now())
                if freshness(age_s, life, jitter=known.value.header.jitter) is Freshness.FRESH:
                    return "better_known"
        return reason

    # ---------------------------------------------------------------------------------------------- model switches

    def generation(self, fingerprint: str) -> int:
        """The token a computation takes at its start (`EntryMeta.generation`)."""
        return self._generations.get(fingerprint, 0)

    def model_switched(self, before: str | None, after: str | None) -> None:
        """From now on `before` answers nothing and `after` does. Entries of `before` are out of reach at once."""
        self._switches += 1
        if before is not None and before != after:
            self._generations[before] = -1
        if after is not None:
            self._generations[after] = self._switches

    # ------------------------------------------------------------------------------------------------------- other

    async def delete(self, keys: Sequence[bytes]) -> None:
        await self._tiered.delete_many(keys)

    async def flush(self) -> None:
        """Wait until what was put before has reached L2 or failed to."""
        await self._tiered.flush()

    def stats(self) -> dict[str, float]:
        """Plain figures since the start: hits and misses by tier, refusals by reason, bytes, evictions, saved ms."""
        figures: dict[str, float] = {**self._counts, **self._tiered.stats(), "saved_ms": self._saved_ms}
        figures["unreadable"] = self._codec.unreadable
        figures["unwritable"] = self._codec.unwritable
        figures.update((f"refused_{reason}", count) for reason, count in self._refused.items())
        if self._store is not None:
            figures.update((f"l2_{name}", value) for name, value in self._store.stats().items())
        return figures

    async def aclose(self) -> None:
        """Write what waits for L2. The store itself is closed by whoever made it."""
        await self._tiered.aclose()
