"""The operator's configuration: the file, the environment, and every mistake at once."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.api import Role, Surface
from gateway.config import config_path, default_config, is_loopback, known_backends, load_config
from gateway.secret import Secret, kept_secret
from policies.core.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "gateway.yaml"
BACKENDS = "backends:\n  light: {kind: scripted, role: light}\n"


def load(tmp_path: Path, text: str, env: dict[str, str] | None = None):
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    return load_config(path, env or {})


def problems(tmp_path: Path, text: str, env: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, env)
    return [line.removeprefix(f"{tmp_path}/gateway.yaml:") for line in caught.value.problems]


def test_the_shipped_file_says_what_the_defaults_are():
    env = {"GATEWAY_HOME": "/somewhere", "HOME": "/home/me"}
    shipped, default = load_config(SHIPPED, env), default_config(env)
    for field in (
        "listen",
        "admin",
        "limits",
        "workers",
        "redis",
        "cache",
        "log",
        "drain_s",
        "models",
        "backends",
        "models_dir",
    ):
        assert getattr(shipped, field) == getattr(default, field), field
    assert shipped.policies_dir == default.policies_dir == SHIPPED.parent / "policies"
    assert shipped.keys_file == SHIPPED.parent / "keys.yaml"
    assert default.keys_file == Path("/somewhere/keys.yaml")
    assert shipped.models_dir == Path("/somewhere/models") and shipped.state_dir == Path("/somewhere/state")
    assert shipped.source == SHIPPED and default.source is None


def test_what_policies_may_name():
    known = known_backends(default_config({"HOME": "/h"}))
    assert {name: (spec.role, sorted(spec.surfaces)) for name, spec in known.items()} == {
        "heavy": ("heavy", ["chat"]),
        "light": ("light", ["chat"]),
        "recommender": ("light", ["tensor"]),
        "embed": ("light", ["embeddings"]),
    }


def test_paths_count_from_the_file_and_home(tmp_path):
    config = load(
        tmp_path,
        "policies_dir: ../p\nkeys_file: /etc/keys.yaml\nmodels_dir: ~/m\n"
        "backends: {s: {kind: scripted, script: fails.yaml}}\n",
        {"HOME": "/home/me"},
    )
    assert config.policies_dir == tmp_path / "../p"
    assert config.keys_file == Path("/etc/keys.yaml")
    assert config.models_dir == Path("/home/me/m")
    assert config.backends["s"].script == tmp_path / "fails.yaml"
    assert config.state_dir == Path("/home/me/.cache/gateway/state")


def test_the_file_is_found(tmp_path):
    assert config_path({}, tmp_path) is None
    (tmp_path / "gateway.yaml").write_text(BACKENDS)
    assert config_path({}, tmp_path) == tmp_path / "gateway.yaml"
    assert config_path({"GATEWAY_CONFIG": "/x.yaml"}, tmp_path) == Path("/x.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(None, {"GATEWAY_CONFIG": str(tmp_path / "none.yaml")})


def test_values_of_a_backend(tmp_path):
    config = load(
        tmp_path,
        "backends:\n"
        "  heavy:\n"
        "    kind: openai\n"
        "    base_url: https://api.example.com/v1/\n"
        "    model: big\n"
        "    credential_env: KEY\n"
        "    capabilities: {surfaces: [chat], context_tokens: 8000, features: [tools]}\n"
        "    languages: [en, zh]\n"
        "    limiter: {max_concurrent: 7}\n"
        "    breaker: {failure_rate: 30%, min_calls: 5, window: 20s, consecutive: 3, open: 2s}\n"
        "    timeouts: {connect: 100ms}\n",
        {"KEY": " sk-secret "},
    )
    heavy = config.backends["heavy"]
    assert heavy.base_url == "https://api.example.com/v1"
    assert heavy.credential is not None and heavy.credential.reveal() == "sk-secret"
    assert heavy.effective_role() is Role.HEAVY
    assert heavy.limiter.max_concurrent == 7
    assert (heavy.breaker.failure_rate, heavy.breaker.window_s, heavy.breaker.open_s) == (0.3, 20.0, 2.0)
    assert heavy.timeouts.connect_s == 0.1
    capabilities = heavy.remote_capabilities()
    assert capabilities.surfaces == {Surface.CHAT} and capabilities.features == {"tools"}
    assert capabilities.context_tokens == 8000 and capabilities.languages == {"en", "zh"}


# ------------------------------------------------------------------------------------------------------ environment


def test_heavy_from_the_environment():
    env = {"HEAVY_BASE_URL": "https://api.example.com/v1/", "HEAVY_API_KEY": "sk-1", "HEAVY_MODEL": "big", "HOME": "/h"}
    for config in (default_config(env), load_config(SHIPPED, env)):
        heavy = config.backends["heavy"]
        assert (heavy.base_url, heavy.model) == ("https://api.example.com/v1", "big")
        assert heavy.credential is not None and heavy.credential.reveal() == "sk-1"
        # Another service is another model, also for entries in a shared cache.
        assert heavy.version != default_config({"HOME": "/h"}).backends["heavy"].version


def test_heavy_is_made_when_the_file_has_none(tmp_path):
    config = load(tmp_path, BACKENDS, {"HEAVY_BASE_URL": "http://h:1/v1", "HEAVY_MODEL": "m"})
    assert config.backends["heavy"].kind == "openai"
    assert config.backends["heavy"].credential is None


def test_the_key_from_the_environment_replaces_the_file_s(tmp_path):
    text = "backends:\n  heavy: {kind: openai, base_url: 'http://h/v1', model: m, credential_env: NOT_SET}\n"
    config = load(tmp_path, text, {"HEAVY_API_KEY": "sk-2"})
    assert config.backends["heavy"].credential == Secret("sk-2")


@pytest.mark.parametrize(
    ("env", "line"),
    [
        ({"HEAVY_BASE_URL": "api.example.com"}, "`HEAVY_BASE_URL`: `api.example.com` is not an http or https URL; did you mean http://"),
        ({"HEAVY_BASE_URL": "http://me:hunter2@h/"}, "must not carry credentials"),
        ({"HEAVY_API_KEY": "sk-hunter2\nx"}, "`HEAVY_API_KEY` holds characters that a header cannot carry"),
    ],
)  # fmt: skip
def test_bad_environment(env, line):
    with pytest.raises(ConfigError) as caught:
        default_config({**env, "HOME": "/h"})
    assert line in str(caught.value)
    assert "hunter2" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("listen: {prt: 1}\n" + BACKENDS, "1:10: unknown key `prt` in `listen`; did you mean `port`?"),
        ("listen: {port: 70000}\n" + BACKENDS, "1:16: `listen.port` must be at most 65535"),
        ("admin: {port: 8080}\n" + BACKENDS, "1:15: the data and the admin listener need different ports"),
        ("admin: {host: 0.0.0.0}\n" + BACKENDS, "1:15: an admin listener outside loopback needs `token_env`"),
        ("admin: {token_env: NOPE}\n" + BACKENDS, "1:20: the environment variable `NOPE` is not set"),
        ("limits: {body_bytes: 4MB}\n" + BACKENDS, "1:22: `limits.body_bytes`: `MB` is not a unit of size (B, KiB, MiB, GiB); did you mean 4MiB?"),
        ("workers: 0\n" + BACKENDS, "1:10: `workers` must be at least 1"),
        ("workers: 1000\n" + BACKENDS, "1:10: `workers` must be at most 256"),
        ("chaos: {}\n" + BACKENDS, "1:1: `chaos` is not available in this version"),
        ("otel: {}\n" + BACKENDS, "1:1: `otel` is not available in this version"),
        ("redis: {timeout: 30ms}\n" + BACKENDS, "1:8: redis needs either `url` or `url_env`"),
        ("redis: {url: 'http://h'}\n" + BACKENDS, "1:14: this is not a Redis address"),
        ("redis: {url: 'redis://:hunter2@h:1'}\n" + BACKENDS, "1:14: a password does not belong in this file; use `url_env`"),
        ("redis: {url: 123456}\n" + BACKENDS, "1:14: `redis.url` must be text; write it in quotes"),
        ("log: {level: warn}\n" + BACKENDS, "1:14: `warn` is no value of `log.level`; did you mean `warning`?"),
        ("models: {minlm: {}}\n" + BACKENDS, "1:10: there is no model `minlm` in the catalogue; did you mean `minilm`?"),
        ("models: {two-tower: {source: 'model:x'}}\n" + BACKENDS, "1:30: `two-tower` is made from another model; write model:minilm"),
        ("models: {two-tower: {source: 'file:x'}}\n" + BACKENDS, "1:30: `two-tower` is made from another model"),
        ("models: {minilm: {source: 'model:smollm2'}}\n" + BACKENDS, "1:27: `minilm` is made from weights"),
        ("models: {minilm: {required: true}}\n" + BACKENDS, "1:19: no backend runs the model `minilm`, so `required` does nothing"),
        ("models: {minilm: {languages: [en]}}\n" + BACKENDS, "1:19: no backend runs the model `minilm`, so `languages`"),
        ("models: {minilm: {capabilities: {context_tokens: 9}}}\n" + BACKENDS, "1:19: no backend runs the model"),
        ("models: {minilm: {source: 'ftp:x'}}\n" + BACKENDS, "1:27: `models.minilm.source` has characters that are not allowed here"),
        ("drain: 10\n" + BACKENDS, "1:8: `drain`: `10` has no unit; did you mean 10s?"),
        ("workers: 1\n", "1:1: there is no backend"),
        ("backends: {a: {kind: opnai}}\n", "1:22: `opnai` is no value of `backends.a.kind`; did you mean `openai`?"),
        ("backends: {a: {kind: openai, model: m}}\n", "1:12: a backend of kind openai needs `base_url`"),
        ("backends: {a: {kind: onnx_chat, model: m}}\n", "1:40: there is no model `m` under `models`"),
        ("backends: {a: {kind: scripted, base_url: 'http://h'}}\n", "1:32: `base_url` means nothing to the kind scripted"),
        ("backends: {a: {kind: oip, base_url: 'http://h', model: m, script: x}}\n", "1:59: `script` belongs only to the kind scripted"),
        ("backends: {stale: {kind: scripted}}\n", "1:12: `stale` is a rung of the ladder"),
        ("backends: {light: {kind: scripted}}\n", "1:12: routes to `light` mean the role, and this backend's role is heavy"),
        ("backends: {a: {kind: scripted, limiter: {max_concurrent: 0}}}\n", "1:58: must be at least 1"),
        ("models: {smollm2: {}}\nbackends: {a: {kind: onnx_embedder, model: smollm2}}\n", "2:44: `smollm2` is of kind chat and cannot be run by onnx_embedder; it runs minilm"),
        ("models: {minilm: {}}\nbackends: {a: {kind: onnx_embedder, model: minilm, capabilities: {surfaces: [chat]}}}\n", ": the kind onnx_embedder cannot serve chat; it serves embeddings"),
        ("models: {minilm: {capabilities: {surfaces: [chat]}}}\nbackends: {a: {kind: onnx_embedder, model: minilm}}\n", "1:44: the kind onnx_embedder cannot serve chat"),
        ("backends: {a: {kind: openai, base_url: 'http://h', model: m, capabilities: {surfaces: [chat, embeddings]}}}\n", "cannot serve embeddings; it serves chat"),
        ("backends: {a: {kind: oip, base_url: 'http://h', model: m, capabilities: {surfaces: []}}}\n", "there is no surface left"),
        ("backends: {a: {kind: openai, base_url: 'http://h', model: m, price: {input_per_mtok: 1}}}\n", "1:62: `price` is not available in this version"),
        ("backends: {a: {kind: openai, base_url: 'http://h', model: m, required: true}}\n", "1:62: `required` means nothing to the kind openai"),
        ("backends: {a: {kind: scripted, required: true}}\n", "1:32: `required` means nothing to the kind scripted"),
        ("backends: {a: {kind: scripted, breaker: {window: 0s}}}\n", "1:50: `backends.a.breaker.window` must be more than 0"),
        ("backends: {a: {kind: scripted, breaker: {open: 0s}}}\n", "`backends.a.breaker.open` must be more than 0"),
        ("backends: {a: {kind: scripted, breaker: {probe_timeout: 0s}}}\n", "must be more than 0"),
        ("backends: {a: {kind: scripted, breaker: {failure_rate: 0%}}}\n", "must be more than 0"),
        ("backends: {a: {kind: scripted, breaker: {probes: 0}}}\n", "1:50: `backends.a.breaker.probes` must be at least 1"),
        ("backends: {a: {kind: scripted, breaker: {open: 1m}}}\n", "1:48: `open_max` (30s) must be at least `open` (60s)"),
        ("backends: {a: {kind: scripted, breaker: {open: 9s, open_max: 3s}}}\n", "1:62: `open_max` (3s) must be at least `open` (9s)"),
        ("admin: {token_env: sk-hunter2}\n" + BACKENDS, "1:20: `admin.token_env` has characters that are not allowed here (wanted"),
        ("admin: {token_env: hunter2}\n" + BACKENDS, "1:20: the environment variable that `admin.token_env` should name is not set"),
        ("backends: {a: {kind: openai, base_url: 'http://h', model: m, credential_env: [hunter2]}}\n", "must be text, not a list"),
        ("backends: {a: {kind: scripted, hedge_budget: 1}}\n", "1:32: `hedge_budget` is not available in this version"),
    ],
)  # fmt: skip
def test_one_mistake_one_line(tmp_path, text, line):
    found = problems(tmp_path, text)
    assert len(found) == 1, found
    assert line in found[0]
    assert "hunter2" not in found[0] and "123456" not in found[0]


def test_all_mistakes_at_once(tmp_path):
    found = problems(
        tmp_path,
        "listen: {port: x}\nworkers: none\nlog: {level: loud}\nadmin: {token_env: NOPE}\nbackends: {a: {kind: openai}}\nmodles: {}\n",
    )
    assert [line.split(": ")[0] for line in found] == ["1:16", "2:10", "3:14", "4:20", "5:12", "5:12", "6:1"]


@settings(max_examples=100)
@given(st.data())
def test_a_mutated_file_is_good_or_refused(data):
    lines = SHIPPED.read_text("utf-8").splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(
        st.sampled_from(["", lines[at] * 2, "  " + lines[at], lines[at].split(":")[0] + ": []\n", lines[at][:7]])
    )
    folder = Path("/tmp")  # only named: nothing is written
    from gateway.config_checks import check_config
    from gateway.config_sections import Config
    from policies.language.check import check
    from policies.language.problems import Problems
    from policies.language.yaml_reader import read_yaml

    found = Problems(str(folder / "g.yaml"))
    root = read_yaml("".join(lines).encode(), found)
    if root is not None:
        check_config(check(root, Config, found), root, found)
    assert all(line.startswith(f"{folder}/g.yaml:") for line in found.lines())


# ------------------------------------------------------------------------------------------------------------ secrets


def test_a_secret_does_not_show(tmp_path):
    secret = Secret("hunter2")
    env = {"HEAVY_API_KEY": "hunter2", "HOME": "/h"}
    for shown in (
        repr(secret),
        str(secret),
        f"{secret}",
        f"{[secret]!r}",
        repr(default_config(env)),
    ):
        assert "hunter2" not in shown
    assert f"{secret}" == "***"
    assert secret == Secret("hunter2") and secret != Secret("x") and secret != "hunter2" and not Secret("")
    for copying in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError):
            copying(secret)


def test_the_kept_secret_is_made_once(tmp_path):
    path = tmp_path / "state" / "cache.secret"
    first = kept_secret(path)
    assert len(first.reveal()) >= 43
    assert kept_secret(path) == first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["cache.secret"]


@pytest.mark.parametrize("content", [None, b"", b"\xff"])
def test_a_secret_that_cannot_be_kept_names_its_path(tmp_path, content):
    path = tmp_path / "state" / "cache.secret"
    if content is None:
        (tmp_path / "state").write_text("a file where the folder should be")
    else:
        path.parent.mkdir()
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cache\.secret: "):
        kept_secret(path)


def test_weights_from_a_file_are_found_from_the_configuration(tmp_path):
    text = "models: {minilm: {source: 'file:w'}, smollm2: {source: 'hf:a/b/c'}}\n" + BACKENDS
    models = load(tmp_path, text).models
    assert models["minilm"].source == f"file:{tmp_path / 'w'}"
    assert models["smollm2"].source == "hf:a/b/c"


@pytest.mark.parametrize(
    ("host", "yes"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("localhost.evil.com", False), ("", False)],
)  # fmt: skip
def test_loopback(host, yes):
    assert is_loopback(host) is yes
