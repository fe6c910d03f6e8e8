"""What a rolling restart takes up of a changed configuration."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from gateway.config import default_config
from gateway.config_sections import BackendSettings, Config, Limits, Listen
from gateway.control.reconfigure import taken_up
from gateway.secret import Secret

BASE: Config = default_config({"HOME": "/home/a"})


def test_nothing_changed():
    assert taken_up(BASE, BASE) == (BASE, [])


def test_backends_limits_and_the_like_are_taken_up():
    now = replace(BASE, limits=Limits(body_bytes=1), drain_s=1.0, backends={"other": BackendSettings(kind="scripted")})
    assert taken_up(BASE, now) == (now, [])


def test_what_is_the_supervisor_s_is_named_and_kept():
    now = replace(BASE, listen=Listen(port=1), workers=7, policies_dir=Path("/p"), drain_s=1.0)
    config, notes = taken_up(BASE, now)
    assert config == replace(BASE, drain_s=1.0)
    assert [note.split("`")[1] for note in notes] == ["listen", "workers", "policies_dir"]
    assert all("started anew" in note for note in notes)


def test_the_kept_secret_of_the_cache_stays():
    before = replace(BASE, cache=replace(BASE.cache, secret=Secret("kept")))
    config, _ = taken_up(before, BASE)
    assert config.cache.secret == Secret("kept")


def test_with_several_workers_a_model_host_cannot_come_or_go():
    before = replace(BASE, workers=2)
    now = replace(before, backends={"heavy": BASE.backends["heavy"]}, drain_s=1.0)
    config, notes = taken_up(before, now)
    assert config == replace(before, drain_s=1.0)
    assert "models inside the gateway come or go" in notes[0]
