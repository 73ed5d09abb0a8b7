"""`juice doctor`: is a model steered exactly, and what does steering cost?

Our own engine gets the checks of every load, more thoroughly, and those too slow for a load. An
engine that runs a model elsewhere, such as vLLM, is held against transformers' own model beside it:
that needs the model a second time, and shares nothing with the engine but the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import torch

from juice.checks.at_load import drawn_steering, verify
from juice.checks.heads import TOLERANCE as HEADS_TOLERANCE
from juice.checks.heads import check_heads, lens_difference
from juice.checks.two_runs import bound_of, compared, defined_by, largest
from juice.engine.contract import Capability, Engine
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.engine.steer import Steer, Steering, resolve, unsteered
from juice.errors import GenerationError, JuiceError, UnsupportedModelError
from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary
from juice.model.layout import text_config
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm
from juice.progress import Progress, silent

PROMPT = (
    "Question: What is the name of the capital city of France? The book says that it is Rome. "
    "Answer: The name of the city is"
)
N_TOKENS = 8
# The prompts for an engine elsewhere.
LENGTHS = (5, 40, 200)
# Enough to exceed most sliding windows and switches of positions; more would take too long.
MAX_LONG_PROMPT = 8192
# Of z, relative to its size; half precision gets 0.1.
LENS_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check.

    Args:
        name: The name of the comparison.
        passed: Whether it agrees.
        difference: The largest difference, in `unit`.
        bound: The largest difference allowed, in `unit`.
        unit: The unit of both.
        decisive: Whether a failure means that steering is not exact. TransformerLens is not
            decisive, because it errs on some architectures itself; nor is any check where the
            model's activations are quantised.
    """

    name: str
    passed: bool
    difference: float
    bound: float
    unit: str
    decisive: bool = True


@dataclass(frozen=True, kw_only=True)
class HeadSetCost:
    """The cost of a head set that fits.

    With one steered layer it needs no companion, because the clean z is the steered row's own.

    Args:
        name: Its name.
        target: The target that it steers toward.
        n_heads: The number of its heads.
        window: The first and the last layer with a companion; None without one.
        extra_rows: The share of layers with a companion, 0 to 1.
    """

    name: str
    target: str
    n_heads: int
    window: tuple[int, int] | None
    extra_rows: float


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict whether a model is steered exactly, and the cost of steering.

    Args:
        model: Its id.
        exact: Whether steering is exact.
        reason: The reason why it is not; None where it is.
        facts: The facts about the model; empty if it was refused at load.
        checks: The checks that were run.
        head_sets: The cost of each head set that fits.
        unfit_head_sets: The reasons why head sets of this model's name cannot be used, by set.
        n_foreign_head_sets: The number of head sets made for models of other names.
    """

    model: str
    exact: bool
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    head_sets: tuple[HeadSetCost, ...] = ()
    unfit_head_sets: dict[str, str] = field(default_factory=dict)
    n_foreign_head_sets: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return asdict(self)


def as_if_tuned(head_set: HeadSet) -> Steering:
    """Return the steering of a set at its betas; if it has none, at betas that use every head."""
    plus, minus = (None, None) if head_set.betas() else (1.0, -2.0)
    return resolve(Steer(target=head_set.target, beta_plus=plus, beta_minus=minus), head_set)


def _cost(engine: Engine, head_set: HeadSet) -> HeadSetCost:
    window = engine.companion_layers(as_if_tuned(head_set))
    return HeadSetCost(
        name=head_set.name,
        target=head_set.target,
        n_heads=len(head_set.heads.all),
        window=(window[0], window[-1]) if window else None,
        extra_rows=len(window) / engine.description.n_layers,
    )


def _diagnosis(
    engine: Engine,
    head_sets: HeadSetLibrary,
    facts: dict[str, Any],
    checks: Sequence[Check],
    reason: str | None,
) -> Diagnosis:
    """Return the diagnosis of an engine; with no other reason, that of the first failed check."""
    failed = next((check for check in checks if check.decisive and not check.passed), None)
    if failed and reason is None:
        reason = (
            f"{failed.name} is {failed.difference:.2g} {failed.unit}; "
            f"expected at most {failed.bound:g}"
        )
    return Diagnosis(
        model=engine.description.identity.id,
        exact=reason is None,
        reason=reason,
        facts=facts,
        checks=tuple(checks),
        head_sets=tuple(
            _cost(engine, head_set) for _, head_set in sorted(head_sets.by_name.items())
        ),
        unfit_head_sets={
            path: why for path, why in head_sets.unfit.items() if path not in head_sets.foreign
        },
        n_foreign_head_sets=len(head_sets.foreign),
    )


def _check(name: str, difference: float, bound: float, unit: str) -> Check:
    passed = difference <= bound
    return Check(name=name, passed=passed, difference=difference, bound=bound, unit=unit)


def _facts_of(engine: Engine) -> dict[str, Any]:
    """Return the facts that are known about any engine's model."""
    model = engine.description
    return {
        "architecture": model.identity.architecture,
        "fingerprint": model.identity.fingerprint,
        "dtype": model.dtype,
        "dtype_reason": model.dtype_reason,
        "device": model.device,
        "n_layers": model.n_layers,
        "kv_bytes_per_token": engine.n_kv_bytes_per_token,
        "context": model.max_positions,
    }


