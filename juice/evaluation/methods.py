"""The methods: an instruction, a contrast, scaled heads, or nothing.

docs/evaluation.md, "Methods", describes them, and `RECIPES` says how each steers; all go through
the engine. What validation chooses for them is in juice.evaluation.choices.

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
from juice.engine.steer import Steer
from juice.evaluation.options import METHOD_NAMES, MethodName
from juice.formula import CONTRASTS, ConflictType, ContrastMethod, Method, NamedPositions, Target
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
CONTRAST_STRENGTH = 1.0
QUESTION = re.compile(r"\?\s|question:|answer:\s*$", re.IGNORECASE)


def instructed(prompt: str, conflict_type: ConflictType, target: Target) -> str:
    """Return the prompt with its instruction before it; a clean one has none."""
    if conflict_type == "clean":
        return prompt
    if target == "parametric":
        text = MEMORY_AFTER_STATEMENT if conflict_type == "substitution" else MEMORY_AFTER_PASSAGE
    else:
        text = CONTEXT_FOR_QUESTION if QUESTION.search(prompt) else CONTEXT_FOR_COMPLETION
    return f"{text} {prompt}"


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
    contrast: ContrastMethod | None = None
    tunes: bool = False
    prunes: bool = False
    instructs: bool = False
    is_gated: bool = False
    positions: NamedPositions = "all"
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
    "cocoa": Recipe(contrast="cocoa", apart=True),
    "ckplug": Recipe(contrast="ckplug", apart=True),
    "grd": Recipe(contrast="grd", apart=True),
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


UNSTEERED = Steer(target="none")


@dataclass(frozen=True, eq=False, kw_only=True)
class Treatment:
    """A method toward one target on one domain.

    Args:
        target: Whose answer counts as right.
        steer: How it steers.
        instructs: Whether an instruction comes before the prompt.
        apart: Whether the context is given apart; clean prompts have none.
    """

    target: Target
    steer: Steer = UNSTEERED
    instructs: bool = False
    apart: bool = False

    def applies(self, example: ConflictExample) -> bool:
        """Return True where the method can be used: some need the example's context apart."""
        if self.steer.positions == "question":
            return all(context_end(example, t) for t in example.prompts if t != "clean")
        return not self.apart or has_context_apart(example)

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
        """
        prompt, steer = example.prompts[conflict_type], self.steer
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
            steer = UNSTEERED
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

    A contrast may steer toward one target only.
    """

    def has(name: MethodName) -> bool:
        contrast = RECIPES[name].contrast
        return contrast is None or target in CONTRASTS[contrast]

    return tuple(name for name in METHOD_NAMES if name in asked and has(name))
