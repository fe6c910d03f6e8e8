"""Policy files: what makes sense and what does not, one file and several."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.core.errors import ConfigError
from policies.language.builtin import embeddings_policy
from policies.language.loader import load_policies, load_policy, parse_policy
from policies.language.policy_set import PolicySet
from policies.language.schema import Policy
from policies.language.semantics import Known, KnownBackend

KNOWN = Known(
    backends={
        "heavy": KnownBackend("heavy", frozenset({"chat"})),
        "light": KnownBackend("light", frozenset({"chat"})),
        "ranker": KnownBackend("light", frozenset({"tensor"})),
        "embed": KnownBackend("light", frozenset({"embeddings"})),
    },
    signal_kinds={"keywords": frozenset({"any"}), "length": frozenset({"tokens"}), "complexity": frozenset({"head"})},
    heads=frozenset({"complexity"}),
    signal_fault=lambda spec: ("any", "say which words") if spec.kind == "keywords" and not spec.any else None,
)

HEAD = "policy: p\nversion: 1\nmatch: {aliases: [auto]}\n"  # three lines
SIGNALS = "classify: {signals: {long: {kind: length, tokens: 9}, words: {kind: keywords, any: [x]}}}\n"  # the fourth
DEFAULT = "routes: [{name: all, to: light}]\n"
TENSOR = HEAD.replace("[auto]", "[auto], surfaces: [tensor]")
VECTORS = HEAD.replace("[auto]", "[auto], surfaces: [embeddings]")
RANKER = "routes: [{name: all, to: ranker}]\n"


def problems(text: str, known: Known = KNOWN) -> list[str]:
    try:
        parse_policy(Path("p.yaml"), text.encode(), known)
    except ConfigError as error:
        return error.problems
    return []


def routes(*lines: str) -> str:
    """The routes begin on line 6."""
    return HEAD + SIGNALS + "routes:\n" + "".join(f"  - {line}\n" for line in lines)


LAST = "{name: rest, to: light}"


def test_a_whole_policy_is_accepted():
    text = routes(
        "{name: a, when: {any: [{signal: long, at_least: 1}, {not: {signal: words, below: 0.5}}]}, to: heavy}",
        "{name: b, when: {signal: long, at_least: 0.2, below: 0.9}, to: canned, answer: {text: no}}",
        "{name: c, when: {signal: words, at_least: 1}, to: heavy}",
        LAST,
    )
    assert problems(text + "ladder: [light, default]\ndefault_answer: {text: later}\n") == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # routes
        (HEAD, "p.yaml:1:1: the default route is missing"),
        (HEAD + "routes: []\n", "p.yaml:4:9: the default route is missing"),
        (
            routes("{name: a, when: {signal: long, at_least: 1}, to: heavy}"),
            "p.yaml:6:5: the default route is missing: the last route must have no `when`",
        ),
        (routes(LAST, "{name: b, to: heavy}"), "p.yaml:7:5: the route `b` is never reached: `rest` above it always matches"),
        (
            routes(
                "{name: a, when: {signal: long, at_least: 1}, to: heavy}",
                "{name: b, when: {signal: long, at_least: 1}, to: light}",
                LAST,
            ),
            "p.yaml:7:21: the route `b` is never reached: `a` above it has the same condition",
        ),
        (
            routes("{name: rest, when: {signal: long, at_least: 1}, to: heavy}", LAST),
            "p.yaml:7:12: a route `rest` stands above already",
        ),
        (routes("{name: a, to: hevy}"), "p.yaml:6:19: there is no backend `hevy`; did you mean `heavy`?"),
        (routes("{name: a, to: ranker}"), "p.yaml:6:19: the backend `ranker` serves tensor, but this policy is for chat"),
        (routes("{name: a, to: canned}"), "p.yaml:6:5: the route `a` goes to `canned` and so needs an `answer`"),
        (routes("{name: a, to: canned, answer: {}}"), "p.yaml:6:35: this answer is empty"),
        (routes("{name: a, to: light, answer: {text: x}}"), "p.yaml:6:26: `answer` belongs only to a route with `to: canned`"),
        (routes("{name: a, to: light, split: 3}"), "p.yaml:6:26: `split` is not available in this version"),
        # conditions
        (routes("{name: a, when: {}, to: heavy}", LAST), "p.yaml:6:21: this condition is empty"),
        (routes("{name: a, when: {at_least: 1}, to: heavy}", LAST), "this condition needs `signal: NAME` beside it"),
        (routes("{name: a, when: {signal: long}, to: heavy}", LAST), "p.yaml:6:21: what should the signal `long` be?"),
        (
            routes("{name: a, when: {signal: lng, at_least: 1}, to: heavy}", LAST),
            "p.yaml:6:30: there is no signal `lng` under `classify.signals`; did you mean `long`?",
        ),
        (
            routes("{name: a, when: {signal: long, at_least: 1, any: [{signal: words, below: 1}]}, to: heavy}", LAST),
            "p.yaml:6:21: a condition has one form, this has `signal` and `any`",
        ),
        (routes("{name: a, when: {all: []}, to: heavy}", LAST), "p.yaml:6:27: `all` is empty; list the conditions"),
        (
            routes("{name: a, when: {all: [{signal: long, at_least: 1}], below: 1}, to: heavy}", LAST),
            "`below` belongs beside `signal`, not beside `all`",
        ),
        (
            routes("{name: a, when: {not: {any: [{signal: long, at_least: 0.6, below: 0.5}]}}, to: heavy}", LAST),
            "p.yaml:6:34: no score is at least 0.6 and below 0.5: this never matches",
        ),
        (routes("{name: a, when: {signal: long, below: 0}, to: heavy}", LAST), "no score is below 0"),
        (routes("{name: a, when: {signal: long, at_least: 0}, to: heavy}", LAST), "every score is at least 0"),
        (routes("{name: a, when: {signal: long, at_least: 30}, to: heavy}", LAST), "`routes[0].when.at_least` must be at most 1"),
        # signals
        (HEAD + "classify: {signals: {x: {kind: keyword}}}\n" + DEFAULT, "p.yaml:4:32: there is no signal kind `keyword`; did you mean `keywords`?"),
        (HEAD + "classify: {signals: {x: {kind: length, any: [a]}}}\n" + DEFAULT, "p.yaml:4:40: `any` means nothing to the signal kind `length`; it reads tokens"),
        (HEAD + "classify: {signals: {x: {kind: complexity, head: compl}}}\n" + DEFAULT, "p.yaml:4:50: there is no trained head `compl`; did you mean `complexity`?"),
        (HEAD + "classify: {signals: {x: {kind: keywords}}}\n" + DEFAULT, "p.yaml:4:25: say which words"),
        # ladder, answers, cache, match
        (HEAD + DEFAULT + "ladder: [heavy, light, heavy]\n", "p.yaml:5:24: the ladder goes in a circle: heavy -> light -> heavy"),
        (HEAD + DEFAULT + "ladder: []\n", "p.yaml:5:9: `ladder` must not be empty"),
        (HEAD + DEFAULT + "ladder: [heavy, lite]\n", "p.yaml:5:17: `lite` is no value of `ladder[1]`; did you mean `light`?"),
        (HEAD + DEFAULT + "ladder: [heavy]\ndefault_answer: {text: x}\n", "p.yaml:6:1: this answer is never used"),
        (HEAD + DEFAULT + "default_answer: {tensors: {a: [1]}}\n", "p.yaml:5:17: this policy is for chat, so its answer needs `text:`"),
        (HEAD.replace("[auto]", "[auto], surfaces: [chat, tensor]") + DEFAULT + "default_answer: {text: x, tensors: {a: [[1, 2], [3]]}}\n", "p.yaml:5:40: the tensor `a` has rows of different lengths"),
        (HEAD.replace("[auto]", "[auto], surfaces: [chat, tensor]") + DEFAULT + "default_answer: {text: x, tensors: {a: [1, x]}}\n", "numbers and text side by side"),
        (HEAD.replace("[auto]", "[auto], surfaces: [chat, tensor]") + DEFAULT + "default_answer: {text: x, tensors: {a: [{}]}}\n", "holds something other than numbers"),
        (HEAD.replace("[auto]", "[e], surfaces: [embeddings]") + SIGNALS + "routes: [{name: a, when: {signal: long, below: 1}, to: embed}, {name: b, to: embed}]\n", "p.yaml:5:20: embeddings never change model: such a policy has one route"),
        (HEAD + DEFAULT + "default_answer: {text: x, tensors: {a: [1]}}\n", "p.yaml:5:27: this policy is for chat, where `tensors:` are never sent"),
        (TENSOR + RANKER + "default_answer: {text: x, tensors: {a: [1]}}\n", "p.yaml:5:18: this policy is for tensors, where `text:` is never sent"),
        (TENSOR + RANKER + "timeouts: {idle: 3s}\n", "p.yaml:5:1: `timeouts` limits the streams of chat; this policy is for tensor"),
        (TENSOR + SIGNALS + "routes: [{name: a, when: {signal: long, below: 1}, to: ranker}, {name: b, to: ranker}]\n", "p.yaml:5:20: signals read the text of a chat and say nothing about tensor"),
        (VECTORS + "routes: [{name: a, to: canned, answer: {text: x}}]\n", "p.yaml:4:24: embeddings come from a model"),
        (VECTORS + "routes: [{name: a, to: embed}]\ndefault_answer: {text: x}\n", "p.yaml:5:1: embeddings have no default answer"),
        (VECTORS + "routes: [{name: a, to: embed}]\ntimeouts: {total: 3s}\n", "p.yaml:5:1: `timeouts` limits the streams of chat; this policy is for embeddings"),
        (HEAD + DEFAULT + "ladder: [heavy]\ncache: {result: {stale: 2h}}\n", "p.yaml:6:18: older answers than ttl + swr are used by the ladder's `stale` rung only"),
        (HEAD + DEFAULT + "cache: {result: {ttl: 2h}}\n", "`stale` must be at least ttl + swr (7260s)"),
        (HEAD + DEFAULT + "cache: {user_tensor: u}\n", "p.yaml:5:9: `user_tensor` is only read with `scope: user`"),
        (HEAD.replace("[auto]", "[auto, auto]") + DEFAULT, "p.yaml:3:25: `auto` stands here twice"),
        (HEAD.replace("[auto]", "[auto], backends: [hevy]") + DEFAULT, "p.yaml:3:37: there is no backend `hevy`; did you mean `heavy`?"),
        (HEAD.replace("[auto]", "[auto], surfaces: [chat, embeddings]") + DEFAULT, "p.yaml:3:36: embeddings never change model"),
        (HEAD.replace("1", "one") + DEFAULT, "p.yaml:2:10: `version` must be a whole number, not `one`"),
        (HEAD.replace("[auto]", "[]") + DEFAULT, "p.yaml:3:18: `match.aliases` must not be empty"),
        (HEAD.replace("[auto]", "[light], surfaces: [tensor]") + DEFAULT.replace("light", "heavy"), "there is no heavy backend that serves tensor"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_line(text, line):
    found = problems(text)
    assert len(found) == 1, found
    assert line in found[0]


@pytest.mark.parametrize(
    "text",
    [
        HEAD + DEFAULT + "ladder: [heavy]\n",  # the default of `stale` was not asked for
        HEAD + DEFAULT + "ladder: [heavy]\ncache: {result: {ttl: 2h, swr: 0s, stale: 2h}}\n",
        TENSOR + RANKER + "default_answer: {tensors: {a: [true, false]}}\n",
        HEAD.replace("[auto]", "[auto], surfaces: [chat, tensor]")
        + SIGNALS
        + "timeouts: {idle: 3s}\nroutes: [{name: a, when: {signal: long, below: 1}, to: heavy}, {name: b, to: light}]\n"
        + "default_answer: {text: x, tensors: {a: [1]}}\n",
    ],
)
def test_what_has_a_meaning_is_accepted(text):
    assert problems(text) == []


def test_every_kind_of_mistake_in_one_go():
    """Typo in a key, duplicate key, bad unit, unknown backend, unreachable rule, missing default: all at once."""
    found = problems(
        "policy: p\n"
        "version: 1\n"
        "match: {aliases: [auto]}\n"
        "deadlin: 3s\n"
        "timeouts: {idle: 15, total: 10min}\n"
        "hedge: {}\n"
        "version: 2\n"
        + SIGNALS
        + "routes:\n"
        + "  - {name: a, when: {signal: long, at_least: 1}, to: hevy}\n"
        + "  - {name: b, when: {signal: long, at_least: 1}, to: light}\n"
        + "  - {name: c, when: {signal: wrds, at_least: 1}, to: light}\n"
    )
    assert [line.split(": ")[0].removeprefix("p.yaml:") for line in found] == [
        "4:1", "5:18", "5:29", "6:1", "7:1", "10:54", "11:21", "12:5", "12:30",
    ]  # fmt: skip
    assert all("did you mean" in found[index] for index in (0, 1, 2, 5, 8))


def test_one_mistake_does_not_bring_others_along():
    """The typo in `when` must not make the routes below it look unreachable."""
    found = problems(routes("{name: a, wehn: {signal: long, at_least: 1}, to: heavy}", LAST))
    assert found == ["p.yaml:6:15: unknown key `wehn` in `routes[0]`; did you mean `when`?"]


def test_without_known_names_only_the_file_itself_is_checked():
    assert problems(HEAD + "routes: [{name: all, to: anything}]\n", Known()) == []


# ------------------------------------------------------------------------------------------------------ several files


def write(folder: Path, name: str, policy: str, match: str, version: int = 1) -> Path:
    path = folder / name
    path.write_text(f"policy: {policy}\nversion: {version}\nmatch: {match}\n{DEFAULT}")
    return path


def test_files_of_a_folder_become_a_set(tmp_path):
    write(tmp_path, "a.yaml", "a", "{aliases: [auto, chat], backends: [heavy]}")
    write(tmp_path, "b.yml", "b", "{aliases: [auto], tenants: [shop]}")
    (tmp_path / "README.md").write_text("# no policy")
    (tmp_path / ".hidden.yaml").write_text("nonsense: [")
    policies = load_policies(tmp_path, KNOWN)
    assert [policy.policy for policy in policies.policies] == ["a", "b"]
    assert policies.resolve("auto", "chat", "shop").policy == "b"
    assert policies.resolve("auto", "chat", "other").policy == "a"
    assert policies.resolve("heavy", "chat", "shop").policy == "a"
    assert policies.resolve("auto", "tensor", "shop") is None
    assert policies.resolve("light", "chat", "shop") is None
    assert policies.names("shop") == ("auto", "chat", "heavy")
    assert policies.names("shop", ["b"]) == ("auto",)
    assert policies.names("other", ["b"]) == ()


def test_problems_of_all_files_come_together(tmp_path):
    write(tmp_path, "a.yaml", "a", "{aliases: [x, auto]}")
    write(tmp_path, "b.yaml", "b", "{aliases: [y, auto], surfaces: [chat]}")
    write(tmp_path, "c.yaml", "a", "{aliases: [z]}")
    (tmp_path / "d.yaml").write_text("{")
    with pytest.raises(ConfigError) as caught:
        load_policies(tmp_path, KNOWN)
    assert [line.removeprefix(f"{tmp_path}/").split(" ")[0] for line in caught.value.problems] == [
        "b.yaml:3:22:", "c.yaml:1:9:", "d.yaml:1:2:",
    ]  # fmt: skip
    assert "`auto` on the chat surface for all tenants belongs to the policy `a` (a.yaml)" in caught.value.problems[0]
    assert "the policy name `a` is taken (a.yaml)" in caught.value.problems[1]


def test_the_same_alias_for_other_traffic_is_no_conflict(tmp_path):
    write(tmp_path, "a.yaml", "a", "{aliases: [auto]}")
    write(tmp_path, "b.yaml", "b", "{aliases: [auto], tenants: [shop]}")
    (tmp_path / "c.yaml").write_text(
        "policy: c\nversion: 1\nmatch: {aliases: [auto], surfaces: [tensor]}\nroutes: [{name: r, to: ranker}]\n"
    )
    assert len(load_policies(tmp_path, KNOWN).policies) == 3


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="there is no policy file"):
        load_policies(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_policies(tmp_path / "none")


def test_links_must_stay_in_the_folder(tmp_path):
    outside = write(tmp_path, "outside.yaml", "a", "{aliases: [auto]}")
    folder = tmp_path / "policies"
    (folder / "..data").mkdir(parents=True)
    (folder / "a.yaml").symlink_to(outside)
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    with pytest.raises(ConfigError) as caught:
        load_policies(folder)
    assert "leads out of" in caught.value.problems[0]
    assert "loop.yaml:1:1: cannot be read" in caught.value.problems[1]
    (folder / "loop.yaml").unlink()
    (folder / "a.yaml").unlink()
    write(folder / "..data", "a.yaml", "a", "{aliases: [auto]}")
    (folder / "a.yaml").symlink_to("..data/a.yaml")
    assert len(load_policies(folder).policies) == 1


def test_builtin_policies_give_way():
    builtin = embeddings_policy("embed", ["text-embedding", "embed"])
    alone = PolicySet((), (builtin,))
    assert alone.resolve("embed", "embeddings", "t") is builtin
    assert alone.resolve("text-embedding", "embeddings", "t") is builtin
    assert alone.resolve("embed", "chat", "t") is None
    own = parse_policy(
        Path("e.yaml"),
        b"policy: mine\nversion: 1\nmatch: {aliases: [embed], surfaces: [embeddings]}\nroutes: [{name: r, to: embed}]\n",
        KNOWN,
    ).policy
    both = PolicySet((own,), (builtin,))
    assert both.resolve("embed", "embeddings", "t") is own
    assert both.resolve("text-embedding", "embeddings", "t") is builtin


def test_a_set_never_holds_a_conflict():
    policy = parse_policy(Path("p.yaml"), (HEAD + DEFAULT).encode()).policy
    other = parse_policy(Path("q.yaml"), (HEAD.replace("p\n", "q\n", 1) + DEFAULT).encode()).policy
    with pytest.raises(ValueError, match="both claim"):
        PolicySet((policy, other))


def test_load_policy_reads_one_file(tmp_path):
    path = write(tmp_path, "a.yaml", "a", "{aliases: [auto]}", version=7)
    policy = load_policy(path)
    assert isinstance(policy, Policy)
    assert (policy.policy, policy.version, policy.deadline) == ("a", 7, 30.0)
