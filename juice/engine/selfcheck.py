"""The check at every load: the engine gives what the model itself gives, steered and not.

Two short prompts of different lengths run through the engine together, prefilled and decoded. Then each whole sequence
runs once more without cache, masks or batching of ours: the clean and the steered run as two full rows. The
log-probabilities of the tokens that were chosen must agree. An architecture that ignores the cache, the masks or the
positions it is given, that mixes rows, or that cannot be entered between layers, differs here and is refused.

What it cannot see: a wrong sliding window (the prompts are shorter) and a wrong partition of z into heads.
"""

from __future__ import annotations

import logging

import torch

from juice.engine.engine import Engine
from juice.engine.limits import Limits
from juice.engine.request import Completion, GenerationRequest
from juice.engine.steer import Steering, SteeringReport, unsteered
from juice.errors import JuiceError, RequestError, UnsupportedModelError
from juice.model.loading import LoadedModel
from juice.model.steering import SteeringPlan

LOG = logging.getLogger("juice.engine")
N_TOKENS = 3
LENGTHS = (2, 5)
# Natural log units; half precision rounds differently for every shape of a batch.
TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def checked_engine(loaded: LoadedModel, limits: Limits | None = None) -> Engine:
    """Return an engine that gives what the model gives: with companions in their windows, else as two full rows.

    Raises UnsupportedModelError where neither does.
    """
    try:
        return _verified(loaded, limits, full_rows=False)
    except UnsupportedModelError as error:
        LOG.info("rows cannot enter and leave between the layers; trying two full rows: %s", error)
        try:
            return _verified(loaded, limits, full_rows=True)
        except UnsupportedModelError:
            raise error from None


def _verified(loaded: LoadedModel, limits: Limits | None, *, full_rows: bool) -> Engine:
    try:
        engine = Engine(loaded, limits, full_rows=full_rows)
    except JuiceError:
        raise
    except Exception as error:  # whatever a model raises at its first token
        raise UnsupportedModelError(f"{type(loaded.model).__name__} cannot run with a cache of ours: {error!r}") from error
    try:
        verify(loaded, engine)
    except BaseException:
        engine.close()
        raise
    return engine


def verify(loaded: LoadedModel, engine: Engine) -> None:
    """Raise UnsupportedModelError unless the engine and the model agree."""
    n, last = loaded.vocabulary_size, loaded.layout.n_layers - 1
    prompts = [tuple((7 * i + 11 * length) % n for i in range(length)) for length in LENGTHS]
    # The clean run passes every layer, or enters behind the first and leaves before the last.
    steerings = [unsteered(), _spread(loaded, 0, last), *([_spread(loaded, 1, last - 1)] if last > 2 else [])]
    requests = [GenerationRequest(prompt_ids=p, max_tokens=N_TOKENS, ignore_eos=True, steering=s) for s in steerings for p in prompts]
    name = type(loaded.model).__name__
    try:
        completions = engine.generate(requests)
        worst = max(_difference(loaded, r, c) for r, c in zip(requests, completions, strict=True))
    except RequestError:  # the limits are too narrow for any request
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError, JuiceError) as error:
        raise UnsupportedModelError(f"{name} cannot run in batches of steered rows: {error!r}") from error
    if worst > TOLERANCES.get(loaded.dtype, 0.3):
        raise UnsupportedModelError(
            f"{name} is not steered exactly: in a batch with a cache its log-probabilities differ by {worst:.2g} from its own; "
            "it ignores the cache, masks or positions it is given, or mixes rows"
        )


def _spread(loaded: LoadedModel, first: int, last: int) -> Steering:
    """Steer one head of two layers and of one in the middle, so that the clean run passes all between."""
    layers = sorted({first, (first + last) // 2, last})
    coefficients = {layer: torch.zeros(loaded.layout.layers[layer].n_heads) for layer in layers}
    for values in coefficients.values():
        values[0] = 0.5
    report = SteeringReport(
        applied=True, target="context", head_set=None, beta_plus=0.5, beta_minus=0.0, strength=1.0, method="juice", n_heads=len(layers)
    )
    return Steering(coefficients=coefficients, report=report)


@torch.inference_mode()
def _difference(loaded: LoadedModel, request: GenerationRequest, completion: Completion) -> float:
    """Return the largest difference of a chosen token's log-probability from the uncached runs."""
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids], device=loaded.device)
    first = len(request.prompt_ids) - 1
    clean_row = {layer: torch.tensor([1, 1], device=loaded.device) for layer in request.steering.coefficients}
    coefficients = {
        layer: torch.stack([values, torch.zeros_like(values)]).to(loaded.device) for layer, values in request.steering.coefficients.items()
    }
    with loaded.turn, loaded.steering.apply(SteeringPlan(clean_row, coefficients)):
        logits = loaded.model(input_ids=tokens[None, :-1].repeat(2, 1), use_cache=False).logits[0, first:]
    expected = logits.float().log_softmax(-1).gather(1, tokens[first + 1 :, None])[:, 0]
    return float((expected.cpu() - torch.tensor(completion.logprobs)).abs().max())
