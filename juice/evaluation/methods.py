"""The methods: an instruction, a contrast, scaled heads, or nothing.

    original      nothing
    prompt        an instruction before the prompt
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

All go through the engine; pruning is a coefficient of -1 on a single run. `RECIPES` says how each
steers; what validation chooses for it is in juice.evaluation.choices.

The instruction is one of four; clean prompts have none. The paper's appendix D has a wording for
the parametric target (substitution, coherent) and for the context target (sentence completion,
question answering); these are other wordings of the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from juice.data.example import ConflictExample, context_end, has_context_apart, without_context
from juice.engine.request import Request
from juice.engine.steer import Steer, Steering
from juice.evaluation.options import METHOD_NAMES, MethodName
from juice.formula import CONTRASTS, ConflictType, Method, Positions, SteerMethod, Target
from juice.steered_model import SteeredModel

MEMORY_AFTER_STATEMENT = (
    "The statement that comes first may be false. Do not rely on it: "
    "finish the sentence with what you have learned about the world."
)
MEMORY_AFTER_PASSAGE = (
    "The passage that comes first is misleading. Do not use anything it says: "
    "answer the question from your own knowledge alone."
)
CONTEXT_FOR_COMPLETION = (
    "Finish the sentence below as the statement that is given demands, "
    "whatever you remember yourself."
)
CONTEXT_FOR_QUESTION = (
    "Answer the question below from the context that is given, whatever you remember yourself."
)
CAD_WEIGHT = 1.0
QUESTION = re.compile(r"\?\s|question:|answer:\s*$", re.IGNORECASE)


def instruction(prompt: str, conflict_type: ConflictType, target: Target) -> str:
    """Return the instruction that goes before a prompt; empty for a clean one."""
    if conflict_type == "clean":
        return ""
    if target == "parametric":
        return MEMORY_AFTER_STATEMENT if conflict_type == "substitution" else MEMORY_AFTER_PASSAGE
    return CONTEXT_FOR_QUESTION if QUESTION.search(prompt) else CONTEXT_FOR_COMPLETION


def instructed(prompt: str, conflict_type: ConflictType, target: Target) -> str:
    """Return the prompt with its instruction before it."""
    text = instruction(prompt, conflict_type, target)
    return f"{text} {prompt}" if text else prompt


# The head sets of an evaluation: served, found in the paper's way, or learned.
Part = Literal["served", "paper", "learned"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One method, whatever the target and the domain.

    Args:
        part: The head set that it scales the heads of; None: of none.
        method: One run or two; None: as its head set has it.
        contrast: How it contrasts the answers with and without the context; None: not at all.
        tunes: Validation chooses betas by relation.
        prunes: Validation chooses how many heads of path patching are removed.
        instructs: An instruction comes before the prompt.
        is_gated: The head set's gate decides where it steers.
        positions: Which positions it steers.
        apart: The context is given apart.
    """

    part: Part | None = None
    method: Method | None = None
    contrast: SteerMethod | None = None
    tunes: bool = False
    prunes: bool = False
    instructs: bool = False
    is_gated: bool = False
    positions: Positions = "all"
    apart: bool = False

    @property
    def is_of_prompts(self) -> bool:
        """Whether it needs an instruction, a context or a gate, which plain text does not have."""
        return self.instructs or self.is_gated or self.apart


RECIPES: dict[MethodName, Recipe] = {
    "original": Recipe(),
    "prompt": Recipe(instructs=True),
    "cad": Recipe(contrast="cad", apart=True),
    "adacad": Recipe(contrast="adacad", apart=True),
    "ph3_large": Recipe(prunes=True),
    "ph3_small": Recipe(prunes=True),
    "june": Recipe(part="paper", method="june", tunes=True),
    "juice": Recipe(part="paper", method="juice", tunes=True),
    "served_once": Recipe(part="served", method="june"),
    "served": Recipe(part="served"),
    "learned": Recipe(part="learned"),
    "question": Recipe(part="served", positions="question", apart=True),
    "gated": Recipe(part="served", is_gated=True),
    "gated_apart": Recipe(part="served", is_gated=True, apart=True),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Treatment:
    """A method toward one target on one domain.

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
        """Return True where the method can be used: some need the example's context apart."""
        if self.steer is not None and self.steer.positions == "question":
            return all(context_end(example, t) for t in example.prompts if t != "clean")
        return not self.apart or has_context_apart(example)

    def steering(self, model: SteeredModel) -> Steering | None:
        """Return the steering of plain text; None where it is not steered."""
        return None if self.steer is None else model.resolve(self.steer)

    def request(
        self,
        model: SteeredModel,
        example: ConflictExample,
        conflict_type: ConflictType,
        *,
        max_tokens: int,
    ) -> Request:
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
    """Return the methods in `asked` that a target has, in the order of METHOD_NAMES.

    Context-aware decoding steers toward the context only.
    """
    return tuple(
        name
        for name in METHOD_NAMES
        if name in asked and (RECIPES[name].contrast is None or target == "context")
    )
