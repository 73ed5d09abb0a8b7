"""Plain texts for perplexity and templates of paraphrased prompts, read from files."""

from __future__ import annotations

import json
from pathlib import Path

from juice.errors import ExampleError
from juice.evaluation.analyses.paraphrases import check_templates
from juice.files import MINI

DATA = Path(__file__).parent / "data"
Templates = dict[str, dict[str, list[str]]]


def read_texts(given: Path | None, model_id: str) -> list[str]:
    """Read plain texts, one per line; None: those that come with JuICE. Raises ExampleError."""
    path = given or (MINI if model_id == "mini" else DATA) / "plain_text.txt"
    try:
        texts = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ExampleError(
            f"cannot read the text {path}: {error}; give a UTF-8 file with one text per line"
        ) from error
    if not texts:
        raise ExampleError(f"the text {path} is empty; give a file with one text per line")
    return texts


def read_templates(given: Path | None) -> Templates:
    """Read templates by relation; None: those that come with JuICE. Raises ExampleError."""
    path = given or DATA / "templates.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ExampleError(
            f"cannot read the templates {path}: {error}; expected a JSON object"
        ) from error
    check_templates(content, str(path))
    templates: Templates = content
    return templates
