"""What a process is given at its start arrives as it was."""

from __future__ import annotations

from pathlib import Path

import msgspec

from gateway.config import default_config, load_config
from gateway.config_sections import Config
from gateway.control.start import KeysInForce, Standing, Start, from_payload, to_payload
from gateway.control.worker_actions import catch_up
from policies.language.loader import load_policy
from tests.support.gateway import EMBEDDED, environment, write_config

SHIPPED = Path(__file__).parents[3] / "policies"


def there_and_back(start: Start) -> Start:
    return from_payload(msgspec.msgpack.decode(msgspec.msgpack.encode(to_payload(start))))


def test_everything_arrives():
    policies = [load_policy(SHIPPED / name) for name in ("chatbot.yaml", "recommendation.yaml")]
    config = default_config({"HOME": "/home/a", "HEAVY_API_KEY": "sk-secret"})
    start = Start(
        config,
        Standing(7, policies, ["chatbot.yaml:3:1: no"], KeysInForce(b"keys: []\n", "x")),
        "/tmp/models.sock",
        [("worker-1", "breaker/heavy", {"state": "open", "until": 12.25})],
    )
    arrived = there_and_back(start)
    assert arrived == start
    assert arrived.config.backends["heavy"].credential.reveal() == "sk-secret"


def test_every_section_of_an_operator_s_file_arrives(tmp_path):
    path = write_config(
        tmp_path,
        "http://127.0.0.1:9",
        **EMBEDDED,
        redis={"url": "redis://127.0.0.1:6379/0", "timeout": "20ms"},
        workers=3,
        limits={"body_bytes": "1MiB"},
        cache={"secret_env": "CACHE_SECRET"},
    )
    config = load_config(path, {**environment(tmp_path), "CACHE_SECRET": "0123456789abcdef"})
    assert there_and_back(Start(config)).config == config


def test_the_plain_form_is_the_only_place_where_secrets_are_in_clear():
    config = default_config({"HOME": "/home/a", "HEAVY_API_KEY": "sk-secret"})
    assert "sk-secret" not in repr(Start(config))
    assert isinstance(from_payload(to_payload(Start(config))).config, Config)


def test_who_cannot_take_up_the_policies_has_the_keys_all_the_same():
    """The first command that fails is the last one sent."""
    assert next(name for name, _ in catch_up(Standing())) == "keys.swap"
