"""What the numbers of an evaluation depend on, and what its splits hold, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from juice.data.example import examples_sha256
from juice.evaluation.options import EvaluationOptions
from juice.evaluation.splits import Data, Splits
from juice.evaluation.store import sha256
from juice.head_set import HeadSet
from juice.methods import Target
from juice.steered_model import SteeredModel
from juice.version import versions


def identity_of(
    model: SteeredModel, data: Data, options: EvaluationOptions, texts: Sequence[str]
) -> dict[str, Any]:
    """Return all that the numbers depend on.

    Methods, targets and analyses are not part of it: they may be added to a report later.
    """
    own, identification = model.description, asdict(options.identification)
    return {
        "model": own.identity.model_dump(mode="json"),
        "dtype": own.dtype,
        "chat_template_sha256": model.prompts.sha256,
        "quantization": own.quantization,
        "exact": own.exact,
        "data_sha256": examples_sha256(data.test),
        "validation_sha256": None if data.validation is None else examples_sha256(data.validation),
        "identification_sha256": (
            None if data.identification is None else examples_sha256(data.identification)
        ),
        "texts_sha256": sha256("\n".join(texts)),
        "head_set": options.head_set,
        "limit": options.limit,
        "seed": options.seed,
        "n_large": options.n_large,
        "identification": identification,
        "versions": versions(),
    }


def described(splits: Splits, head_sets: Mapping[Target, HeadSet]) -> dict[str, Any]:
    """Return the test examples, the subjects that heads are found on, and how many others."""
    return {
        "test": [
            e.model_dump(mode="json", exclude_none=True, exclude_defaults=True) for e in splits.test
        ],
        "identification": {
            target: [e.subject for e in own] for target, own in splits.identification.items()
        },
        "finders_are_known": {
            target: splits.holds_finders_of(head_set) for target, head_set in head_sets.items()
        },
        "n_large": len(splits.large),
        "n_validation": len(splits.validation),
        "left_out": splits.left_out,
    }
