"""The harness of both engines' checks: what it measures, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import juice
from juice.checks.at_load import requests_at
from juice.checks.two_runs import (
    OWN,
    VLLM,
    Agreement,
    Definition,
    agreement,
    bound_of,
    defined_by,
    largest,
)
from juice.engine.answer import Completion
from juice.engine.request import Request
from juice.engine.steer import unsteered
from juice.errors import UnsupportedModelError
from tests.support import tiny

GOOD = Agreement(
    unsteered=1e-6, steered=1e-6, share=0.0, bound=0.05, least_effect=1.0, coefficient=2.0
)


@pytest.fixture(scope="module")
def model() -> Iterator[juice.SteeredModel]:
    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as loaded:
        yield loaded


def measured(model: juice.SteeredModel, define: Any, **changes: Any) -> Agreement:
    asked = changes.pop("asked", partial(requests_at, model.loaded))
    return agreement(model.engine, changes.pop("demands", OWN), asked, define, **changes)


def test_an_engine_that_is_exact_agrees_by_either_measure(model: juice.SteeredModel) -> None:
    define = defined_by(model.loaded)
    for demands, rounding in ((OWN, 1e-6), (VLLM, None)):
        found = measured(model, define, demands=demands, rounding=rounding)
        assert found.share < 1e-3
        assert found.is_close(demands, model.description)


@pytest.mark.parametrize(("lengths", "few"), [({12, 9}, True), ({12, 9, 7, 6, 5}, False)])
def test_few_requests_may_be_rounded_as_far_as_their_steered_runs(
    model: juice.SteeredModel, lengths: set[int], few: bool
) -> None:
    """Kills: a bound that a GPU's rounding of a large model exceeds, and one that excuses all."""
    right = defined_by(model.loaded)

    def rounded(size: float) -> Definition:
        def define(request: Request, *read: Any) -> Any:
            clean, steered = right(request, *read)
            is_far = len(request.prompt_ids) in lengths
            return clean, [one + size * is_far for one in steered]

        return define

    def is_close(**others: Any) -> bool:
        found = measured(model, rounded(0.2), rounding=1e-6, **others)
        return found.is_close(OWN, model.description)

    assert is_close(others=[rounded(0.0), rounded(0.12)]) == few
    assert not is_close(others=[rounded(0.19)])
    assert not is_close()


def test_another_definition_is_noticed(model: juice.SteeredModel) -> None:
    """Kills: a harness that compares an engine with itself, or reads another token."""
    right = defined_by(model.loaded)

    def scaled(request: Request, *read: Any) -> Any:
        steering = request.steering
        larger = {layer: 1.25 * coefficient for layer, coefficient in steering.coefficients.items()}
        return right(replace(request, steering=replace(steering, coefficients=larger)), *read)

    def shifted(request: Request, new: Sequence[int], reads: Any) -> Any:
        return right(request, new, [(max(0, i - 1), ids) for i, ids in reads])

    for wrong in (scaled, shifted):
        for demands in (OWN, VLLM):
            found = measured(model, wrong, demands=demands, rounding=1e-6)
            assert not found.is_close(demands, model.description)


def test_steering_that_changes_nothing_is_refused(model: juice.SteeredModel) -> None:
    right = defined_by(model.loaded)

    def plain(request: Request, *read: Any) -> Any:
        return right(replace(request, steering=unsteered()), *read)

    with pytest.raises(UnsupportedModelError, match="no head that was scaled changes"):
        measured(model, plain, rounding=1e-6)


def test_an_engine_that_steers_no_layer_is_checked_unsteered(model: juice.SteeredModel) -> None:
    """As vLLM is without head sets."""

    def asked(scale: float) -> list[Request]:
        return [replace(each, steering=unsteered()) for each in requests_at(model.loaded, scale)]

    found = measured(model, defined_by(model.loaded), demands=VLLM, asked=asked)
    assert found.is_close(VLLM, model.description)
    assert found.share == 0


def test_coarse_rounding_costs_no_second_round(model: juice.SteeredModel) -> None:
    """Kills: a check that begins so near to rounding that everything has to run again."""
    rounds = []

    def run(requests: list[Request]) -> list[Completion]:
        rounds.append(requests)
        return model.engine.generate(requests)

    found = measured(model, defined_by(model.loaded), rounding=0.5, run=run)
    assert found.coefficient == OWN.most_scale
    assert len(rounds) == 1


def test_unsteered_requests_may_differ_by_rounding_that_was_measured_apart(
    model: juice.SteeredModel,
) -> None:
    """Kills: the narrow bound in nats that sent Gemma 3 to batches of one length in bfloat16."""
    far = replace(GOOD, unsteered=0.4)
    assert not far.is_close(OWN, model.description)
    assert not replace(far, rounding=0.19).is_close(OWN, model.description)
    assert replace(far, rounding=0.21).is_close(OWN, model.description)
    engines = measured(model, defined_by(model.loaded), demands=VLLM)
    assert engines.rounding == 0  # rounding that the engine says it has excuses nothing


@pytest.mark.parametrize("name", ["unsteered", "steered", "share"])
def test_nan_is_not_close(name: str, model: juice.SteeredModel) -> None:
    assert GOOD.is_close(VLLM, model.description)
    assert not replace(GOOD, **{name: float("nan")}).is_close(VLLM, model.description)
    assert largest([1.0, float("nan"), 2.0]) != largest([1.0, 2.0])


def test_packed_weights_are_allowed_the_rounding_of_half_precision(
    model: juice.SteeredModel,
) -> None:
    bounds = {
        dtype: bound_of(replace(model.description, dtype=dtype))
        for dtype in ("float32", "float16", "bfloat16")
    }
    assert bounds["float32"] < bounds["float16"] < bounds["bfloat16"]
    packed = replace(model.description, quantization="bitsandbytes-4bit")
    assert bound_of(packed) == bounds["bfloat16"]
