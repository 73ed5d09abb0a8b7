"""The check at every load: the engine gives what the model itself gives, steered and not.

Short prompts of different lengths run through a small engine together, read in chunks and decoded. Then each whole sequence
runs once more as the definition has it, in two runs without cache, masks, batches or hooks of ours. The log-probabilities of
the tokens that were chosen must agree. An architecture that ignores the cache, the masks or the positions it is given, that
mixes rows, or that cannot be entered between layers, differs here; what is fastest among the modes that agree serves it, and a
model for which none does is refused.

Sliding windows are longer than any prompt that a load has time for: so for the check the model is given a window of three.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from juice.engine.engine import Engine
from juice.engine.limits import MIB, Limits
from juice.engine.mode import MODES, Mode
from juice.engine.request import Completion, GenerationRequest
from juice.engine.steer import Steering, SteeringReport, unsteered
from juice.errors import JuiceError, RankLostError, UnsupportedModelError
from juice.model.loading import LoadedModel

LOG = logging.getLogger("juice.engine")
N_TOKENS = 3
LENGTHS = (2, 5)
WINDOW = 3
# Prompts join as others leave, and the longer ones are read in two chunks.
LIMITS = Limits(max_batch=3, max_prefill_tokens=4, kv_memory_bytes=64 * MIB)
# Natural log units; half precision rounds differently for every shape of a batch.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def checked_engine(loaded: LoadedModel, limits: Limits | None = None) -> Engine:
    """Return an engine that gives what the model gives, in the fastest mode that does; raises UnsupportedModelError where none does."""
    return Engine(loaded, limits, exact_mode(loaded)[0])


def exact_mode(loaded: LoadedModel) -> tuple[Mode, float]:
    """Return the fastest mode in which engine and model agree, and the largest difference there, in natural log units.

    Raises UnsupportedModelError, with the first reason, where no mode does.
    """
    reasons: list[UnsupportedModelError] = []
    for mode in MODES:
        # Without masks of ours there is no padding: neither for rows of different lengths nor for a switch of positions.
        if mode.own_masks if loaded.rope_switch is not None else loaded.attention is None and not mode.own_masks:
            continue
        try:
            return mode, verify(loaded, mode)
        except UnsupportedModelError as error:
            LOG.info("%s is not exact in %s: %s", type(loaded.model).__name__, mode, error)
            reasons.append(error)
    raise reasons[0]


def verify(loaded: LoadedModel, mode: Mode) -> float:
    """Return the largest difference between engine and model; raises UnsupportedModelError where it is too large."""
    name = type(loaded.model).__name__
    try:
        worst = _worst_difference(loaded, replace(mode, window=WINDOW))
    except RankLostError:
        raise
    except JuiceError as error:
        raise UnsupportedModelError(f"{name} cannot run in batches of steered rows: {error}") from error
    except Exception as error:  # whatever a model raises at inputs that it does not expect
        raise UnsupportedModelError(f"{name} cannot run with a cache of ours: {error!r}") from error
    if not worst <= TOLERANCES.get(loaded.dtype, 0.3):
        raise UnsupportedModelError(
            f"{name} is not steered exactly: in a batch with a cache its log-probabilities differ by {worst:.2g} from its own; "
            "it ignores the cache, masks or positions it is given, or mixes rows"
        )
    return worst


def _worst_difference(loaded: LoadedModel, mode: Mode) -> float:
    n, last = loaded.vocabulary_size, loaded.layout.n_layers - 1
    prompts = [tuple((7 * i + 11 * length) % n for i in range(length)) for length in LENGTHS]
    # The clean run passes every layer, or enters behind the first and leaves before the last.
    steerings = [unsteered(), spread_steering(loaded, 0, last), *([spread_steering(loaded, 1, last - 1)] if last > 2 else [])]
    requests = [GenerationRequest(prompt_ids=p, max_tokens=N_TOKENS, ignore_eos=True, steering=s) for s in steerings for p in prompts]
    engine = Engine(loaded, LIMITS, mode)
    try:
        completions = engine.generate(requests)
        differences = [difference_from_two_runs(engine, r, c) for r, c in zip(requests, completions, strict=True)]
    finally:
        engine.close()
    return max(differences, key=lambda difference: (difference != difference, difference))  # not a number is the worst


def spread_steering(loaded: LoadedModel, first: int, last: int) -> Steering:
    """Steer one head of two layers and of one in the middle, so that the clean run passes all between."""
    layers = sorted({first, (first + last) // 2, last})
    coefficients = {layer: torch.zeros(loaded.layout.layers[layer].n_heads) for layer in layers}
    for values in coefficients.values():
        values[0] = 0.5
    report = SteeringReport(
        applied=True, target="context", head_set=None, beta_plus=0.5, beta_minus=0.0, strength=1.0, method="juice", n_heads=len(layers)
    )
    return Steering(coefficients=coefficients, report=report)


def difference_from_two_runs(engine: Engine, request: GenerationRequest, completion: Completion) -> float:
    """Return the largest difference of a chosen token's log-probability from the two runs."""
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids])
    first = len(request.prompt_ids) - 1
    logits = engine.runner.two_runs(tokens[:-1], request.steering.coefficients)[first:].cpu()
    expected = logits.log_softmax(-1).gather(1, tokens[first + 1 :, None])[:, 0]
    return float((expected.cpu() - torch.tensor(completion.logprobs)).abs().max())
