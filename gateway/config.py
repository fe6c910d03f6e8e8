"""Reads the operator's configuration, the only place that looks at the environment.

    $GATEWAY_CONFIG   the file; otherwise ./gateway.yaml; otherwise built-in defaults
    $GATEWAY_HOME     models and state; otherwise ~/.cache/gateway
    $HEAVY_BASE_URL   $HEAVY_API_KEY $HEAVY_MODEL: change the backend `heavy` to that OpenAI-compatible service
    every `..._env`   the variable that a key of the file names

`load_config` reports all mistakes at once, with file:line:column. Secrets are held as `Secret`, which never prints.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from backends.api import Role
from gateway.config_checks import check_config, is_loopback
from gateway.config_sections import (
    UNSET,
    Admin,
    BackendSettings,
    CacheSettings,
    Config,
    Limits,
    Listen,
    Log,
    ModelSettings,
    Redis,
)
from gateway.secret import Secret
from policies.core.errors import ConfigError
from policies.language.check import check
from policies.language.problems import START, Problems, path_text
from policies.language.problems import Path as Where
from policies.language.semantics import KnownBackend
from policies.language.units import UnitError, url
from policies.language.yaml_reader import Node, position, read_bytes, read_yaml

__all__ = [
    "Admin", "BackendSettings", "CacheSettings", "Config", "Limits", "Listen", "Log", "ModelSettings", "Redis", "Secret",
    "config_path", "default_config", "is_loopback", "known_backends", "load_config",
]  # fmt: skip

FILE_NAME = "gateway.yaml"
#: What the name of a variable commonly looks like, and a secret does not.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,47}")
STAND_IN_URL = "http://127.0.0.1:9100/v1"
HEAVY = "heavy"


def config_path(env: Mapping[str, str], folder: Path | None = None) -> Path | None:
    """The file that $GATEWAY_CONFIG or `folder` (the current one) has; None = there is none."""
    named = env.get("GATEWAY_CONFIG")
    if named:
        return _home_path(named, env)
    path = (folder or Path.cwd()) / FILE_NAME
    return path if path.is_file() else None


def load_config(path: Path | None, env: Mapping[str, str]) -> Config:
    """The configuration of `path` (None: found by `config_path`, else the defaults). Raises ConfigError."""
    path = path or config_path(env)
    if path is None:
        return default_config(env)
    problems = Problems(str(path))
    root = read_yaml(read_bytes(path), problems)
    if root is None:
        raise ConfigError(problems.lines())
    config = check(root, Config, problems)
    check_config(config, root, problems)
    config = _with_secrets(config, root, problems, env)
    config = _with_heavy(config, problems, env)
    problems.raise_any()
    return _with_folders(config, path.absolute().parent, path.absolute(), env)


def default_config(env: Mapping[str, str]) -> Config:
    """What runs without a file: loopback, the shipped policies, the embedded models, a heavy stand-in on port 9100."""
    problems = Problems("environment")
    config = Config(models=dict(_MODELS), backends=dict(_BACKENDS))
    config = _with_heavy(config, problems, env)
    problems.raise_any()
    from policies import language

    shipped = Path(language.__file__).parents[1]
    config = msgspec.structs.replace(config, policies_dir=shipped, keys_file=_home(env) / "keys.yaml")
    return _with_folders(config, Path.cwd(), None, env)


_MODELS = {"minilm": ModelSettings(), "smollm2": ModelSettings(), "two-tower": ModelSettings()}
_BACKENDS = {
    HEAVY: BackendSettings(kind="openai", role=Role.HEAVY, base_url=STAND_IN_URL, model="stand-in"),
    "light": BackendSettings(kind="onnx_chat", model="smollm2"),
    "recommender": BackendSettings(kind="onnx_two_tower", model="two-tower"),
    "embed": BackendSettings(kind="onnx_embedder", model="minilm"),
}


def known_backends(config: Config) -> dict[str, KnownBackend]:
    """What policies may name: backend -> its role and surfaces."""
    return {
        name: KnownBackend(str(spec.effective_role()), frozenset(str(s) for s in spec.effective_surfaces()))
        for name, spec in config.backends.items()
    }


# ------------------------------------------------------------------------------------------------------ environment


def _with_secrets(config: Config, root: Node, problems: Problems, env: Mapping[str, str]) -> Config:
    """Fill in what the `..._env` keys name."""

    def read(name: str | None, path: Where) -> Secret | None:
        if not name or problems.touches(path):
            return None
        value = env.get(name, "").strip()
        # Somebody may have pasted the secret itself; then the message must not repeat it.
        shown = f"`{name}`" if _VARIABLE.fullmatch(name) else f"that {path_text(path)} should name"
        if not value:
            problems.add(position(root, path), f"the environment variable {shown} is not set", path)
        elif not value.isprintable() or not value.isascii():
            message = f"the environment variable {shown} holds characters that a header cannot carry"
            problems.add(position(root, path), message, path)
        return Secret(value)

    replace = msgspec.structs.replace
    backends: dict[str, BackendSettings] = {}
    for name, spec in config.backends.items():
        # HEAVY_API_KEY stands in for whatever the file names.
        overridden = name == HEAVY and env.get("HEAVY_API_KEY")
        credential = None if overridden else read(spec.credential_env, ("backends", name, "credential_env"))
        backends[name] = replace(spec, credential=credential)
    admin = replace(
        config.admin,
        token=read(config.admin.token_env, ("admin", "token_env")),
        view_token=read(config.admin.view_token_env, ("admin", "view_token_env")),
    )
    cache = replace(config.cache, secret=read(config.cache.secret_env, ("cache", "secret_env")))
    redis = config.redis
    if redis is not None and redis.url_env:
        redis = replace(redis, url=read(redis.url_env, ("redis", "url_env")))
    return replace(config, backends=backends, admin=admin, cache=cache, redis=redis)


def _with_heavy(config: Config, problems: Problems, env: Mapping[str, str]) -> Config:
    """Point the backend `heavy` at what HEAVY_BASE_URL, HEAVY_API_KEY and HEAVY_MODEL say."""
    base_url, key, model = (env.get(f"HEAVY_{name}", "").strip() for name in ("BASE_URL", "API_KEY", "MODEL"))
    if not (base_url or key or model):
        return config
    changes: dict[str, Any] = {}
    if base_url:
        try:
            changes["base_url"] = url(base_url)
        except UnitError as error:
            problems.add(START, f"the environment variable `HEAVY_BASE_URL`: {error}")
    if key and not (key.isprintable() and key.isascii()):
        problems.add(START, "the environment variable `HEAVY_API_KEY` holds characters that a header cannot carry")
    elif key:
        changes["credential"] = Secret(key)
    if model:
        changes["model"] = model
    spec = config.backends.get(HEAVY, BackendSettings(kind="openai", base_url=STAND_IN_URL, model="stand-in"))
    if spec.kind != "openai":
        problems.add(
            START, f"HEAVY_... variables are for a backend `heavy` of kind openai, but it is of kind {spec.kind}"
        )
        return config
    spec = msgspec.structs.replace(spec, **changes)
    # Another service is another model, also to entries that a shared cache still holds.
    host = urllib.parse.urlsplit(spec.base_url).netloc
    spec = msgspec.structs.replace(spec, version=f"{spec.version}/{host}/{spec.model}")
    return msgspec.structs.replace(config, backends={**config.backends, HEAVY: spec})


# ---------------------------------------------------------------------------------------------------------- folders


def _home(env: Mapping[str, str]) -> Path:
    named = env.get("GATEWAY_HOME")
    return _home_path(named, env).absolute() if named else _home_path("~/.cache/gateway", env)


def _home_path(text: str | Path, env: Mapping[str, str]) -> Path:
    """A path, its leading `~` replaced."""
    parts = Path(text).parts
    if parts and parts[0] == "~":
        return Path(env.get("HOME") or Path.home(), *parts[1:])
    return Path(text)


def _with_folders(config: Config, folder: Path, source: Path | None, env: Mapping[str, str]) -> Config:
    """Make every path absolute; relative ones count from `folder`."""
    home = _home(env)
    scripts = {
        name: msgspec.structs.replace(spec, script=folder / _home_path(spec.script, env)) if spec.script else spec
        for name, spec in config.backends.items()
    }
    models = {
        name: msgspec.structs.replace(spec, source=_placed(spec.source, folder, env)) if spec.source else spec
        for name, spec in config.models.items()
    }
    return msgspec.structs.replace(
        config,
        models=models,
        keys_file=folder / _home_path(config.keys_file, env),
        policies_dir=folder / _home_path(config.policies_dir, env),
        models_dir=home / "models" if config.models_dir == UNSET else folder / _home_path(config.models_dir, env),
        state_dir=home / "state",
        source=source,
        backends=scripts,
    )


def _placed(source: str, folder: Path, env: Mapping[str, str]) -> str:
    """A `file:` source made absolute; any other as it is."""
    scheme, _, rest = source.partition(":")
    return f"file:{folder / _home_path(rest, env)}" if scheme == "file" else source
