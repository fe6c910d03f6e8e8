"""ONNX Runtime sessions with the defaults of this project, and the one thread that each of them runs on.

Why these defaults (measured on two cores): a spinning thread pool burns a core while idle and loses 40 % as soon as
anything else wants one, so spinning is off; `session.run` releases the GIL, so one thread of our own keeps the event loop
free; a run is stopped between two nodes by a flag that belongs to that run alone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import onnxruntime as ort

from backends.onnx.manifest import ModelError
from policies.core.deadline import Deadline
from policies.core.errors import GatewayError, LimitReached, ModelFailed, ModelNotReady

P = ParamSpec("P")
T = TypeVar("T")

#: Short names for configuration files.
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


class ProviderUnavailable(ModelError):
    """The execution provider that was asked for did not load."""


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """How a model runs. `provider` is a short name of PROVIDERS; `provider_options` go to it unaltered."""

    provider: str = "cpu"
    provider_options: dict[str, str] = field(default_factory=dict)
    intra_threads: int = 1
    #: Runs that usually take no longer than this (seconds) are made on the event loop: handing them to a thread and back
    #: would cost more. For processes whose loop has nothing else to do; 0 = never.
    on_loop_s: float = 0.0
    #: May nodes that the provider lacks run on the CPU? Without it, such a graph fails at load instead of being slow.
    allow_cpu_fallback: bool = False


def full_provider_name(short: str, available: Sequence[str]) -> str:
    """ONNX Runtime's name for a short one, if this installation has it. Raises ProviderUnavailable."""
    name = PROVIDERS.get(short)
    if name is None:
        raise ProviderUnavailable(f"unknown provider {short!r}; use one of {', '.join(PROVIDERS)}")
    if name not in available:
        raise ProviderUnavailable(
            f"provider {short!r} is not in this installation (it has {', '.join(available)}); "
            "install the `gpu` extra in place of `cpu`, or set `provider: cpu`"
        )
    return name


def create_session(
    graph: Path | bytes, settings: SessionSettings | None = None, *, told: str = "the graph"
) -> ort.InferenceSession:
    """Load a graph from a file, or from the bytes of one (`told` is what messages call it then).

    Slow (up to seconds): call it in a thread; it releases the GIL.
    Raises ProviderUnavailable when the provider did not really load (ONNX Runtime itself falls back silently), ModelError
    when the graph cannot be loaded.
    """
    settings = settings or SessionSettings()
    path, source = (told, graph) if isinstance(graph, bytes) else (str(graph), str(graph))
    provider = full_provider_name(settings.provider, ort.get_available_providers())
    options = ort.SessionOptions()
    options.intra_op_num_threads = settings.intra_threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3  # errors; every failure also comes as an exception
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    if provider != PROVIDERS["cpu"] and not settings.allow_cpu_fallback:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        session = ort.InferenceSession(source, options, providers=[(provider, settings.provider_options)])
    except Exception as error:  # ONNX Runtime's errors share no base below Exception
        raise ModelError(f"{path} cannot be loaded on {provider}: {first_line(error)}") from error
    session.disable_fallback()
    loaded = session.get_providers()
    if loaded[0] != provider:
        raise ProviderUnavailable(
            f"{provider} failed to load for {path} (loaded: {', '.join(loaded)}); see `gateway doctor`"
        )
    return session


def provider_of(session: ort.InferenceSession) -> str:
    """The execution provider that runs the session; part of a loaded model's fingerprint."""
    provider: str = session.get_providers()[0]
    return provider


def check_names(session: ort.InferenceSession, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise ModelError unless the graph has exactly these inputs and at least these outputs."""
    found_inputs = {i.name for i in session.get_inputs()}
    found_outputs = {o.name for o in session.get_outputs()}
    if found_inputs != set(inputs) or not found_outputs >= set(outputs):
        raise ModelError(
            f"the graph reads {sorted(found_inputs)} and gives {sorted(found_outputs)}, "
            f"but {sorted(inputs)} and {sorted(outputs)} are expected; rebuild the model"
        )


def first_line(error: BaseException) -> str:
    """The first 200 characters of the first line: ONNX Runtime appends stack traces."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:200]


class OneThread:
    """Runs functions one after another on a thread of its own, with a bounded queue in front of it.

    Belongs to one event loop. `backend` names whom a ModelFailed is about. `on_loop_s`: as in SessionSettings.
    """

    def __init__(self, backend: str, max_waiting: int = 64, on_loop_s: float = 0.0) -> None:
        self._backend = backend
        self._max_waiting = max_waiting
        self._on_loop_s = on_loop_s
        #: What a run takes: the longest lately, forgotten slowly. Starts as too long to be made on the loop.
        self._usual_s = float("inf")
        self._waiting = 0
        self._closed = False
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"onnx-{backend}")

    @property
    def waiting(self) -> int:
        """Calls that have not returned yet, the running one included."""
        return self._waiting

    async def run(
        self, fn: Callable[Concatenate[ort.RunOptions, P], T], deadline: Deadline, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`fn(run_options, *args)` on the thread; `fn` gives `run_options` to each `session.run` it makes.

        When the deadline passes or the caller is cancelled, a call still queued is dropped and a running one is told to
        stop at its next node. Raises LimitReached, DeadlineExceeded, ModelNotReady once closed, ModelFailed for anything
        `fn` raises that is not a GatewayError.
        """
        if self._closed:
            raise ModelNotReady(f"the model of {self._backend!r} has been unloaded")
        if self._waiting >= self._max_waiting:
            raise LimitReached(f"{self._waiting} calls already wait for {self._backend!r}", retry_after_s=1.0)
        options = ort.RunOptions()
        self._waiting += 1
        try:
            async with deadline.timeout():
                if self._waiting == 1 and self._usual_s <= self._on_loop_s:
                    return self._timed(fn, deadline, options, *args, **kwargs)
                job = self._executor.submit(lambda: self._timed(fn, deadline, options, *args, **kwargs))
                return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            options.terminate = True
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                # Nobody cancelled us: `aclose` dropped the queued call.
                raise ModelNotReady(f"the model of {self._backend!r} has been unloaded") from None
            raise
        except GatewayError:
            options.terminate = True  # a deadline has passed; harmless when the run is over
            raise
        except Exception as error:
            raise ModelFailed(f"a run failed: {first_line(error)}", self._backend) from error
        finally:
            self._waiting -= 1

    def _timed(
        self,
        fn: Callable[Concatenate[ort.RunOptions, P], T],
        deadline: Deadline,
        options: ort.RunOptions,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        began = deadline.clock.now()
        result = fn(options, *args, **kwargs)
        seconds = deadline.clock.now() - began
        usual = self._usual_s
        self._usual_s = seconds if seconds >= usual or usual == float("inf") else usual + 0.05 * (seconds - usual)
        return result

    async def aclose(self) -> None:
        """Finish what runs, drop what waits, end the thread."""
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)


__all__ = [
    "PROVIDERS",
    "OneThread",
    "ProviderUnavailable",
    "SessionSettings",
    "check_names",
    "create_session",
    "first_line",
    "full_provider_name",
    "provider_of",
]
