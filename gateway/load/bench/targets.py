"""What the front bench starts: an upstream, the bare servers, and a gateway whose policy decides by cheap signals."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from gateway.config import load_config
from gateway.load.bench.bare import CHAT_PATH, COMPLETION, FixedAnswer
from gateway.load.bench.generator import body
from gateway.load.bench.processes import BenchError, Server, Stage, free_port, is_free
from gateway.load.outcome import RUNG_HEADER
from routing.heads import Heads

MODEL = "auto"

_NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 1000000000; keepalive_timeout 1h;
  client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-proxy; fastcgi_temp_path {folder}/nginx-f;
  uwsgi_temp_path {folder}/nginx-u; scgi_temp_path {folder}/nginx-s;
  server {{ listen 127.0.0.1:{port}; location / {{ default_type application/json; return 200 '{answer}'; }} }}
}}
"""

_GATEWAY = """
listen: {{port: {port}}}
admin: {{port: {admin}}}
policies_dir: policies
log: {{level: warning}}
backends:
  heavy: {{kind: openai, role: heavy, base_url: "{upstream}/v1", model: m}}
"""

#: Every signal that costs no model is read, then the one backend there is answers. Nothing here needs a model file.
_POLICY = """
policy: bench
version: 1
match: {{aliases: [{model}], surfaces: [chat]}}
deadline: 30s
classify:
  signals:
    long: {{kind: length, tokens: 600}}
    wants_work: {{kind: keywords, any: [prove, derive, step by step, 证明, 推导]}}
    structured: {{kind: structure}}
{head}
routes:
  - name: hard
    when: {{any: [{{signal: wants_work, at_least: 1}}, {{signal: structured, at_least: 0.5}}, {{signal: long, at_least: 1}}{rule}]}}
    to: heavy
  - name: plain
    to: heavy
ladder: [heavy]
cache: {{store: all}}
"""
_HEAD_SIGNAL = "    complexity: {kind: complexity}"
_HEAD_RULE = ", {signal: complexity, at_least: 0.5}"


@dataclass(frozen=True, slots=True)
class Target:
    """A server with its base URL; `ready_s` from start to its first answer."""

    server: Server
    url: str
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the gateway: its rung, body and all its headers."""

    rung: str
    body: str
    headers: dict[str, str]


async def start_upstream(stage: Stage) -> Target:
    """nginx with a fixed answer on the load core; without nginx, a small asyncio server."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    nginx = find_nginx()
    if nginx is not None:
        config = stage.folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=stage.folder, port=port, answer=COMPLETION.decode()))
        server = stage.start(
            "nginx", stage.load_core, [nginx, "-c", str(config), "-e", str(stage.folder / "nginx.err")]
        )
    else:
        command = [sys.executable, "-m", "gateway.load.bench.bare", "upstream", str(port)]
        server = stage.start("upstream", stage.load_core, command)
    # The asyncio upstream answers a GET as well: it looks only for the end of a request.
    return Target(server, url, await stage.until_answers(server, url + CHAT_PATH))


