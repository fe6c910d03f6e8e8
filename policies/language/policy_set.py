"""The policies in force, and which one a request is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from policies.language.schema import Policy


class Claim(NamedTuple):
    """A name that a policy answers to. `tenant` is empty for all tenants."""

    name: str
    surface: str
    tenant: str


def claims(policy: Policy) -> Iterator[Claim]:
    """Every name that clients may use for this policy: its aliases and the backends it lets them name."""
    for tenant in policy.match.tenants or ("",):
        for surface in policy.match.surfaces:
            for name in (*policy.match.aliases, *policy.match.backends):
                yield Claim(name, surface, tenant)


class PolicySet:
    """An immutable set of policies without conflicts. Looking up costs two dict reads.

    `builtin` policies yield: they only answer to names that no file claims.
    """

    __slots__ = ("_for_all", "_for_tenant", "_names", "by_name", "files", "policies")

    def __init__(self, policies: Sequence[Policy], builtin: Sequence[Policy] = ()) -> None:
        claimed: dict[Claim, Policy] = {}
        for policy in policies:
            for claim in claims(policy):
                if claimed.setdefault(claim, policy) is not policy:
                    raise ValueError(f"{policy.policy} and {claimed[claim].policy} both claim {claim}")
        for policy in builtin:
            for claim in claims(policy):
                claimed.setdefault(claim, policy)
        #: What the files say, without the built-in ones.
        self.files = tuple(policies)
        self.policies = (*policies, *builtin)
        self.by_name = {policy.policy: policy for policy in (*builtin, *policies)}
        self._for_all = {(name, surface): policy for (name, surface, tenant), policy in claimed.items() if not tenant}
        self._for_tenant = {tuple(claim): policy for claim, policy in claimed.items() if claim.tenant}
        self._names: dict[str, dict[str, set[str]]] = {}
        for claim, policy in claimed.items():
            self._names.setdefault(claim.tenant, {}).setdefault(claim.name, set()).add(policy.policy)

    def resolve(self, alias: str, surface: str, tenant: str) -> Policy | None:
        """The policy for a client's `model`: one for this tenant first, then one for all; None = unknown model."""
        if self._for_tenant:
            policy = self._for_tenant.get((alias, surface, tenant))
            if policy is not None:
                return policy
        return self._for_all.get((alias, surface))

    def names(self, tenant: str, allowed: Iterable[str] | None = None) -> tuple[str, ...]:
        """The names this tenant may put in `model`, sorted. `allowed`: only of these policies (None = of all)."""
        permitted = None if allowed is None else frozenset(allowed)
        found: dict[str, set[str]] = {}
        for scope in ("", tenant) if tenant else ("",):
            for name, policies in self._names.get(scope, {}).items():
                found.setdefault(name, set()).update(policies)
        return tuple(sorted(name for name, owners in found.items() if permitted is None or owners & permitted))

    def __repr__(self) -> str:
        return f"PolicySet({', '.join(f'{policy.policy}@{policy.version}' for policy in self.policies)})"


def conflict(first: Policy, second: Policy) -> str | None:
    """Why two policies cannot both be in force, for a person; None when they can."""
    if first.policy == second.policy:
        return f"the policy name `{first.policy}` is taken"
    shared = sorted(set(claims(first)) & set(claims(second)))
    if not shared:
        return None
    name, surface, tenant = shared[0]
    more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
    return (
        f"`{name}` on the {surface} surface for {tenant or 'all tenants'}{more} belongs to the policy `{first.policy}`"
    )
