"""The gate of a request: whether it is steered, decided once, at the end of its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from juice.engine.completion import ScoredToken
from juice.engine.report import GateReport
from juice.engine.steer import Steer
from juice.errors import RequestError
from juice.head_set import HeadSet
from juice.head_set.gates import GateRule, Signal
from juice.methods import scales_heads


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestGate:
    """What decides whether a request is steered; requests that share it share the decision.

    Args:
        signal: The number that decides.
        threshold: The least number at which the request is steered.
        without_context: The prompt without its context, for the signal `memory`.
    """

    signal: Signal
    threshold: float
    without_context: tuple[int, ...] = ()

    def decide(self, prompt_ids: Sequence[int], token: ScoredToken) -> GateReport:
        """Decide by the first new token of the run that the signal is about.

        Args:
            prompt_ids: The prompt.
            token: The token, with at least one alternative: the likeliest.
        """
        value = value_of(self.signal, prompt_ids, token)
        return GateReport(
            steers=value >= self.threshold,
            signal=self.signal,
            value=value,
            threshold=self.threshold,
        )


def value_of(signal: Signal, prompt_ids: Sequence[int], token: ScoredToken) -> float:
    """Return the value of a signal, from the first new token of the run that it is about."""
    likeliest, logprob = token.top[0]
    is_new = signal == "copied" and likeliest not in prompt_ids
    return 0.0 if is_new else math.exp(logprob)


def gate_of(
    steer: Steer,
    head_set: HeadSet,
    *,
    chat_template_sha256: str | None,
    without_context: tuple[int, ...] | None,
) -> RequestGate:
    """Return the gate of a request from the one of its head set.

    Args:
        steer: What the request asks for.
        head_set: The head set that it is steered by.
        chat_template_sha256: The hash of the chat template of the prompt; None for a plain prompt.
        without_context: The prompt without its context, where that is given apart.

    Raises:
        RequestError: The set has no gate for what the request asks for.
    """
    assert scales_heads(steer.method), "other methods have no gate"
    found = head_set.gate(steer.method)
    if found is None:
        reason = f"has no gate for method {steer.method!r}; `juice tune` measures one"
    elif steer.positions != "all":
        reason = "has a gate that was measured with all positions steered; steer all positions"
    elif (steer.beta_plus, steer.beta_minus) != (None, None) or steer.strength != 1:
        reason = "has a gate for its own betas at strength 1; drop strength and betas"
    elif found.chat_template_sha256 != chat_template_sha256:
        measured = "in a chat" if found.chat_template_sha256 else "on plain prompts"
        reason = f"has a gate that was measured {measured}, unlike this prompt; tune in this form"
    elif (rule := _usable(found.rules, without_context)) is None:
        reason = "has a gate that needs the context apart; give it as `context`"
    else:
        return RequestGate(
            signal=rule.signal,
            threshold=rule.threshold,
            without_context=(without_context or ()) if rule.signal == "memory" else (),
        )
    raise RequestError(
        f"the head set {head_set.name!r} {reason}, or turn the gate off (gate=off)",
        param="steer.gate",
    )


def _usable(rules: Sequence[GateRule], without_context: tuple[int, ...] | None) -> GateRule | None:
    return next((r for r in rules if r.signal != "memory" or without_context is not None), None)
