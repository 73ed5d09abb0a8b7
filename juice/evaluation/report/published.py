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