def find_nginx() -> str | None:
    """Debian keeps nginx where a plain user's PATH does not look."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


async def start_proxy(stage: Stage, upstream: str) -> Target:
    return await _bare(stage, "bare-proxy", "proxy", upstream)


async def start_constant(stage: Stage, like: Sample | None) -> Target:
    """Answers the bytes of `like` with as many headers; without one, the completion with ten headers of ours."""
    # aiohttp adds these four itself.
    own = {"content-type", "content-length", "date", "server"}
    given = like.headers if like is not None else {f"x-gateway-header-{n}": f"value-{n}" for n in range(10)}
    headers = {name: value for name, value in given.items() if name.lower() not in own}
    answer = FixedAnswer(like.body if like is not None else COMPLETION.decode(), headers)
    path = stage.folder / "answer.json"
    path.write_bytes(msgspec.json.encode(answer))
    return await _bare(stage, "bare-constant", "constant", str(path))


async def _bare(stage: Stage, name: str, kind: str, argument: str) -> Target:
    port = free_port()
    server = stage.python(name, "gateway.load.bench.bare", kind, str(port), argument)
    url = f"http://127.0.0.1:{port}"
    return Target(server, url, await stage.until_answers(server, url + CHAT_PATH))


async def start_gateway(stage: Stage, upstream: str) -> Target:
    """A gateway without models on the server core: its own configuration, home and policy in the bench's folder."""
    port, admin = free_port(), free_port()
    config = write_gateway_files(stage.folder, port, admin, upstream)
    # What the shell says about a heavy backend must not reach this one; empty counts as unset.
    env = {"GATEWAY_HOME": str(stage.folder / "home"), "GATEWAY_CONFIG": ""}
    env |= dict.fromkeys(("HEAVY_BASE_URL", "HEAVY_API_KEY", "HEAVY_MODEL"), "")
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "--config", str(config)]
    server = stage.start("gateway", stage.server_core, command, env)
    url = f"http://127.0.0.1:{port}"
    return Target(server, url, await stage.until_answers(server, url + "/readyz", only_ok=True))


async def start_full_gateway(stage: Stage) -> str:
    """`gateway serve --with-stand-in` as an operator starts it, on its configured ports; returns the base URL.

    Not pinned: a real model takes the cores it is given.
    """
    config = load_config(None, os.environ)
    for port in (config.listen.port, config.admin.port):
        if not is_free(port):
            raise BenchError(
                f"port {port} is in use, so no gateway can be started; name the running one: "
                f"gateway bench models http://127.0.0.1:{config.listen.port}"
            )
    url = f"http://127.0.0.1:{config.listen.port}"
    command = [sys.executable, "-m", "gateway.cli.main", "serve", "--with-stand-in"]
    server = stage.start("gateway", None, command)
    await stage.until_answers(server, url + "/readyz", limit_s=120.0, only_ok=True)
    return url


def shipped_head() -> bool:
    """Is there a trained complexity head in this installation? Then the bench's policy reads it like the shipped one."""
    return bool(Heads().names())


def write_gateway_files(folder: Path, port: int, admin: int, upstream: str) -> Path:
    """`gateway.yaml` and the bench policy; returns the former."""
    policies = folder / "policies"
    policies.mkdir(exist_ok=True)
    head, rule = (_HEAD_SIGNAL, _HEAD_RULE) if shipped_head() else ("", "")
    (policies / "bench.yaml").write_text(_POLICY.format(model=MODEL, head=head, rule=rule))
    config = folder / "gateway.yaml"
    config.write_text(_GATEWAY.format(port=port, admin=admin, upstream=upstream))
    return config


async def sample(url: str, salt: int | None) -> Sample:
    """One answer of the bench's request. Raises BenchError unless it is a 200."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        try:
            headers = {"Content-Type": "application/json"}
            async with session.post(url + CHAT_PATH, data=body(MODEL, salt), headers=headers) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise BenchError(f"{url} answered {answer.status} to the bench's request: {text[:500]}")
                return Sample(answer.headers.get(RUNG_HEADER, ""), text, dict(answer.headers))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{url} did not answer the bench's request: {error or type(error).__name__}") from error


async def check_rungs(url: str, salt: int) -> Sample:
    """Makes sure that a new request (`salt` not used before) is proxied and a repeated one is an L1 hit; returns the hit."""
    fresh = await sample(url, salt)
    await sample(url, salt=None)
    hit = await sample(url, salt=None)
    if fresh.rung != "heavy" or hit.rung != "hit-l1":
        raise BenchError(
            f"a new request must be answered from rung heavy and a repeated one from hit-l1, not from {fresh.rung!r} and "
            f"{hit.rung!r}; does the policy behind {MODEL!r} store answers?"
        )
    return hit
