"""The folder in which one gateway's processes meet: of this user only, and short enough to hold sockets."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from gateway.listening import CannotListen

#: Bytes of a Unix socket's path that the system takes, less the end mark.
_MOST_BYTES = 107 if sys.platform == "linux" else 103
#: The longest name that will stand in it; the model hosts of one gateway are numbered.
_LONGEST_NAME = "models-9999.sock"


def make_private_folder() -> Path:
    """A new folder under the temporary directory. Raises CannotListen when sockets in it would have too long a path, now or
    after many rolling restarts, and OSError."""
    folder = Path(tempfile.mkdtemp(prefix="gateway-"))
    excess = len(os.fsencode(folder / _LONGEST_NAME)) - _MOST_BYTES
    if excess > 0:
        folder.rmdir()
        raise CannotListen(
            f"cannot make sockets under {folder.parent}: its path is {excess} bytes too long for that; "
            "set TMPDIR to a folder with a shorter path"
        )
    return folder
