"""Policy files -> policies, or every mistake in all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.core.errors import ConfigError
from policies.language.check import check
from policies.language.policy_set import PolicySet, claims, conflict
from policies.language.problems import Position, Problems
from policies.language.schema import Policy
from policies.language.semantics import Known, check_policy
from policies.language.yaml_reader import Node, position, read_bytes, read_yaml

SUFFIXES = (".yaml", ".yml")
MAX_FILES = 500


@dataclass(frozen=True, slots=True)
class PolicyFile:
    """A policy and the file it was read from."""

    path: Path
    data: bytes
    policy: Policy
    root: Node

    def blame(self, other: Policy) -> Position:
        """Where this file says what conflicts with `other`."""
        if other.policy == self.policy.policy:
            return position(self.root, ("policy",))
        names = {claim.name for claim in set(claims(self.policy)) & set(claims(other))}
        for key in ("aliases", "backends"):
            for index, name in enumerate(getattr(self.policy.match, key)):
                if name in names:
                    return position(self.root, ("match", key, index))
        return position(self.root, ("match",))


def parse_policy(path: Path, data: bytes, known: Known | None = None) -> PolicyFile:
    """Read one policy from its bytes; `path` is for messages. Raises ConfigError with every problem."""
    problems = Problems(str(path))
    root = read_yaml(data, problems)
    if root is None:
        raise ConfigError(problems.lines())
    policy = check(root, Policy, problems)
    check_policy(policy, root, problems, known or Known())
    problems.raise_any()
    return PolicyFile(path, data, policy, root)


def load_policy(path: Path, known: Known | None = None) -> Policy:
    """Read one policy file. Without `known`, names of backends, signals and heads are not checked."""
    return parse_policy(path, read_bytes(path), known).policy


def policy_paths(directory: Path) -> list[Path]:
    """The policy files of a folder, by name: `*.yaml` and `*.yml`, no hidden ones. Raises ConfigError."""
    try:
        paths = sorted(p for p in directory.iterdir() if p.suffix in SUFFIXES and not p.name.startswith("."))
    except OSError as error:
        raise ConfigError([f"{directory}:1:1: the policies folder cannot be read: {error.strerror}"]) from None
    if len(paths) > MAX_FILES:
        raise ConfigError([f"{directory}:1:1: more than {MAX_FILES} policy files"])
    return paths


def inside_bytes(path: Path, directory: Path) -> bytes:
    """The bytes of a file of `directory`. Raises ConfigError; a link that leads out of that folder is refused."""
    try:
        inside = path.resolve(strict=True).is_relative_to(directory.resolve(strict=True))
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or "its links lead in a circle"
        raise ConfigError([f"{path}:1:1: cannot be read: {reason}"]) from None
    if not inside:
        raise ConfigError([f"{path}:1:1: this link leads out of {directory}; copy the file instead"])
    return read_bytes(path)


def load_policies(directory: Path, known: Known | None = None, builtin: Sequence[Policy] = ()) -> PolicySet:
    """Read every policy file of a folder. Raises ConfigError with the problems of all files together."""
    problems: list[str] = []
    files: list[PolicyFile] = []
    paths = policy_paths(directory)
    if not paths:
        raise ConfigError([f"{directory}:1:1: there is no policy file (*.yaml) in this folder"])
    for path in paths:
        try:
            file = parse_policy(path, inside_bytes(path, directory), known)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        clashes = conflicts(file, files)
        problems.extend(clashes)
        if not clashes:
            files.append(file)
    if problems:
        raise ConfigError(problems)
    return PolicySet([file.policy for file in files], builtin)


def conflicts(file: PolicyFile, others: Sequence[PolicyFile]) -> list[str]:
    """Complaints, in `file`'s name, about what it and `others` both claim."""
    complaints = []
    for other in others:
        reason = conflict(other.policy, file.policy)
        if reason is not None:
            at = file.blame(other.policy)
            complaints.append(f"{file.path}:{at.line}:{at.column}: {reason} ({other.path.name})")
    return complaints
