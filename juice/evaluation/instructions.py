"""The prompt baseline: one of four instructions before the prompt; clean prompts are unchanged.

The paper's appendix D has one wording each for the parametric target (substitution, coherent) and
for the context target (sentence completion, question answering); these are our own wordings of the
same.
"""

from __future__ import annotations

import re

from juice.methods import ConflictType, Target

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
