"""wrk as the generator, where Python would be the limit itself."""

from __future__ import annotations

import asyncio
import subprocess

import msgspec

from gateway.load.bench.bare import CHAT_PATH
from gateway.load.bench.generator import Measured, body
from gateway.load.bench.processes import BenchError, Server, Stage, cpu_of

#: `#n` after the question makes each request different; n starts at the second of the run, so that runs differ too.
_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer sk-test"
local n = os.time() %% 100000 * 1000000
local unique = %s
local head, tail = '%s', '%s'
request = function()
  n = n + 1
  return wrk.format(nil, nil, nil, head .. (unique and (" #" .. n) or "") .. tail)
end
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format('\\nRESULT {"requests":%%d,"duration_us":%%d,"p50_us":%%.1f,"p99_us":%%.1f,"failed":%%d}\\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""
#: Seconds at both ends of a run that the processor shares leave out.
_EDGE_S = 0.2


class _Result(msgspec.Struct):
    requests: int
    duration_us: int
    p50_us: float
    p99_us: float
    failed: int


class Wrk:
    """Runs wrk with one thread on the load core."""

    name = "wrk"

    def __init__(self, stage: Stage, upstream: Server, model: str) -> None:
        self._stage = stage
        self._upstream = upstream
        head, _, tail = body(model, 0).decode().partition(" #0")
        for unique in (True, False):
            script = stage.folder / f"post-{unique}.lua"
            script.write_text(_SCRIPT % (str(unique).lower(), head, tail))

    async def measure(self, server: Server, base_url: str, connections: int, seconds: float, unique: bool) -> Measured:
        """Load `base_url` for whole seconds, at least 1."""
        clock, whole_s = self._stage.clock, max(1, round(seconds))
        script = self._stage.folder / f"post-{unique}.lua"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{whole_s}s", "--latency", "-s", str(script)]
        process = await asyncio.create_subprocess_exec(
            # taskset becomes wrk by exec, so the process id is wrk's.
            *self._stage.command(self._stage.load_core, [*command, base_url + CHAT_PATH]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            await clock.sleep(_EDGE_S)
            begin, cpu_0 = clock.now(), server.cpu_s()
            load_0 = cpu_of(process.pid) + self._upstream.cpu_s()
            await clock.sleep(whole_s - 2 * _EDGE_S)
            span = clock.now() - begin
            busy = (server.cpu_s() - cpu_0) / span
            load_busy = (cpu_of(process.pid) + self._upstream.cpu_s() - load_0) / span
            out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        result = _parse(out.decode(errors="replace"))
        rate = result.requests / (result.duration_us / 1e6)
        p50, p99 = result.p50_us / 1000, result.p99_us / 1000
        return Measured(server.name, connections, rate, p50, p99, result.failed, busy, load_busy)


def _parse(text: str) -> _Result:
    for line in text.splitlines():
        if line.startswith("RESULT "):
            return msgspec.json.decode(line[7:], type=_Result)
    raise BenchError(f"wrk printed no result:\n{text[-1500:]}")
