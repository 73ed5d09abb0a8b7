"""The prompt baseline: an instruction before the prompt, one of four wordings; clean prompts are left as they are.

The paper's appendix D has one wording each for the parametric target (substitution, coherent) and
for the context target (sentence completion, question answering); these say the same in our words.
"""

from __future__ import annotations

import re

from juice.data.example import ConflictType
from juice.targets import Target

MEMORY_AFTER_STATEMENT = (
    "The statement that comes first may be false. Do not rely on it: finish the sentence with what"
    " you have learned about the world."
)
MEMORY_AFTER_PASSAGE = (
    "The passage that comes first is misleading. Do not use anything it says: answer the question"
    " from your own knowledge alone."
)
CONTEXT_FOR_COMPLETION = (
    "Finish the sentence below as the statement that is given demands, whatever you remember"
    " yourself."
)
CONTEXT_FOR_QUESTION = (
    "Answer the question below from the context that is given, whatever you remember yourself."
)
QUESTION = re.compile(r"\?\s|question:|answer:\s*$", re.IGNORECASE)


def instruction(prompt: str, conflict_type: ConflictType, target: Target) -> str:
    """Return the instruction that goes before a prompt; empty for a clean one."""
    if conflict_type == "clean":
        return ""
    if target == "parametric":
        return MEMORY_AFTER_STATEMENT if conflict_type == "substitution" else MEMORY_AFTER_PASSAGE
    return CONTEXT_FOR_QUESTION if QUESTION.search(prompt) else CONTEXT_FOR_COMPLETION


def instructed(prompt: str, conflict_type: ConflictType, target: Target) -> str:
    """Return the prompt behind its instruction."""
    said = instruction(prompt, conflict_type, target)
    return f"{said} {prompt}" if said else prompt
