"""The policies in force, kept up with their folder.

Each file has a last good version of its own:

    the file is ...                      in force
    good                                 its new version
    bad                                  its last good version; the others are not held up
    good, but claims what another has    the one that changed: its last good version (of two that changed, the later by
                                         name), until the other gives the claim up
    perhaps half-written                 its last good version, until the file has not changed for a second
    gone                                 nothing of it
    (all of them gone)                   everything as before: a folder that vanished is not a wish to serve nothing

With a `keep` folder the good versions are on disk as well, so that a restart with a bad file serves its last good one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from policies.core.clock import Clock
from policies.core.errors import ConfigError
from policies.core.events import PolicyChanged
from policies.language.loader import PolicyFile, conflicts, inside_bytes, parse_policy, policy_paths
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy
from policies.language.semantics import Known

#: A file that looks half-written is taken as it is once it has not changed for this long.
SETTLE_S = 1.0


@dataclass(slots=True)
class _Seen:
    """A file as it was last looked at. `since`: when these bytes were first seen."""

    digest: bytes
    since: float
    #: Have these bytes been judged? Then there is no need to do it again.
    done: bool = False


class PolicyStore:
    """`current` is replaced as a whole, never changed; requests under way keep the set they began with.

    directory
        The folder of policy files.
    known
        Names that policies may use.
    builtin
        Policies for names that no file claims.
    keep
        Folder for last good versions; None = do not keep them.
    """

    def __init__(
        self, directory: Path, known: Known, clock: Clock, builtin: Sequence[Policy] = (), keep: Path | None = None
    ) -> None:
        self.directory = directory
        self.current = PolicySet((), builtin)
        #: File name -> why the file on disk is not what is in force. Empty = all is well.
        self.problems: dict[str, list[str]] = {}
        #: Why the folder cannot be read, and why last good versions cannot be kept; empty = all is well.
        self.folder_problem = ""
        self.keep_problem = ""
        #: Does a file wait to be whole? Then `reload` wants to be called again after SETTLE_S.
        self.unsettled = False
        self._known = known
        self._clock = clock
        self._builtin = tuple(builtin)
        self._keep = keep
        self._good: dict[str, PolicyFile] = {}
        #: Sound files that wait for another one to give up what both claim.
        self._waiting: dict[str, PolicyFile] = {}
        self._seen: dict[str, _Seen] = {}

    @classmethod
    def open(
        cls, directory: Path, known: Known, clock: Clock, builtin: Sequence[Policy] = (), keep: Path | None = None
    ) -> PolicyStore:
        """A store that is ready to serve. Raises ConfigError, with everything that is wrong, when some file has neither
        a good version nor a kept one, or when there is no file at all."""
        store = cls(directory, known, clock, builtin, keep)
        store._restore()
        store.reload(settle_s=0.0)
        missing = [line for name, lines in store.problems.items() if name not in store._good for line in lines]
        if missing or not store._good:
            raise ConfigError(missing or [f"{directory}:1:1: there is no policy file (*.yaml) in this folder"])
        return store

    def reload(self, settle_s: float = SETTLE_S) -> list[PolicyChanged]:
        """Take up what has changed in the folder. Returns what became of each changed policy; never raises."""
        self.unsettled = False
        try:
            paths = policy_paths(self.directory)
        except ConfigError as error:
            return self._folder_problem(error.problems[0])
        if not paths and self._good:
            return self._folder_problem(f"{self.directory}:1:1: no policy file is left; the last good ones hold")
        self.folder_problem = ""
        before, reported = dict(self._good), dict(self.problems)
        names = {path.name for path in paths}
        for record in (self._good, self._waiting, self._seen, self.problems):
            for name in record.keys() - names:
                del record[name]
        changed: dict[str, PolicyFile] = {}
        for path in paths:
            self._look(path, settle_s, changed)
        self._merge(changed)
        if self._good != before:
            self.current = PolicySet([self._good[name].policy for name in sorted(self._good)], self._builtin)
            self._keep_good(before)
        return self._events(before, reported)

    def notices(self) -> list[str]:
        """Everything that is not as the files say, one line each, for the log and the admin listener."""
        lines = [line for _, lines in sorted(self.problems.items()) for line in lines]
        return [line for line in (self.folder_problem, self.keep_problem) if line] + lines

    # ------------------------------------------------------------------------------------------------- one file

    def _look(self, path: Path, settle_s: float, changed: dict[str, PolicyFile]) -> None:
        """Read one file, if it is another than last time, into `changed` or `problems`."""
        name = path.name
        try:
            data = inside_bytes(path, self.directory)
        except ConfigError as error:
            self._seen.pop(name, None)
            self._waiting.pop(name, None)
            self.problems[name] = error.problems
            return
        now = self._clock.now()
        digest = hashlib.blake2b(data, digest_size=16).digest()
        good = self._good.get(name)
        if good is not None and good.data == data:
            # As in force: perhaps a bad edit taken back.
            self._waiting.pop(name, None)
            self.problems.pop(name, None)
            self._seen[name] = _Seen(digest, now)
            return
        seen = self._seen.get(name)
        if seen is None or seen.digest != digest:
            seen = self._seen[name] = _Seen(digest, now)
        elif seen.done:
            return
        if _half_written(data, good) and now - seen.since < settle_s:
            self.unsettled = True
            return
        seen.done = True
        self._waiting.pop(name, None)
        try:
            changed[name] = parse_policy(path, data, self._known)
        except ConfigError as error:
            self.problems[name] = error.problems

    # ------------------------------------------------------------------------------------------------- all files

    def _merge(self, changed: dict[str, PolicyFile]) -> None:
        """Put the changed files in force; one that conflicts falls back to its last good version, until none does.
        Then those that waited for a claim, if it is free now."""
        while True:
            clash = _first_clash(self._good, changed)
            if clash is None:
                break
            name, lines = clash
            self.problems[name] = lines
            self._waiting[name] = changed.pop(name)
        for name in changed:
            self.problems.pop(name, None)
        self._good.update(changed)
        for name, file in sorted(self._waiting.items()):
            lines = conflicts(file, [other for key, other in self._good.items() if key != name])
            if lines:
                self.problems[name] = lines
            else:
                self._good[name] = self._waiting.pop(name)
                self.problems.pop(name, None)

    def _folder_problem(self, line: str) -> list[PolicyChanged]:
        if self.folder_problem == line:
            return []
        self.folder_problem = line
        return [PolicyChanged(policy="", version=0, outcome="refused", reason=line)]

    def _events(self, before: dict[str, PolicyFile], reported: dict[str, list[str]]) -> list[PolicyChanged]:
        events = [_event(file, "applied") for name, file in self._good.items() if before.get(name) is not file]
        gone = [(name, file) for name, file in before.items() if name not in self._good]
        events += [_event(file, "applied", f"{name} was removed") for name, file in gone]
        for name, lines in self.problems.items():
            if lines == reported.get(name):
                continue
            reason = lines[0] + (f" (and {len(lines) - 1} more)" if len(lines) > 1 else "")
            holds = self._good.get(name)
            if holds is not None:
                events.append(_event(holds, "refused", reason))
            else:
                events.append(PolicyChanged(policy=Path(name).stem, version=0, outcome="refused", reason=reason))
        return events

    # ------------------------------------------------------------------------------------------------- across restarts

    def _restore(self) -> None:
        """Take the kept versions of files that still exist as last good ones."""
        if self._keep is None or not self._keep.is_dir():
            return
        for kept in sorted(self._keep.glob("*.kept")):
            path = self.directory / kept.name.removesuffix(".kept")
            if not path.is_file() and not path.is_symlink():
                continue
            try:
                file = parse_policy(path, inside_bytes(kept, self._keep), self._known)
            except ConfigError:
                continue  # kept by another version, or for other backends: of no use now
            if not conflicts(file, list(self._good.values())):
                self._good[path.name] = file
        self.current = PolicySet([file.policy for file in self._good.values()], self._builtin)

    def _keep_good(self, before: dict[str, PolicyFile]) -> None:
        if self._keep is None:
            return
        try:
            self._keep.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, file in self._good.items():
                kept = self._keep / f"{name}.kept"
                if before.get(name) is not file or not kept.exists():
                    fresh = kept.with_suffix(".new")
                    fresh.write_bytes(file.data)
                    fresh.replace(kept)
            for name in before.keys() - self._good.keys():
                (self._keep / f"{name}.kept").unlink(missing_ok=True)
            self.keep_problem = ""
        except OSError as error:
            self.keep_problem = f"{self._keep}: last good versions cannot be kept for a restart: {error.strerror}"


def keep_folder(state_dir: Path, directory: Path) -> Path:
    """Where the last good versions of `directory` are kept: one folder for each, so that two gateways do not mix them."""
    return state_dir / "policies" / hashlib.blake2b(str(directory.resolve()).encode(), digest_size=8).hexdigest()


def _half_written(data: bytes, good: PolicyFile | None) -> bool:
    """Does a file look as if its writer were still at it? No line end at its end, or only the beginning of what it was."""
    return not data.endswith((b"\n", b"\r")) or (good is not None and good.data.startswith(data))


def _first_clash(good: dict[str, PolicyFile], changed: dict[str, PolicyFile]) -> tuple[str, list[str]] | None:
    """The first changed file that conflicts with one in force or with a changed one before it by name."""
    for name in sorted(changed):
        others = [file for other, file in good.items() if other not in changed]
        others += [file for other, file in changed.items() if other < name]
        lines = conflicts(changed[name], others)
        if lines:
            return name, lines
    return None


def _event(file: PolicyFile, outcome: str, reason: str = "") -> PolicyChanged:
    return PolicyChanged(policy=file.policy.policy, version=file.policy.version, outcome=outcome, reason=reason)
