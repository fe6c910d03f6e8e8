"""`gateway`: one file a verb in this folder; this one only puts them together."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from pathlib import Path

import typer

from policies.core.errors import ConfigError

#: Verb -> (module, name of its typer app). Imported only when used, so that `gateway why` starts quickly.
GROUPS = {
    "backends": "gateway.cli.operate:backends_app",
    "cache": "gateway.cli.operate:cache_app",
    "keys": "gateway.cli.keys:app",
    "load": "gateway.cli.load:app",
    "bench": "gateway.cli.bench:app",
    "models": "gateway.cli.models:app",
    "model-server": "gateway.cli.model_server:app",
    "policy": "gateway.cli.policy:app",
    "route": "gateway.cli.route:app",
    "serve": "gateway.cli.serve:app",
    "why": "gateway.cli.operate:why_app",
    "workers": "gateway.cli.operate:workers_app",
}
#: What `gateway serve` starts; nobody calls these by hand.
PROCESSES = {
    "worker": "gateway.cli.process:worker_app",
    "model-host": "gateway.cli.process:model_host_app",
}
_STDERR = 2
HELP = {
    "backends": "See the backends and their breakers.",
    "cache": "See the caches.",
    "keys": "Make, list and revoke API keys.",
    "load": "Send open-loop load and report.",
    "bench": "Measure the gateway beside bare servers.",
    "models": "Fetch, build, list and verify the embedded models.",
    "model-server": "Serve models or a script as a backend.",
    "policy": "Check policy files.",
    "route": "Train and evaluate routing heads.",
    "serve": "Run the gateway.",
    "why": "Explain one recent request.",
    "workers": "See and restart the gateway's processes.",
}


def main() -> None:
    """Entry point of the command `gateway`."""
    open_standard_streams()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        _overview()
        return
    if arguments[0] in ("-V", "--version"):
        from gateway.version import version

        print(f"gateway {version()}")
        return
    verb = arguments[0]
    target = GROUPS.get(verb) or PROCESSES.get(verb)
    if target is None:
        import difflib

        near = difflib.get_close_matches(verb, GROUPS, 1)
        hint = f" Did you mean `gateway {near[0]}`?" if near else ""
        print(f"gateway: there is no verb {verb!r}.{hint} `gateway --help` lists them.", file=sys.stderr)
        raise SystemExit(2)
    if verb == "serve":
        # One that comes before anybody takes it waits until then, instead of ending the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    module, _, name = target.partition(":")
    app: typer.Typer = getattr(import_module(module), name)
    try:
        app(args=arguments[1:], prog_name=f"gateway {verb}")
    except ConfigError as error:
        print("\n".join(error.problems), file=sys.stderr)
        raise SystemExit(2) from None


def open_standard_streams() -> None:
    """Give a standard stream that was closed by whoever started this process to /dev/null.

    Else the next socket gets its number: log lines would go to it, and event loops end the process when they close it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)
    # For these Python has put None, which is no file to write to.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for as long as the process lives
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  for as long as the process lives


def _overview() -> None:
    print("Usage: gateway VERB [OPTIONS]\n")
    width = max(map(len, GROUPS)) + 2
    for verb in GROUPS:
        print(f"  {verb:<{width}}{HELP[verb]}")
    print("\n`gateway VERB --help` explains a verb.")


if __name__ == "__main__":
    main()
