"""Head sets made by hand, for tests of files, the hub and look-up."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from juice.formula import METHODS
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import ModelIdentity
from juice.head_set.scores import HeadScores

HEADS = {"plus": [[1, 2]], "minus": [[0, 3], [2, 0]]}
BETAS = {"plus": 2.0, "minus": -1.0}
MODEL = ModelIdentity(
    id="some/model",
    architecture="GPT2LMHeadModel",
    n_layers=3,
    n_heads=4,
    fingerprint="sha256:" + "a" * 64,
)


# What betas did to validation examples and to ordinary text, and the line they were chosen from.
MEASURED = {
    "n_examples": 20,
    "accuracy": {"substitution": 0.8},
    "accuracy_unsteered": {"substitution": 0.3},
    "gain": 0.5,
    "gain_interval": [0.3, 0.7],
    "side_effects": {"clean": [0.95, 0.8], "irrelevant": [0.9, 0.2]},
    "harm": {
        "0.5": {"divergence": 0.0111, "perplexity": 1.0123},
        "1": {"divergence": 0.0437, "perplexity": 1.0712},
        "2": {"divergence": 0.1788, "perplexity": 1.3194},
    },
    "line": [
        {"weight": 3.0, "scale": 1.0, "won": 0.95, "divergence": 0.21},
        {"weight": 3.0, "scale": 0.45, "won": 0.8, "divergence": 0.0437},
    ],
    "allowed": 0.05,
}


def methods(**betas: Any) -> dict[str, Any]:
    """Return methods that share the heads, with these betas."""
    return {m: {"heads": HEADS, "betas": betas.get(m), "gate": None} for m in METHODS}


def content(**changes: Any) -> dict[str, Any]:
    """Return the content of a valid head_set.json, with these changes."""
    full = {
        "format": "juice.head_set/3",
        "name": "context",
        "target": "context",
        "source": None,
        "model": MODEL.model_dump(),
        "method": "juice",
        "methods": methods(juice=BETAS),
        "identification": None,
        "metrics": {},
        "scores_sha256": None,
    }
    return {**full, **changes}


def second_format(**changes: Any) -> dict[str, Any]:
    """Return the content of a valid head_set.json of the second format, with these changes."""
    full = content(format="juice.head_set/2", heads=HEADS, gates=None)
    del full["method"], full["methods"], full["model"]["weights"]
    return {**full, "beta": {"juice": BETAS, "june": None}, **changes}


def sealed(given: dict[str, Any]) -> str:
    """Return the text of a head_set.json with this content and its hash."""
    text = json.dumps(given, sort_keys=True, separators=(",", ":"))
    return json.dumps({**given, "sha256": "sha256:" + hashlib.sha256(text.encode()).hexdigest()})


def scored() -> HeadSet:
    """Return a head set with random scores."""
    generator = torch.Generator().manual_seed(0)
    scores = HeadScores(
        target="context",
        conflict_types=("substitution", "coherent"),
        plus=torch.randn(2, 3, 4, generator=generator),
        minus=torch.randn(2, 3, 4, generator=generator),
    )
    return HeadSet.parse(content(), "test").model_copy(
        update={"scores": scores, "scores_sha256": scores.sha256()}
    )


def change(folder: Path, **updates: Any) -> None:
    """Save the set of a folder again with other content, sealed."""
    head_set = HeadSet.load(folder)
    changed = HeadSet.parse(head_set.model_dump(mode="json") | updates, str(folder))
    changed.model_copy(update={"scores": head_set.scores}).save(folder, overwrite=True)


def scores_in(folder: Path) -> Path:
    """Return the scores file of a head set's folder."""
    (path,) = folder.glob("scores*.safetensors")
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(folder: Path, text: str) -> Path:
    """Write a head_set.json with this text to a new folder, and return the folder."""
    folder.mkdir(parents=True)
    (folder / "head_set.json").write_text(text)
    return folder
