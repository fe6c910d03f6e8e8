"""The names that policies may use, gathered from the operator's configuration and the registries."""

from __future__ import annotations

from gateway.config import Config, known_backends
from policies.language.schema import SignalSpec
from policies.language.semantics import Known
from routing.heads import Heads
from routing.registry import SIGNALS
from routing.signals.base import SpecError


def known_names(config: Config, heads: Heads) -> Known:
    """What a policy of this gateway may name."""

    def fault(spec: SignalSpec) -> tuple[str, str] | None:
        signal = SIGNALS.get(spec.kind)
        try:
            if signal is not None:
                signal.compile(spec, heads)
        except SpecError as error:
            return error.key, str(error)
        return None

    return Known(
        backends=known_backends(config),
        signal_kinds={kind: signal.reads for kind, signal in SIGNALS.items()},
        heads=frozenset(heads.names()),
        signal_fault=fault,
    )