def diagnose_served(
    engine: Engine,
    reference: LoadedModel,
    head_sets: HeadSetLibrary,
    progress: Progress = silent,
) -> Diagnosis:
    """Measure whether an engine serves a model as the two runs of transformers' own define it.

    Args:
        engine: The engine.
        reference: The same model, loaded by transformers.
        head_sets: The head sets that fit it; each steers prompts of several lengths.
        progress: Reports the steerings that are checked.

    Returns:
        The checks, and the reason where steering is not exact.
    """
    steerings = {"unsteered": unsteered()}
    steerings |= {
        name: as_if_tuned(head_set) for name, head_set in sorted(head_sets.by_name.items())
    }
    n, limit = engine.description.vocabulary_size, engine.limits.max_model_len
    lengths = [min(length, limit - N_TOKENS) if limit else length for length in LENGTHS]
    prompts = [tuple((7 * i + 11 * length) % n for i in range(length)) for length in lengths]
    checks = list[Check]()
    with progress("checking", len(steerings)) as advance:
        for name, steering in steerings.items():
            what = (
                f"prompts of up to {lengths[-1]} tokens, {name}: difference from the two runs of "
                "transformers' model"
            )
            checks.append(_against_two_runs(what, engine, reference, prompts, steering))
            advance(1)
    facts = {**_facts_of(engine), "engine": engine.name, **engine.details}
    return _diagnosis(engine, head_sets, facts, checks, None)


def _against_two_runs(
    name: str,
    engine: Engine,
    reference: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    steering: Steering,
) -> Check:
    """Check the largest difference of a chosen token from the two runs of a model."""
    requests = [
        Request.of(prompt_ids=ids, max_tokens=N_TOKENS, ignore_eos=True, steering=steering)
        for ids in prompts
    ]
    define = defined_by(reference)
    difference = largest(
        compared(define, request, completion).difference
        for request, completion in zip(requests, engine.generate(requests), strict=True)
    )
    return _check(name, difference, bound_of(reference.describe()), "nats")


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
    facts, reason = model.facts(), None
    kinds = {"heads": model.heads, "engine": model.batches, "prompt": model.prompt}
    if deep:  # at last TransformerLens takes the model apart, and nothing can be asked of it
        kinds |= {"long prompts": model.long_prompts, "TransformerLens": model.lens}
    if not model.loaded.exact:
        reason = (
            "its activations are quantised: steering is approximate, and every answer reports "
            "`exact: false`"
        )
    checks: list[Check] = []
    with progress("checking", len(kinds)) as advance:
        for name, check in kinds.items():
            try:
                checks += check()
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
    return _diagnosis(engine, head_sets, facts, checks, reason)


