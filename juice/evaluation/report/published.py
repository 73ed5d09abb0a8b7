"""The published numbers, for models of the paper: `data/published.json`.

Source: tables 5 and 6 of "Taming Knowledge Conflicts in Language Models" (ICML 2025).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from juice.methods import Target

FILE = Path(__file__).parents[1] / "data" / "published.json"
KEYS: dict[Target, str] = {"parametric": "parametric", "context": "contextual"}
# Where the authors' code does other than their text, and ours (docs/method.md).
DIFFERENCES = (
    "They ran in float16; decoded 10 tokens unsteered and 15 steered, where we decode 15; and took "
    "the facts whose answer is in 10 tokens as known.",
    "Their heads come from world capitals that the model knows.",
    "In their code a head of both signs gets the - beta twice, and in their JuNe the largest + head"
    " gets the - beta where a layer has heads of both signs.",
)
TOWARD_CONTEXT = "Their grid goes down to -5 for the - beta, with K = 10 except for StableLM."
ON_GEMMA = "The attention that they put into Gemma ignores its soft cap."


def published(model_id: str, target: Target) -> dict[str, dict[str, Any]]:
    """Return a model's published {method: {domain: {conflict type: percent} or percent}}.

    The model is known by its hub id or the id's last part; others have none.
    """
    tables = json.loads(FILE.read_text(encoding="utf-8"))
    name = model_id.rstrip("/").rsplit("/", 1)[-1].lower()
    rows = [row for row in tables[KEYS[target]] if row["model"].rsplit("/", 1)[-1].lower() == name]
    return {row["method"]: row["accuracy"] for row in rows}


def source() -> str:
    """Return where the numbers were published."""
    return str(json.loads(FILE.read_text(encoding="utf-8"))["source"])


def differences(model_id: str, target: Target) -> list[str]:
    """Return what to keep in mind when ours are compared with a model's published numbers."""
    notes = list(DIFFERENCES)
    if target == "context":
        notes.append(TOWARD_CONTEXT)
    if "gemma" in model_id.lower():
        notes.append(ON_GEMMA)
    return notes
