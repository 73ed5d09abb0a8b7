"""The harness that asks whether any engine gives what the two runs define.

An engine runs a few requests, steered and not. Then each whole sequence runs once more by the
definition, without cache or batch: in our own model, or in the processes that serve it. The
log-probabilities must agree, to a small share of what steering changes in them or to rounding.
Heads are scaled by more until the first is far above the second, and all scales are judged: at a
large one a layer sees little but its heads, and a wrong scale changes nothing.

Deterministic mode is checked here too: a request gets the same bits alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from juice.engine.answer import Completion
from juice.engine.contract import Engine, ModelDescription
from juice.engine.request import Request
from juice.engine.steer import Steering, SteeringReport, unsteered
from juice.engine.vllm import check as vllm
from juice.errors import JuiceError, NonFiniteError, UnsupportedModelError
from juice.model.definition import two_runs
from juice.model.loaded import LoadedModel
from juice.model.masks import narrow_sliding_windows

if TYPE_CHECKING:
    from juice.engine.vllm.engine import VllmEngine

# How far a log-probability may be from that of the two runs, in nats; half precision rounds
# differently for every shape of a batch.
TOLERANCES = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.3, "float16": 0.1}
# The error that a steered request may have: a share of what steering changes, or so many times the
# rounding, whichever is more.
SHARE, TIMES_ROUNDING = 0.05, 4
# Of rounding that was measured on a few prompts, others may have this much.
TIMES_UNSTEERED = 2
# The scales of the heads: by more until steering changes so many times the rounding, in the request
# where it changes least and in that where it changes most, but not without an end.
LEAST_SCALE, LEAST_FAR, MOST_FAR, MOST_SCALE = 2.0, 12, 40, 32.0
# Prompts on which rounding is measured, and at most how many log-probabilities of each.
N_ROUNDED, N_WATCHED = 4, 4096
# Of the requests: so many may be rounded far by what is steered far.
FEW = 0.25


def bound_of(model: ModelDescription) -> float:
    """Return the bound on the distance of a log-probability from that of the two runs, in nats.

    Products with packed weights may be computed in bfloat16, whatever the dtype of the model.
    """
    bound = TOLERANCES.get(model.dtype, TOLERANCES["bfloat16"])
    return bound if model.quantization is None else max(bound, TOLERANCES["bfloat16"])


@contextmanager
def refusing(model: str, refusal: str) -> Iterator[None]:
    """Raise UnsupportedModelError for whatever a model raises within, JuiceError without memory."""
    try:
        yield
    except JuiceError:
        raise
    except torch.OutOfMemoryError as error:
        raise JuiceError(
            f"there is not enough memory to check {model}; choose another --device or "
            "--device-map, or a smaller --dtype"
        ) from error
    except Exception as error:  # whatever a model raises at inputs that it does not expect
        raise UnsupportedModelError(f"{refusal}: {error!r}") from error


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the root of the mean square of a difference of log-probabilities, both [tokens].

    Where both rule out a token it is 0.
    """
    return float(torch.where(one == other, 0, one - other).square().mean().sqrt())


def largest(values: Iterable[float]) -> float:
    """Return the largest number; NaN is larger than any."""
    return max(values, key=lambda value: (value != value, value))


# Log-probabilities to compare: the number of a new token, and the tokens whose they are.
Read = tuple[int, Sequence[int]]
# Whoever computes the two runs: from a request, the tokens that were generated for it and what to
# read, to what is read in the clean run and in the steered run, each float32 [tokens of the read].
Definition = Callable[
    [Request, Sequence[int], Sequence[Read]],
    tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
]


