"""The check of vLLM at every start: the requests that it runs, and the two runs of its workers.

Prompts of different lengths run together: unsteered, with one head of each layer that can be
steered and with all these at once, in one run, and in two where there are companions. They begin
alike, so that what is cached under a wrong key would be shared; some are longer than a step, others
end early so that rows move, and all are preempted once. Before, the first two run without the
others, and so without companions: an unsteered one, and one run of all layers. The last ones are
steered at some positions only, by a schedule.

Then every rank runs each whole sequence by the definition, in two runs of the same modules without
a cache (`juice.engine.vllm.worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from juice.engine.answer import Completion
from juice.engine.request import MAX_TOP_LOGPROBS, Request
from juice.engine.steer import Steering, SteeringReport, unsteered
from juice.engine.vllm.arguments import Coefficients
from juice.formula import SteerMethod

if TYPE_CHECKING:
    from juice.engine.vllm.engine import VllmEngine


N_APART = 2  # requests that run without the others
# Tokens after those that count, in the definition and where it is to round otherwise. The longest
# requests leave room for so many.
PADDINGS = (0, 7, 3, 1)


def requests_at(engine: VllmEngine, scale: float) -> list[Request]:
    """Return the requests of the check, whose heads are scaled by `scale`."""
    model, limits, layers = engine.description, engine.limits, engine.layers
    n_heads, n_shared = min(model.heads_per_layer), engine.facts["block_size"]
    assert limits.max_model_len is not None, "vLLM settles it at its start"
    assert limits.max_prefill_tokens is not None, "vLLM settles it, too"
    # The longest leaves others a part of a step, and begins as all do. Longer ones the definition
    # could not run: what experts work in has been measured with a step.
    n_most = max(limits.max_prefill_tokens - 16, n_shared + 40)
    n_most = max(8, min(n_most, limits.max_model_len - 16))
    heads = {layer: (7 * layer + 3) % n_heads for layer in layers.steered}
    in_two = {layer: heads[layer] for layer in layers.window}
    steered: list[tuple[dict[int, list[int]], SteerMethod]] = [
        ({layer: [head] for layer, head in heads.items()}, "june"),
        *(({layer: [head]}, "june") for layer, head in heads.items() if layer not in in_two),
        *(({min(in_two): [0], layer: [head]}, "juice") for layer, head in in_two.items()),
        ({layer: [head, 0] for layer, head in in_two.items()}, "juice"),
    ]
    steerings = [
        unsteered(),
        *(one_steering(scaled, n_heads, scale, by) for scaled, by in steered if scaled),
        unsteered(),
    ]
    requests = []
    for i, steering in enumerate(steerings):
        n = min(n_most, n_most if i == 1 else (i % 2) * n_shared + 3 + (11 * i) % 37)
        ids = tuple(
            (7 * j + (13 * i if j >= n_shared else 0) + 5) % model.vocabulary_size for j in range(n)
        )
        requests.append(
            Request.of(
                prompt_ids=ids,
                max_tokens=2 + 3 * (i % 3),
                ignore_eos=True,
                steering=steering,
                top_logprobs=min(MAX_TOP_LOGPROBS, model.vocabulary_size),
            )
        )
    *_, shorter, _ = requests
    in_parts = [
        replace(shorter.with_options(max_tokens=8), steering=in_part(steering, shorter))
        for steering in {id(s): s for s in (steerings[1], steerings[-2])}.values()
        if steering.coefficients
    ]
    return [*requests[:N_APART], *requests, *in_parts]


def in_part(steering: Steering, request: Request) -> Steering:
    """Return a steering of the last tokens of a request's prompt and the first new ones.

    It changes from token to token.
    """
    n_prompt = len(request.prompt_ids)
    return replace(
        steering, first_position=n_prompt - 2, last_position=n_prompt + 4, schedule=(1.0, 0.5, 2.0)
    )


def one_steering(
    heads: dict[int, list[int]], n_heads: int, coefficient: float, method: SteerMethod
) -> Steering:
    """Return a steering of some heads by one coefficient; the heads are given by layer."""
    coefficients = {layer: torch.zeros(n_heads) for layer in heads}
    for layer, scaled in heads.items():
        coefficients[layer][scaled] = coefficient
    report = SteeringReport(
        applied=True, target="context", beta_plus=coefficient, strength=1.0, method=method
    )
    return Steering(coefficients=coefficients, report=report)


def run_preempted(engine: VllmEngine, requests: Sequence[Request]) -> list[Completion]:
    """Run the first of them, and then the others together; return their completions.

    These are all preempted once. Between pipeline stages steps are in flight, of which vLLM can
    preempt nothing.
    """
    apart, requests = engine.generate(requests[:N_APART]), requests[N_APART:]
    engine.preempt().result()  # and forget what is cached
    done: dict[int, Completion] = {}
    was_preempted = engine.facts["n_stages"] > 1
    for update in engine.stream(requests):
        if update.completion is not None:
            done[update.index] = update.completion
        elif not was_preempted:
            was_preempted = True
            engine.preempt().result()
    return [*apart, *(done[i] for i in range(len(requests)))]


def two_runs(
    engine: VllmEngine,
    request: Request,
    new: Sequence[int],
    reads: Sequence[tuple[int, Sequence[int]]],
    *,
    n_padding: int,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return log-probabilities in the clean run and in the steered run, each float32 [tokens].

    Args:
        engine: The engine, whose workers run.
        request: The request.
        new: The tokens that were generated.
        reads: The tokens whose to return, for each new one in turn.
        n_padding: The number of tokens after those that count, which changes how the others round.
    """
    tokens, read = [*request.prompt_ids, *new], [list(ids) for _, ids in reads]
    coefficients = Coefficients.of(request.steering, len(request.prompt_ids))
    run = partial(engine.two_runs, tokens, read=read, n_padding=n_padding)
    clean = run(coefficients=None)  # [new tokens, read]
    steered = clean if coefficients is None else run(coefficients=coefficients)
    return [*clean], [*steered]
