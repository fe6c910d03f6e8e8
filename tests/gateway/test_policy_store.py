"""Policies kept up with their folder: last good versions, conflicts, half-written files, restarts, notifications."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.control.policy_store import SETTLE_S, PolicyStore, keep_folder
from gateway.control.watch import Watcher
from gateway.keys import ApiKey, create_key, digest, revoke_key
from policies.core.clock import FakeClock, SystemClock
from policies.core.errors import ConfigError, Unauthenticated
from policies.language.builtin import embeddings_policy
from policies.language.semantics import Known, KnownBackend
from tests.support.file_keys import FileKeys

KNOWN = Known(backends={"light": KnownBackend("light", frozenset({"chat"}))})
BUILTIN = (embeddings_policy("embed", []),)


def text(name: str, alias: str, version: int = 1) -> str:
    return f"policy: {name}\nversion: {version}\nmatch: {{aliases: [{alias}]}}\nroutes: [{{name: r, to: light}}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "a.yaml").write_text(text("a", "auto"))
    (folder / "b.yaml").write_text(text("b", "chat"))
    return folder


def opened(folder: Path, clock: FakeClock | None = None, keep: Path | None = None) -> PolicyStore:
    return PolicyStore.open(folder, KNOWN, clock or FakeClock(), BUILTIN, keep)


def versions(store: PolicyStore) -> dict[str, int]:
    return {policy.policy: policy.version for policy in store.current.policies if policy.policy != "embeddings"}


def told(store: PolicyStore) -> list[tuple[str, int, str]]:
    return [(event.policy, event.version, event.outcome) for event in store.reload()]


def test_an_edit_is_a_new_set(folder):
    store = opened(folder)
    before = store.current
    assert told(store) == [] and store.current is before
    (folder / "a.yaml").write_text(text("a", "auto", 2))
    assert told(store) == [("a", 2, "applied")]
    assert versions(store) == {"a": 2, "b": 1}
    assert before.by_name["a"].version == 1  # requests under way keep theirs
    assert store.current.resolve("embed", "embeddings", "t") is BUILTIN[0]


def test_a_bad_edit_keeps_the_last_good_version_of_that_file_only(folder):
    store = opened(folder)
    (folder / "a.yaml").write_text(text("a", "auto", 2) + "typpo: 1\n")
    (folder / "b.yaml").write_text(text("b", "chat", 2))
    events = store.reload()
    assert [(event.policy, event.version, event.outcome) for event in events] == [
        ("b", 2, "applied"),
        ("a", 1, "refused"),
    ]
    assert "a.yaml:5:1: unknown key `typpo`" in events[1].reason
    assert versions(store) == {"a": 1, "b": 2}
    assert list(store.problems) == ["a.yaml"] and "typpo" in store.notices()[0]
    assert told(store) == []  # said once
    (folder / "a.yaml").write_text(text("a", "auto", 3))
    assert told(store) == [("a", 3, "applied")]
    assert store.notices() == []


def test_taking_a_bad_edit_back_clears_the_complaint(folder):
    store = opened(folder)
    (folder / "a.yaml").write_text("[\n")
    assert told(store) == [("a", 1, "refused")]
    (folder / "a.yaml").write_text(text("a", "auto"))
    assert told(store) == [] and store.notices() == []


def test_files_come_go_and_are_renamed(folder):
    store = opened(folder)
    (folder / "c.yaml").write_text(text("c", "new"))
    assert told(store) == [("c", 1, "applied")]
    (folder / "c.yaml").rename(folder / "d.yaml")
    store.reload()
    assert versions(store) == {"a": 1, "b": 1, "c": 1}
    (folder / "d.yaml").unlink()
    assert told(store) == [("c", 1, "applied")]
    assert versions(store) == {"a": 1, "b": 1}
    (folder / "bad.yaml").write_text("[\n")
    assert told(store) == [("bad", 0, "refused")]
    (folder / "bad.yaml").unlink()
    assert told(store) == [] and store.notices() == []


def test_the_changed_file_loses_a_conflict_until_the_claim_is_free(folder):
    store = opened(folder)
    (folder / "b.yaml").write_text(text("b", "auto", 2))
    events = store.reload()
    assert [(event.policy, event.version, event.outcome) for event in events] == [("b", 1, "refused")]
    assert "`auto` on the chat surface" in events[0].reason
    assert store.current.resolve("auto", "chat", "t").policy == "a"
    assert store.current.resolve("chat", "chat", "t").version == 1
    assert told(store) == []
    (folder / "a.yaml").write_text(text("a", "other", 2))
    assert told(store) == [("a", 2, "applied"), ("b", 2, "applied")]
    assert store.current.resolve("auto", "chat", "t").policy == "b"
    assert store.notices() == []


def test_a_claim_may_move_in_one_reload(folder):
    store = opened(folder)
    (folder / "a.yaml").write_text(text("a", "chat", 2))
    (folder / "b.yaml").write_text(text("b", "auto", 2))
    store.reload()
    assert versions(store) == {"a": 2, "b": 2} and store.notices() == []


def test_of_two_changed_files_the_later_by_name_loses(folder):
    store = opened(folder)
    (folder / "a.yaml").write_text(text("a", "both", 2))
    (folder / "b.yaml").write_text(text("b", "both", 2))
    store.reload()
    assert versions(store) == {"a": 2, "b": 1}
    (folder / "c.yaml").write_text(text("c", "chat", 1))  # new, and taken
    assert told(store) == [("c", 0, "refused")]


def test_falling_back_may_push_another_back_too(folder):
    """a takes `chat` from b; b wants `third`, which c has: b falls back to `chat`, and so a must fall back as well."""
    (folder / "c.yaml").write_text(text("c", "third"))
    store = opened(folder)
    (folder / "a.yaml").write_text(text("a", "chat", 2))
    (folder / "b.yaml").write_text(text("b", "third", 2))
    store.reload()
    assert versions(store) == {"a": 1, "b": 1, "c": 1}
    assert sorted(store.problems) == ["a.yaml", "b.yaml"]


@pytest.mark.parametrize("cut", [60, 30, 10, 0])
def test_a_half_written_file_waits(folder, cut):
    clock = FakeClock()
    store = opened(folder, clock)
    whole = text("a", "auto", 2) + "cache: {enabled: false}\ndeadline: 5s\n"
    (folder / "a.yaml").write_text(whole[:-cut] if cut else whole)
    store.reload()
    if cut:
        assert store.unsettled == (not whole[:-cut].endswith("\n"))
        clock.advance(SETTLE_S / 2)
        (folder / "a.yaml").write_text(whole)
        store.reload()
    assert versions(store)["a"] == 2 and not store.unsettled and store.notices() == []
    assert store.current.by_name["a"].deadline == 5.0


def test_a_beginning_of_what_was_there_waits_a_second_and_then_counts(folder):
    clock = FakeClock()
    good = text("a", "auto") + "deadline: 5s\n"
    (folder / "a.yaml").write_text(good)
    store = opened(folder, clock)
    (folder / "a.yaml").write_text(text("a", "auto"))  # valid, but perhaps the writer is not done
    assert told(store) == [] and store.unsettled
    assert store.current.by_name["a"].deadline == 5.0
    clock.advance(SETTLE_S)
    assert told(store) == [("a", 1, "applied")]
    assert store.current.by_name["a"].deadline == 30.0 and not store.unsettled


def test_a_folder_that_vanished_changes_nothing(folder):
    store = opened(folder)
    folder.rename(folder.with_name("gone"))
    assert told(store) == [("", 0, "refused")] and told(store) == []
    assert versions(store) == {"a": 1, "b": 1}
    folder.mkdir()
    assert told(store) == [("", 0, "refused")]
    assert "the last good ones hold" in store.notices()[0]
    (folder / "a.yaml").write_text(text("a", "auto", 2))
    assert told(store) == [("a", 2, "applied"), ("b", 1, "applied")]  # b was removed
    assert versions(store) == {"a": 2} and store.notices() == []


def test_unreadable_kinds_of_files_are_refused_and_the_rest_lives(folder):
    store = opened(folder)
    os.mkfifo(folder / "pipe.yaml")
    (folder / "dir.yaml").mkdir()
    (folder / "out.yaml").symlink_to("/etc/hostname")
    (folder / "big.yaml").write_bytes(b"# " + b"x" * 2_000_000)
    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\n")
    (folder / "a.yaml").write_text(text("a", "auto", 2))
    store.reload()
    assert sorted(store.problems) == ["big.yaml", "bytes.yaml", "dir.yaml", "out.yaml", "pipe.yaml"]
    assert versions(store) == {"a": 2, "b": 1}


def test_a_start_with_a_bad_file_is_refused_with_everything(folder):
    (folder / "a.yaml").write_text("[\n")
    (folder / "b.yaml").write_text(text("b", "chat") + "x: 1\n")
    with pytest.raises(ConfigError) as caught:
        opened(folder)
    assert len(caught.value.problems) == 2
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="there is no policy file"):
        opened(folder)


def test_a_restart_with_a_bad_file_serves_its_last_good_version(folder, tmp_path):
    """Two teams save in the same second, one of them a typo; then the gateway restarts."""
    keep = keep_folder(tmp_path / "state", folder)
    store = opened(folder, keep=keep)
    (folder / "a.yaml").write_text(text("a", "auto", 2))
    store.reload()
    (folder / "a.yaml").write_text(text("a", "auto", 3) + "tpyo: 1\n")
    (folder / "b.yaml").write_text(text("b", "chat", 2))
    store.reload()
    assert versions(store) == {"a": 2, "b": 2}
    again = opened(folder, keep=keep)
    assert versions(again) == {"a": 2, "b": 2}
    assert "a.yaml:5:1: unknown key `tpyo`" in again.notices()[0]
    (folder / "a.yaml").write_text(text("a", "auto", 4))
    assert told(again) == [("a", 4, "applied")] and again.notices() == []
    # A file that was taken away does not come back, and another folder's versions are none of ours.
    (folder / "b.yaml").unlink()
    again.reload()
    assert versions(opened(folder, keep=keep)) == {"a": 4}
    assert keep_folder(tmp_path / "state", tmp_path) != keep


def test_kept_versions_that_cannot_be_written_are_said(folder, tmp_path):
    (tmp_path / "state").write_text("a file, not a folder")
    store = opened(folder, keep=tmp_path / "state" / "policies")
    assert versions(store) == {"a": 1, "b": 1}
    assert "cannot be kept for a restart" in store.notices()[0]


# -------------------------------------------------------------------------------------------------------- notifications


class Recorder:
    """Counts what the watcher reports, and lets a test wait for it."""

    def __init__(self, store: PolicyStore) -> None:
        self.store = store
        self.calls: list[frozenset[Path]] = []
        self.events: list[tuple[str, int, str]] = []
        self._changed = asyncio.Condition()

    async def on_change(self, changed: frozenset[Path]) -> float | None:
        self.calls.append(changed)
        self.events += told(self.store)
        async with self._changed:
            self._changed.notify_all()
        return SETTLE_S if self.store.unsettled else None

    async def until(self, predicate) -> None:
        async with asyncio.timeout(10.0), self._changed:
            await self._changed.wait_for(predicate)


@contextlib.asynccontextmanager
async def watching(folder: Path, *more: Path) -> AsyncIterator[Recorder]:
    clock = SystemClock()
    recorder = Recorder(PolicyStore.open(folder, KNOWN, clock, BUILTIN))
    task = asyncio.create_task(Watcher([folder, *more], recorder.on_change, clock).run())
    try:
        yield recorder
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_save_a_rename_and_a_bad_save_are_one_reload_each(folder):
    async with watching(folder) as seen:
        (folder / "a.yaml").write_text(text("a", "auto", 2))
        await seen.until(lambda: versions(seen.store)["a"] == 2)
        (folder / ".a.yaml.new").write_text(text("a", "auto", 3))
        (folder / ".a.yaml.new").rename(folder / "a.yaml")
        await seen.until(lambda: versions(seen.store)["a"] == 3)
        (folder / "a.yaml").write_text("[\n")
        await seen.until(lambda: seen.store.notices())
        assert seen.events == [("a", 2, "applied"), ("a", 3, "applied"), ("a", 3, "refused")]
        assert all(changed == {folder / "a.yaml"} for changed in seen.calls)


async def test_a_configmap_swap_is_one_reload(tmp_path):
    """Kubernetes: every file is a link through `..data`, and `..data` is swapped."""
    folder = tmp_path / "mounted"
    for number in (1, 2):
        data = folder / f"..2026_{number}"
        data.mkdir(parents=True)
        for name, alias in (("a", "auto"), ("b", "chat")):
            (data / f"{name}.yaml").write_text(text(name, alias, number))
    (folder / "..data").symlink_to("..2026_1")
    for name in ("a.yaml", "b.yaml"):
        (folder / name).symlink_to(f"..data/{name}")
    async with watching(folder) as seen:
        (folder / "..data_tmp").symlink_to("..2026_2")
        (folder / "..data_tmp").rename(folder / "..data")
        await seen.until(lambda: versions(seen.store) == {"a": 2, "b": 2})
        assert len(seen.calls) == 1
        assert seen.events == [("a", 2, "applied"), ("b", 2, "applied")]


async def test_a_slow_writer_is_never_read_half(folder):
    """The text arrives in pieces, some of which would be valid files; only the whole one is ever in force."""
    whole = text("a", "auto", 2) + "deadline: 5s\ncache: {enabled: false}\n"
    async with watching(folder) as seen:
        with (folder / "a.yaml").open("w") as file:
            for piece in (whole[:70], whole[70:105], whole[105:]):
                file.write(piece)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
        await seen.until(lambda: versions(seen.store)["a"] == 2)
        assert seen.store.current.by_name["a"].deadline == 5.0
        assert not seen.store.current.by_name["a"].cache.enabled


async def test_a_folder_that_is_replaced_is_still_watched(folder):
    async with watching(folder) as seen:
        folder.rename(folder.with_name("old"))
        await seen.until(lambda: seen.store.notices())
        folder.mkdir()
        (folder / "a.yaml").write_text(text("a", "auto", 2))
        await seen.until(lambda: versions(seen.store) == {"a": 2})


async def test_many_saves_a_second_never_stop_the_look_ups(folder):
    """100 saves a second: every look-up meets a whole policy, and the last save is what counts."""
    done = threading.Event()

    def save() -> None:
        version = 1
        while not done.wait(0.01):
            version += 1
            (folder / ".new").write_text(text("a", "auto", version))
            (folder / ".new").rename(folder / "a.yaml")
        (folder / ".new").write_text(text("a", "auto", 9_999))
        (folder / ".new").rename(folder / "a.yaml")

    async with watching(folder) as seen:
        writer = asyncio.create_task(asyncio.to_thread(save))
        last = 0
        while len(seen.calls) < 2:
            policy = seen.store.current.resolve("auto", "chat", "t")
            assert policy is not None and policy.version >= last
            last = policy.version
            await asyncio.sleep(0)
        done.set()
        await writer
        await seen.until(lambda: versions(seen.store)["a"] == 9_999)
        assert all(outcome == "applied" for _, _, outcome in seen.events)


async def test_a_revoked_key_is_refused_within_two_seconds(folder, tmp_path):
    path, clock = tmp_path / "keys.yaml", SystemClock()
    create_key(path, ApiKey(id="k", sha256=digest("gw-1"), tenant="t"))
    identities = FileKeys(path, clock)
    reloaded = asyncio.Event()

    async def on_change(changed: frozenset[Path]) -> None:
        if path in changed and identities.reload():
            reloaded.set()

    task = asyncio.create_task(Watcher([folder, path], on_change, clock).run())
    try:
        identities.identify("Bearer gw-1", loopback=False)
        revoke_key(path, "k")
        async with asyncio.timeout(2.0):
            await reloaded.wait()
        with pytest.raises(Unauthenticated):
            identities.identify("Bearer gw-1", loopback=False)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
