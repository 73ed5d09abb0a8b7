"""An engine that runs a model elsewhere, such as vLLM, against transformers' own model beside it.

The check at such an engine's start compares it with the modules that it runs itself. This one needs
the model a second time, and shares nothing with the engine but the files.
"""

from __future__ import annotations

from typing import Any

from juice.engine import Engine, GenerationRequest, Steering
from juice.engine.steering import unsteered
from juice.exactness.comparison import bound_of, compared
from juice.exactness.costs import as_if_tuned, costs_of
from juice.exactness.report import Check, Diagnosis
from juice.head_set import HeadSetLibrary
from juice.model.differences import largest
from juice.model.loaded import LoadedModel
from juice.progress import Progress, silent

N_TOKENS = 8
LENGTHS = (5, 40, 200)


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
    steerings: dict[str, Steering] = {"unsteered": unsteered()}
    steerings |= {name: as_if_tuned(own) for name, own in sorted(head_sets.by_name.items())}
    bound, checks = bound_of(reference), list[Check]()
    with progress("checking", len(steerings)) as advance:
        for name, steering in steerings.items():
            difference = _difference(engine, reference, steering)
            checks.append(
                Check(
                    name=f"prompts of up to {_lengths(engine)[-1]} tokens, {name}: difference from "
                    "the two runs of transformers' model",
                    passed=difference <= bound,
                    difference=difference,
                    bound=bound,
                    unit="nats",
                )
            )
            advance(1)
    failed = [check for check in checks if not check.passed]
    reason = f"{failed[0].name} is {failed[0].difference:.2g}" if failed else None
    own = engine.description
    return Diagnosis(
        model=own.identity.id,
        exact=reason is None,
        reason=reason,
        facts=_facts(engine),
        checks=tuple(checks),
        head_sets=costs_of(head_sets, engine),
        unfit_head_sets={k: v for k, v in head_sets.unfit.items() if k not in head_sets.foreign},
        n_foreign_head_sets=len(head_sets.foreign),
    )


def _lengths(engine: Engine) -> list[int]:
    limit = (engine.limits.max_model_len or LENGTHS[-1] + N_TOKENS) - N_TOKENS
    return [min(n, limit) for n in LENGTHS]


def _difference(engine: Engine, reference: LoadedModel, steering: Steering) -> float:
    n = engine.description.vocabulary_size
    requests = [
        GenerationRequest(
            prompt_ids=tuple((7 * i + 11 * length) % n for i in range(length)),
            max_tokens=N_TOKENS,
            ignore_eos=True,
            steering=steering,
        )
        for length in _lengths(engine)
    ]
    return largest(
        compared(reference, request, completion).difference
        for request, completion in zip(requests, engine.generate(requests), strict=True)
    )


def _facts(engine: Engine) -> dict[str, Any]:
    own = engine.description
    return {
        "architecture": own.identity.architecture,
        "fingerprint": own.identity.fingerprint,
        "dtype": own.dtype,
        "device": own.device,
        "n_layers": own.n_layers,
        "kv_bytes_per_token": engine.n_kv_bytes_per_token,
        "context": own.max_positions,
        "engine": engine.name,
        **engine.details,
    }
