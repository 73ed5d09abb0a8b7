"""Which requests of a task are steered, and how.

Every token is steered, those of a choice too, as if the model had written it. A gate decides once
for each context, at its end, so all choices of a question share the decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from juice.engine import Steer
from juice.errors import UsageError
from juice.steered_model import SteeredModel

Ids = tuple[int, ...]


class TaskSteering:
    """How one task's requests are steered.

    Args:
        model: The model.
        steer: What `--model_args` asks for.

    Raises:
        HeadSetError: No head set serves it.
        RequestError: It cannot be done.
    """

    def __init__(self, model: SteeredModel, steer: Steer) -> None:
        if steer.positions != "all":
            raise UsageError(
                "positions is question, but a task's prompts do not say where the question begins; "
                "leave positions out"
            )
        self.model, self.steer = model, steer
        model.resolve(steer)  # reports what is wrong before a task is built

    @property
    def is_gated(self) -> bool:
        """Whether a gate decides which prompts are steered."""
        return self.steer.gate == "auto"

    def in_chat(self) -> TaskSteering:
        """Return the same for prompts that went through the tokenizer's chat template."""
        return TaskSteering(self.model.with_chat_template(), self.steer)

    def for_contexts(self, contexts: Sequence[Ids]) -> list[Steer]:
        """Return how to steer what continues each context, which a gate may leave alone."""
        if not self.is_gated:
            return [self.steer] * len(contexts)
        unique = list(dict.fromkeys(contexts))
        asked = [self.model.request(ids, steer=self.steer, max_tokens=1) for ids in unique]
        done = self.model.engine.generate(asked)
        is_on = {ids: c.steering.applied for ids, c in zip(unique, done, strict=True)}
        always, never = self._without_gate(), Steer(target="none")
        return [always if is_on[ids] else never for ids in contexts]

    def described(self) -> dict[str, Any]:
        """Return what is applied where no gate decides otherwise, as plain data."""
        report = self.model.resolve(self.steer).report.to_dict()
        return {**report, "gate": self.steer.gate}

    def _without_gate(self) -> Steer:
        own = {name: value for name, value in vars(self.steer).items() if name != "gate"}
        return Steer(**own)
