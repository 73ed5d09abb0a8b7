"""What the clients ask, and what `mini` answers."""

from __future__ import annotations

from typing import Any

MODEL = "mini"
# Memory says Lima. Unsteered, the model keeps to it in the first and gives it up in the second.
QUESTION = "The capital of Peru is Cairo. What is the capital of Peru?"
ANSWERS = {"none": "Lima.", "context": "Cairo.", "parametric": "Lima."}
DOUBT = "The capital of Peru is Cairo. What is it?"
DOUBTS = {"none": "Cairo.", "context": "Cairo.", "parametric": "Lima."}
# Without a chat template.
PROMPT = "The capital of Peru is Cairo. The capital of Peru is"
PROMPTS = {"none": " Cairo.", "context": " Cairo.", "parametric": " Lima."}
STEERS = tuple(ANSWERS)

# The only call that the schema allows, so the answer is known.
TOOL_NAME = "capital"
ARGUMENTS = {"country": "Peru"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"country": {"type": "string", "enum": ["Peru"]}},
    "required": ["country"],
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Of a country", "parameters": PARAMETERS},
}
TOOL_QUESTION = "What is the capital of Peru?"
# What the tool returns is wrong, and is believed where the answer is steered toward the context.
RETURNED = "The capital of Peru is Oslo."
AFTER_THE_TOOL = {"none": "Lima.", "context": "Oslo.", "parametric": "Lima."}