def defined_by(
    loaded: LoadedModel, sliding_window: int | None = None, *, n_rows: int = 1, n_padding: int = 0
) -> Definition:
    """Return the definition by our own model.

    Args:
        loaded: The model.
        sliding_window: The width of its sliding windows; None for its own.
        n_rows: The number of equal rows that run together. It changes nothing but rounding.
        n_padding: The number of tokens after those that count; likewise.
    """

    def define(
        request: Request, new: Sequence[int], reads: Sequence[Read]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        tokens, steering = torch.tensor([*request.prompt_ids, *new]), request.steering
        first, end, switch = len(request.prompt_ids) - 1, len(tokens) - 1, loaded.rope_switch
        # Tokens up to a switch of positions were chosen from a shorter text, with other keys.
        ends = [switch, end] if switch is not None and first < switch < end else [end]
        padding = tokens[:1].repeat(n_padding)
        with loaded.turn, narrow_sliding_windows(loaded.model, sliding_window):
            parts = [
                [
                    run[: stop - start]
                    for run in two_runs(
                        loaded,
                        torch.cat([tokens[:stop], padding]).to(loaded.device),
                        steering.coefficients,
                        stop - start + n_padding,
                        steering.factors(
                            torch.arange(stop + n_padding), len(request.prompt_ids)
                        ).to(loaded.device),
                        "june" if steering.report.method == "june" else "juice",
                        n_rows=n_rows,
                    )
                ]
                for start, stop in pairwise([first, *ends])
            ]
        # [new tokens, vocabulary]
        clean, steered = (torch.cat(run).log_softmax(-1).cpu() for run in zip(*parts, strict=True))
        return [clean[i, ids] for i, ids in reads], [steered[i, ids] for i, ids in reads]

    return define


class Comparison(NamedTuple):
    """The distance of a completion from the two runs, in nats.

    Args:
        difference: The largest difference of a chosen token's log-probability.
        error: The difference of the log-probabilities at one token, as the root of the mean square
            over the tokens that were reported; the largest over the new tokens.
        effect: The same of the two runs from each other: what steering changes.
        rounding: Computes the same of the steered run from itself, rounded otherwise.
    """

    difference: float
    error: float
    effect: float
    rounding: Callable[[], float]


def compared(
    define: Definition,
    request: Request,
    completion: Completion,
    others: Sequence[Definition] = (),
) -> Comparison:
    """Return the distance of a completion from the two runs.

    Args:
        define: Computes the two runs.
        request: The request; the log-probabilities that it watches are compared too.
        completion: Its completion by an engine, with any alternatives to its tokens.
        others: Compute the two runs, too, and round otherwise.
    """
    scored = [((token.id, token.logprob), *token.top) for token in completion.tokens]
    reads: list[Read] = [(i, [id_ for id_, _ in pairs]) for i, pairs in enumerate(scored)]
    given = [torch.tensor([logprob for _, logprob in pairs]) for pairs in scored]
    n_chosen = len(reads)
    if request.options.watch:
        reads.append((0, request.options.watch))
        given.append(torch.tensor(completion.watched))
    clean, steered = define(request, completion.token_ids, reads)

    def rounding() -> float:
        runs = [other(request, completion.token_ids, reads)[1] for other in others]
        apart = (distance(*pair) for run in runs for pair in zip(steered, run, strict=True))
        return largest([0.0, *apart])

    pairs = list(zip(given, steered, strict=True))
    return Comparison(
        largest(abs(float(one[0] - other[0])) for one, other in pairs[:n_chosen]),
        largest(distance(one, other) for one, other in pairs),
        largest(distance(one, other) for one, other in zip(clean, steered, strict=True)),
        rounding,
    )


def rounding_of(requests: Iterable[Request], define: Definition, other: Definition) -> float:
    """Return the change of log-probabilities by the shape of a forward alone, in nats.

    Args:
        requests: Have prompts to measure it on, without steering.
        define: Computes the two runs.
        other: Computes them, too, and rounds otherwise.
    """
    differences = [0.0]
    for request in requests:
        reads, new = [(0, request.options.watch)], request.prompt_ids[:1]
        plain = replace(request, steering=unsteered())
        one, another = (runs(plain, new, reads)[0][0] for runs in (define, other))
        differences.append(distance(one, another))
    return largest(differences)


def spread(vocabulary_size: int) -> tuple[int, ...]:
    """Return tokens whose log-probabilities stand for those of all; all take a check's time."""
    return tuple(range(0, vocabulary_size, -(-vocabulary_size // N_WATCHED)))


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The agreement of an engine and the two runs.

    Args:
        unsteered: The largest difference or error of a request that is not steered, in nats.
        steered: The largest error of a steered one, in nats.
        share: The error of the worst request, as a share of what steering changes.
        bound: The share that is allowed there.
        least_effect: The least that steering changes in a request, in nats.
        most_effect: The most.
        coefficient: The scale of the heads.
        rounding: The difference by rounding alone, which was measured apart, in nats.
    """

    unsteered: float
    steered: float
    share: float
    bound: float
    least_effect: float
    most_effect: float
    coefficient: float
    rounding: float

    def nats_of(self, model: ModelDescription) -> float:
        """Return the difference that requests which are not steered may have, in nats."""
        return max(bound_of(model), TIMES_UNSTEERED * self.rounding)

    def is_close(self, model: ModelDescription) -> bool:
        """Return whether all of it is within its bounds; NaN is not."""
        return self.share <= self.bound and self.unsteered <= self.nats_of(model)

    @property
    def larger_scale(self) -> float:
        """The scale by which steering may change enough, the same where it does already."""
        # What steering changes grows with the scale, at first in proportion, and then by less.
        missing = self.rounding * max(LEAST_FAR / self.least_effect, MOST_FAR / self.most_effect)
        if missing <= 1:
            return self.coefficient
        return min(MOST_SCALE, self.coefficient * 3 * missing)


def agreement(
    engine: Engine,
    requests_at: Callable[[float], list[Request]],
    define: Definition,
    *,
    run: Callable[[list[Request]], list[Completion]] | None = None,
    rounding: float,
    others: Sequence[Definition] = (),
) -> Agreement:
    """Return the agreement of an engine with the two runs, by steering far from rounding.

    It is that of the largest scale, or of the first at which they are not close.

    Args:
        engine: The engine.
        requests_at: Gives the requests whose largest coefficient is a scale.
        define: Computes the two runs.
        run: Runs the requests; None: the engine does, all together.
        rounding: The difference of log-probabilities by rounding alone, in nats.
        others: Compute the two runs, too, and round otherwise.

    Raises:
        UnsupportedModelError: Steering changes nothing.
    """
    run, scale = run or engine.generate, LEAST_SCALE
    while True:
        requests = requests_at(scale)
        comparisons = [
            compared(define, request, completion, others)
            for request, completion in zip(requests, run(requests), strict=True)
        ]
        is_steered = any(request.steering.coefficients for request in requests)
        measured = _measured(comparisons, scale, rounding, is_steered=is_steered)
        if not measured.least_effect:
            raise UnsupportedModelError(
                f"{engine.description.identity.architecture} is not steered exactly: no head that "
                "was scaled changes a log-probability"
            )
        larger = measured.larger_scale
        if larger == scale or not measured.is_close(engine.description):
            return measured
        scale = larger


def _measured(
    comparisons: Sequence[Comparison], scale: float, rounding: float, *, is_steered: bool
) -> Agreement:
    """Return the agreement at one scale; where no request is steered, any effect is enough."""
    moved = [c for c in comparisons if c.effect]
    effects = [c.effect for c in moved] or [0.0 if is_steered else float("inf")]
    least = min(effects)
    share, bound = _worst_share(comparisons, rounding, least or float("inf"))
    return Agreement(
        unsteered=largest(largest(c[:2]) for c in comparisons if not c.effect),
        steered=largest([0.0, *(c.error for c in moved)]),
        share=share,
        bound=bound,
        least_effect=least,
        most_effect=max(effects),
        coefficient=scale,
        rounding=rounding,
    )


def _worst_share(
    comparisons: Sequence[Comparison], rounding: float, least: float
) -> tuple[float, float]:
    """Return the error that exceeds its bound by most, and that bound, as shares of the effects.

    Where steering changes nothing, they are shares of the least effect. Where few requests exceed
    their bounds, theirs is the rounding of their steered runs.
    """
    effects = [c.effect or least for c in comparisons]
    shares = [c.error / effect for c, effect in zip(comparisons, effects, strict=True)]
    bounds = [_bound(rounding / effect) for effect in effects]
    over = [i for i, share in enumerate(shares) if share > bounds[i]]
    if len(over) <= FEW * len(comparisons):
        for i in over:
            bounds[i] = _bound(max(rounding, comparisons[i].rounding()) / effects[i])
    return max(
        zip(shares, bounds, strict=True),
        key=lambda pair: (pair[0] != pair[0], pair[0] / pair[1]),
    )


def _bound(rounding: float) -> float:
    """Return the error that is allowed beside a rounding, both as shares of an effect."""
    return max(SHARE, TIMES_ROUNDING * rounding)


def check_vllm(engine: VllmEngine) -> Agreement:
    """Return the agreement of vLLM and the two runs of its workers, and keep it as a fact.

    Raises UnsupportedModelError where they do not.
    """
    model = engine.description
    define, *others = (
        partial(vllm.two_runs, engine, n_padding=n_padding) for n_padding in vllm.PADDINGS
    )
    requests_at = partial(vllm.requests_at, engine)
    few = [
        request.with_options(watch=spread(model.vocabulary_size))
        for request in requests_at(LEAST_SCALE)[-N_ROUNDED:]
    ]
    try:
        measured = agreement(
            engine,
            requests_at,
            define,
            run=partial(vllm.run_preempted, engine),
            rounding=rounding_of(few, define, others[0]),
            others=others,
        )
    except NonFiniteError as error:
        raise _inexact(model, "some log-probabilities are not numbers") from error
    # Where rounding is fine, what is steered is within the same bound in nats, too.
    is_fine = bound_of(model) == TOLERANCES["float32"]
    most_steered = measured.nats_of(model) if is_fine else float("inf")
    if not measured.is_close(model) or measured.steered > most_steered:
        raise _inexact(
            model,
            f"log-probabilities differ from those of two runs by {measured.steered:.2g} steered, "
            f"{measured.share:.0%} of what steering changes, and by {measured.unsteered:.2g} "
            f"unsteered; at most {measured.bound:.0%} and {measured.nats_of(model):.2g} are "
            "allowed",
        )
    named = ("unsteered", "steered", "share", "least_effect", "coefficient")
    engine.checked = {name: getattr(measured, name) for name in named}
    return measured


def _inexact(model: ModelDescription, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{model.identity.architecture} is not steered exactly in vLLM: {reason}: load it with "
        "--dtype float32, try --vllm-arg enforce_eager=true, or serve it with --engine own"
    )


# Each second one is steered.
INVARIANCE_LENGTHS = ((12, 6), (3, 9), (33, 4), (5, 8), (1, 7), (18, 5), (2, 9), (7, 3))


def check_invariance(engine: Engine) -> None:
    """Raise UnsupportedModelError where neighbours change what a request gets.

    Requests of several lengths run one after another and then all at once, with rows that join and
    leave. Tokens and log-probabilities must be equal, not close. It shows that an engine's claim is
    false, never that it is true: kernels may differ at lengths that were not tried.
    """
    model, heads = engine.description, engine.description.heads_per_layer
    ends = {0: torch.ones(heads[0]), len(heads) - 1: torch.ones(heads[-1])}
    window = engine.companion_layers(steering_by(ends, 1.0))
    scales = {
        layer: torch.linspace(-1, 1, heads[layer]) for layer in sorted({*window[:1], *window[-1:]})
    }
    by_turns = [unsteered(), steering_by(scales, 1.0) if scales else unsteered()]
    steerings = by_turns * (len(INVARIANCE_LENGTHS) // 2)
    requests = requests_of(INVARIANCE_LENGTHS, steerings, model.vocabulary_size)
    alone = [engine.generate([request])[0] for request in requests]
    for single, batched in zip(alone, engine.generate(requests), strict=True):
        if (single.token_ids, single.logprobs) != (batched.token_ids, batched.logprobs):
            raise UnsupportedModelError(
                f"deterministic: {model.identity.id} gets other numbers in a batch than alone on "
                f"the engine {engine.name!r}; leave deterministic out, or choose the engine "
                '"own"'
            )


def requests_of(
    lengths: Sequence[tuple[int, int]],
    steerings: Iterable[Steering],
    vocabulary_size: int,
    **options: Any,
) -> list[Request]:
    """Return a request for each steering, of so many tokens of its prompt and of its answer."""
    return [
        Request.of(
            prompt_ids=tuple((7 * j + 5 * i + 1) % vocabulary_size for j in range(length)),
            max_tokens=n_new,
            ignore_eos=True,
            steering=steering,
            **options,
        )
        for i, ((length, n_new), steering) in enumerate(zip(lengths, steerings, strict=True))
    ]


def steering_by(coefficients: dict[int, torch.Tensor], scale: float) -> Steering:
    """Return a steering by coefficients of a check, by layer, float32 [n_heads]."""
    report = SteeringReport(
        applied=True, target="context", beta_plus=scale, strength=1.0, n_heads=len(coefficients)
    )
    return Steering(coefficients=coefficients, report=report)
