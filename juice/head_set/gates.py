"""Gates: by which number, at a prompt's end, a head set tells whether it should steer.

    memory   the largest probability of the next token without the context and without steering
    steered  the same of the steered run
    copied   the same of the steered run if the token occurs in the prompt, else 0

Where the number reaches the threshold, the request is steered.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from juice.head_set.parts import Part

Signal = Literal["memory", "steered", "copied"]


class GateRule(Part):
    """A signal and its threshold, with what they did on validation examples.

    Args:
        signal: The number that decides; `memory` needs the context apart from the prompt.
        threshold: The least number at which a request is steered.
        n_prompts: How many prompts with a conflict were measured.
        kept: The share of these that stay steered.
        side_effects: The shares of right answers to prompts that steering should leave alone,
            without steering and with the gate.
    """

    signal: Signal
    threshold: float
    n_prompts: int = Field(ge=1)
    kept: float = Field(ge=0, le=1)
    side_effects: dict[str, tuple[float, float]]

    @property
    def lost(self) -> float:
        """The largest share of right answers that any kind of these prompts loses."""
        return max((before - after for before, after in self.side_effects.values()), default=0.0)

    def __str__(self) -> str:
        others = "".join(
            f", {kind} {without:.2f} -> {gated:.2f}"
            for kind, (without, gated) in self.side_effects.items()
        )
        return (
            f"{self.signal} >= {self.threshold:.3g} steers {self.kept:.2f} of {self.n_prompts}"
            f" conflicts{others}"
        )


class Gate(Part):
    """The rules for the betas of one method at strength 1; the first one that can be used decides.

    They hold for prompts in one form: through the chat template of this hash, or plain ones.
    """

    chat_template_sha256: str | None
    rules: tuple[GateRule, ...] = Field(min_length=1)


class GateTable(Part):
    """The gates of each method; null where none was measured, or none was good enough."""

    juice: Gate | None = None
    june: Gate | None = None