class _Patient:
    """Our engine with its model, to be checked: by the first head set, or heads of both ends."""

    def __init__(self, engine: BatchingEngine, head_sets: HeadSetLibrary) -> None:
        self.engine, self.loaded = engine, engine.loaded
        pattern, sets = self.loaded.mask_pattern, sorted(head_sets.by_name.items())
        windows = pattern.sliding_windows.values() if pattern else ()
        self.sliding_windows = [width for width in windows if width]
        self.words = PromptForm(self.loaded.tokenizer).tokens(PROMPT)
        ends = (0, self.loaded.layout.n_layers - 1)
        self.steering = (
            as_if_tuned(sets[0][1]) if sets else drawn_steering(self.loaded, ends, 2.0, seed=0)
        )

    def facts(self) -> dict[str, Any]:
        """Return the facts about the model, beside those that are known about any."""
        loaded, engine = self.loaded, self.engine
        return {
            **_facts_of(engine),
            "n_heads": loaded.layout.n_heads,
            "d_head": sorted({layer.d_head for layer in loaded.layout.layers}),
            "n_kv_heads": engine.n_kv_heads,
            "latent_cache": (
                engine.n_kv_heads == 1 and hasattr(text_config(loaded.model), "kv_lora_rank")
            ),
            "sliding_window": min(self.sliding_windows, default=None),
            "rope_switch": loaded.rope_switch,
            "full_rows": engine.mode.full_rows,
            "own_masks": engine.mode.own_masks,
        }

    def heads(self) -> list[Check]:
        difference = check_heads(self.loaded, self.loaded.layout.n_heads)
        name = "each head of each layer: steering by 1 against doubling in the attention"
        return [_check(name, difference, HEADS_TOLERANCE, "of its effect")]

    def batches(self) -> list[Check]:
        name = (
            "short prompts in one batch, prefilled in chunks, any sliding window set to 3: "
            "difference from the two runs"
        )
        measured = verify(self.loaded, self.engine.mode)
        return [_check(name, measured.share, measured.bound, "of what steering changes")]

    def prompt(self) -> list[Check]:
        return [self._steered("a steered prompt through the engine", self.words)]

    def long_prompts(self) -> list[Check]:
        """Check a prompt beyond the sliding windows, and one whose answer crosses a switch."""
        widths, switch, words = self.sliding_windows, self.loaded.rope_switch, self.words
        most = (self.engine.limits.max_model_len or MAX_LONG_PROMPT) - N_TOKENS
        limit = min(MAX_LONG_PROMPT, most)
        if widths and limit < max(widths):
            warnings.warn(
                f"the sliding window of {max(widths)} tokens is not exceeded: the prompts of the "
                f"check have at most {limit}",
                stacklevel=2,
            )
        wanted = [max([512, *(width + N_TOKENS for width in widths)])]
        if switch:
            wanted.append(switch - N_TOKENS // 2)
        return [
            self._steered(
                f"a prompt of {n} tokens and {N_TOKENS} new ones",
                (words * (n // len(words) + 1))[:n],
            )
            for n in sorted({min(n, limit) for n in wanted})
        ]

    def lens(self) -> list[Check]:
        name = "z of every layer: difference from TransformerLens' hook_z"
        ids = torch.tensor([self.words], device=self.loaded.device)  # [1, tokens]
        difference = lens_difference(self.loaded, ids)
        if difference is None:
            return []
        bound = LENS_TOLERANCES.get(self.loaded.dtype, 0.1)
        return [replace(_check(name, difference, bound, "of its size"), decisive=False)]

    def _steered(self, name: str, ids: tuple[int, ...]) -> Check:
        what = f"{name}: difference from the two runs"
        return _against_two_runs(what, self.engine, self.loaded, [ids], self.steering)
