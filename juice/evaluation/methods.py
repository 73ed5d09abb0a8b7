"""What each method does to a prompt: an instruction, a contrast, scaled heads, or nothing.

    original      nothing
    prompt        an instruction before the prompt (juice.evaluation.instructions)
    cad           (1 + a) * logits - a * logits without the context, a = 1; toward the context only
    adacad        the same, a the Jensen-Shannon divergence of the two at each token
    ph3_large     heads found by path patching on up to 200 examples are pruned, z_h <- 0
                  (juice.evaluation.path_patching)
    ph3_small     the same, found on the few examples that the paper's heads are found on
    june, juice   the paper's: heads by probes on a few examples, betas by relation from its grid;
                  in one run, and in two
    served_once   what `juice identify` finds, or the head set that is served: its own betas for one
                  run
    served        the same in two runs
    learned       what `juice identify --method learned` finds
    question      `served`, of only the positions after the context
    gated         `served`, where its gate finds a reason to
    gated_apart   the same, with the context given apart

All go through the engine; pruning is a coefficient of -1 on a single run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from juice.data.contexts import context_end, has_context_apart, without_context
from juice.data.example import ConflictExample
from juice.engine import GenerationRequest, Steer, Steering
from juice.evaluation.instructions import instructed
from juice.methods import CONTRASTS, ConflictType, Target
from juice.steered_model import SteeredModel

MethodName = Literal[
    "original",
    "prompt",
    "cad",
    "adacad",
    "ph3_large",
    "ph3_small",
    "june",
    "juice",
    "served_once",
    "served",
    "learned",
    "question",
    "gated",
    "gated_apart",
]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
CAD_WEIGHT = 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Treatment:
    """One method toward one target on one domain.

    Args:
        target: Whose answer counts as right.
        steer: How it steers; None: it does not.
        instructs: Whether an instruction comes before the prompt.
        apart: Whether the context is given apart; clean prompts have none.
    """

    target: Target
    steer: Steer | None = None
    instructs: bool = False
    apart: bool = False

    def applies(self, example: ConflictExample) -> bool:
        """Return whether the method can be used: some need the example's context apart."""
        if self.steer is not None and self.steer.positions == "question":
            return all(context_end(example, t) for t in example.prompts if t != "clean")
        return not self.apart or has_context_apart(example)

    def steering(self, model: SteeredModel) -> Steering | None:
        """Return how plain text is steered; None: it is not."""
        return None if self.steer is None else model.resolve(self.steer)

    def request(
        self,
        model: SteeredModel,
        example: ConflictExample,
        conflict_type: ConflictType,
        *,
        max_tokens: int,
    ) -> GenerationRequest:
        """Return the request for one prompt of an example.

        It watches the first tokens of the parametric and the context answer.

        Args:
            model: The model that will be asked.
            example: The example.
            conflict_type: Which of its prompts to ask.
            max_tokens: Most tokens to generate.
        """
        prompt, steer = example.prompts[conflict_type], self.steer or Steer(target="none")
        if self.instructs:
            prompt = instructed(prompt, conflict_type, self.target)
        tokens = tuple(
            model.first_token(prompt, example.answer(t), opening=example.opening)
            for t in ("parametric", "context")
        )
        watch = tuple(token for token in tokens if token is not None)
        alone, question_at = None, 0
        if self.apart and conflict_type != "clean":
            alone = without_context(example, conflict_type)
            end = context_end(example, conflict_type)
            question_at = model.prompts.first_position(prompt, end or 0)
        elif steer.method in CONTRASTS:
            steer = Steer(target="none")
        elif self.apart:
            alone = prompt
        return model.request(
            model.tokenize(prompt, opening=example.opening),
            steer=steer,
            without_context=(
                None if alone is None else model.tokenize(alone, opening=example.opening)
            ),
            question_at=question_at,
            max_tokens=max_tokens,
            watch=watch if len(watch) == len(tokens) else (),
        )


def methods_for(target: Target, asked: tuple[MethodName, ...]) -> tuple[MethodName, ...]:
    """Return the methods in `asked` that a target has, in the order of METHODS.

    Context-aware decoding steers toward the context only.
    """
    return tuple(
        name for name in METHODS if name in asked and (name not in CONTRASTS or target == "context")
    )
