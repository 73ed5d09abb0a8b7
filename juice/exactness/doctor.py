"""The checks on one model: those of every load, more thorough, and those too slow for a load."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from juice.batching import BatchingEngine
from juice.engine import Capability, Engine, GenerationRequest
from juice.errors import GenerationError, JuiceError, UnsupportedModelError
from juice.exactness.comparison import bound_of, compared
from juice.exactness.costs import as_if_tuned, costs_of
from juice.exactness.engine_check import verify
from juice.exactness.head_check import TOLERANCE as HEADS_TOLERANCE
from juice.exactness.head_check import check_heads
from juice.exactness.lens_check import z_difference
from juice.exactness.report import Check, Diagnosis
from juice.exactness.schedule import steering_of
from juice.head_set import HeadSetLibrary
from juice.model.layout import text_config
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm
from juice.progress import Progress, silent

N_TOKENS = 8
PROMPT = (
    "Question: What is the name of the capital city of France? The book says that it is Rome. "
    "Answer: The name of the city is"
)
# Enough to exceed most sliding windows and switches of positions; more would take too long.
MAX_LONG_PROMPT = 8192
LENS_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}


@dataclass(frozen=True)
class _Patient:
    """The engine to check, with its model, and the head sets that fit it."""

    engine: BatchingEngine
    head_sets: HeadSetLibrary

    @property
    def loaded(self) -> LoadedModel:
        return self.engine.loaded

    @property
    def sliding_windows(self) -> list[int]:
        pattern = self.loaded.mask_pattern
        return [own for own in pattern.sliding_windows.values() if own] if pattern else []

    def tokenize(self, text: str) -> tuple[int, ...]:
        return PromptForm(self.loaded.tokenizer).tokens(text)


def diagnose(
    engine: Engine, head_sets: HeadSetLibrary, *, deep: bool = False, progress: Progress = silent
) -> Diagnosis:
    """Measure whether a loaded model is steered exactly.

    Warns of a sliding window that the check cannot exceed, and where TransformerLens cannot run the
    model.

    Args:
        engine: The engine, with its model.
        head_sets: The head sets to report the cost of; one of them steers the checks.
        deep: Whether to add prompts that are longer than the model's sliding windows (up to 8,192
            tokens) or cross a switch of its positions, and to compare z with TransformerLens. That
            takes the model apart: it cannot generate afterwards.
        progress: Reports the checks as they finish.

    Returns:
        The checks, and the reason where steering is not exact.

    Raises:
        MissingCapabilityError: The engine gives no access to the model's activations.
        UsageError: `deep` without the extra `lens`.
        JuiceError: There is not enough memory.
    """
    engine.require(Capability.ACTIVATIONS)
    model = _Patient(cast("BatchingEngine", engine), head_sets)
    names = ["heads", "engine", "prompt", *(["long prompts", "TransformerLens"] if deep else [])]
    checks: list[Check] = []
    reason = None
    if not model.loaded.exact:
        reason = (
            "its activations are quantised: steering is approximate, and every answer reports "
            "`exact: false`"
        )
    costs = costs_of(head_sets, engine)
    facts = _facts(model)
    with progress("checking", len(names)) as advance:
        for name in names:
            try:
                checks += CHECKS[name](model)
            except torch.OutOfMemoryError as error:
                raise JuiceError(
                    f"there is not enough memory for the check {name!r}; choose another --device "
                    "or a smaller --dtype"
                ) from error
            except (UnsupportedModelError, GenerationError) as error:
                reason = reason or str(error)
            advance(1)
    if not model.loaded.exact:
        checks = [replace(check, decisive=False) for check in checks]
    failed = [check for check in checks if check.decisive and not check.passed]
    if failed and reason is None:
        reason = (
            f"{failed[0].name} is {failed[0].difference:.2g} {failed[0].unit}; "
            f"expected at most {failed[0].bound:g}"
        )
    return Diagnosis(
        model=model.loaded.identity.id,
        exact=reason is None,
        reason=reason,
        facts=facts,
        checks=tuple(checks),
        head_sets=costs,
        unfit_head_sets={
            key: reason for key, reason in head_sets.unfit.items() if key not in head_sets.foreign
        },
        n_foreign_head_sets=len(head_sets.foreign),
    )


def _facts(model: _Patient) -> dict[str, Any]:
    loaded, engine, layers = model.loaded, model.engine, model.loaded.layout.layers
    return {
        "architecture": loaded.identity.architecture,
        "fingerprint": loaded.identity.fingerprint,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "n_layers": loaded.layout.n_layers,
        "n_heads": loaded.layout.n_heads,
        "d_head": sorted({layer.d_head for layer in layers}),
        "n_kv_heads": engine.n_kv_heads,
        "latent_cache": (
            engine.n_kv_heads == 1 and hasattr(text_config(loaded.model), "kv_lora_rank")
        ),
        "kv_bytes_per_token": engine.n_kv_bytes_per_token,
        "context": loaded.max_positions,
        "sliding_window": min(model.sliding_windows, default=None),
        "rope_switch": loaded.rope_switch,
        "full_rows": engine.mode.full_rows,
        "own_masks": engine.mode.own_masks,
    }


def _check_all_heads(model: _Patient) -> list[Check]:
    difference = check_heads(model.loaded, model.loaded.layout.n_heads)
    name = "each head of each layer: steering by 1 against doubling in the attention"
    return [_check(name, difference, HEADS_TOLERANCE, "of its effect")]


def _check_engine(model: _Patient) -> list[Check]:
    name = (
        "short prompts in one batch, prefilled in chunks, any sliding window set to 3: "
        "difference from the two runs"
    )
    found = verify(model.loaded, model.engine.mode)
    return [_check(name, found.share, found.bound, "of what steering changes")]


def _check_prompt(model: _Patient) -> list[Check]:
    return _nats(
        model,
        "a steered prompt through the engine: difference from the two runs",
        _steered(model, model.tokenize(PROMPT)),
    )


def _check_long_prompts(model: _Patient) -> list[Check]:
    words, checks = model.tokenize(PROMPT), list[Check]()
    for n in _long_lengths(model):
        ids = (words * (n // len(words) + 1))[:n]
        checks += _nats(
            model,
            f"a prompt of {n} tokens and {N_TOKENS} new ones: difference from the two runs",
            _steered(model, ids),
        )
    return checks


def _long_lengths(model: _Patient) -> list[int]:
    """Return the lengths of the long prompts.

    One exceeds the sliding windows; the new tokens of another cross a switch of positions.
    """
    widths, switch = model.sliding_windows, model.loaded.rope_switch
    wanted = {max([512, *(width + N_TOKENS for width in widths)])} | (
        {switch - N_TOKENS // 2} if switch else set()
    )
    limit = min(MAX_LONG_PROMPT, (model.engine.limits.max_model_len or MAX_LONG_PROMPT) - N_TOKENS)
    if widths and limit < max(widths):
        warnings.warn(
            f"the sliding window of {max(widths)} tokens is not exceeded: the prompts of the check "
            f"have at most {limit}",
            stacklevel=2,
        )
    return sorted({min(n, limit) for n in wanted})


def _check_lens(model: _Patient) -> list[Check]:
    name, bound = (
        "z of every layer: difference from TransformerLens' hook_z",
        LENS_TOLERANCES.get(model.loaded.dtype, 0.1),
    )
    difference = z_difference(
        model.loaded, torch.tensor([model.tokenize(PROMPT)], device=model.loaded.device)
    )
    if difference is None:
        return []
    return [replace(_check(name, difference, bound, "of its size"), decisive=False)]


CHECKS = {
    "heads": _check_all_heads,
    "engine": _check_engine,
    "prompt": _check_prompt,
    "long prompts": _check_long_prompts,
    "TransformerLens": _check_lens,
}


def _steered(model: _Patient, ids: tuple[int, ...]) -> float:
    """Return how far a steered generation is from the two runs.

    It is steered by the first head set that fits, else by heads spread over the layers.
    """
    sets = [s for _, s in sorted(model.head_sets.by_name.items())]
    steering = (
        as_if_tuned(sets[0])
        if sets
        else steering_of(model.loaded, (0, model.loaded.layout.n_layers - 1), 2.0, seed=0)
    )
    request = GenerationRequest(
        prompt_ids=ids, max_tokens=N_TOKENS, ignore_eos=True, steering=steering
    )
    completion = model.engine.generate([request])[0]
    return compared(model.loaded, request, completion).difference


def _nats(model: _Patient, name: str, difference: float) -> list[Check]:
    return [_check(name, difference, bound_of(model.loaded), "nats")]


def _check(name: str, difference: float, bound: float, unit: str) -> Check:
    passed = difference <= bound
    return Check(name=name, passed=passed, difference=difference, bound=bound, unit=unit)
