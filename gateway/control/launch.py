"""How the supervisor starts its processes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.control.seat import Process


async def launch(hub: Path, verb: str, name: str, more: Sequence[str], fds: Sequence[int]) -> Process:
    """Start `gateway VERB` as the process `name`, which finds the supervisor at the socket `hub` and inherits `fds`.

    Raises OSError.
    """
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.cli.main", verb,
        "--hub", str(hub), "--name", name, "--supervisor", str(os.getpid()), *more,
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=tuple(fds),
        # A Ctrl-C at the terminal is the supervisor's to handle: it would end its processes before their time.
        start_new_session=True,
    )  # fmt: skip
