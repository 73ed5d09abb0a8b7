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
    LEAST_SCALE,
    MOST_FAR,
    Agreement,
    Definition,
    agreement,
    bound_of,
    defined_by,
    largest,
    rounding_of,
)
from juice.engine.request import Request
from juice.engine.steer import unsteered
from juice.errors import UnsupportedModelError
from tests.support import tiny

GOOD = Agreement(
    unsteered=1e-6,
    steered=1e-6,
    share=0.0,
    bound=0.05,
    least_effect=1.0,
    most_effect=2.0,
    coefficient=4.0,
    rounding=1e-6,
)


@pytest.fixture(scope="module")
def model() -> Iterator[juice.SteeredModel]:
    with juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer()) as loaded:
        yield loaded


def measured(model: juice.SteeredModel, define: Any, **changes: Any) -> Agreement:
    asked = changes.pop("asked", partial(requests_at, model.loaded))
    return agreement(model.engine, asked, define, **{"rounding": 1e-6, **changes})


def test_an_engine_that_is_exact_agrees(model: juice.SteeredModel) -> None:
    found = measured(model, defined_by(model.loaded))
    assert found.share < 1e-3
    assert found.is_close(model.description)


def test_rounding_is_what_another_definition_gives_without_steering(
    model: juice.SteeredModel,
) -> None:
    right = defined_by(model.loaded)

    def shifted(request: Request, *read: Any) -> Any:
        clean, steered = right(request, *read)
        assert steered[0].equal(clean[0])
        return [one + 0.25 for one in clean], steered

    requests = requests_at(model.loaded, LEAST_SCALE)
    assert rounding_of(requests, right, shifted) == pytest.approx(0.25)
    assert rounding_of(requests, right, right) == 0


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
        found = measured(model, rounded(0.2), **others)
        return found.is_close(model.description)

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
        assert not measured(model, wrong).is_close(model.description)


def test_steering_that_changes_nothing_is_refused(model: juice.SteeredModel) -> None:
    right = defined_by(model.loaded)

    def plain(request: Request, *read: Any) -> Any:
        return right(replace(request, steering=unsteered()), *read)

    with pytest.raises(UnsupportedModelError, match="no head that was scaled changes"):
        measured(model, plain)


def test_an_engine_that_steers_no_layer_is_checked_unsteered(model: juice.SteeredModel) -> None:
    """As vLLM is without head sets."""

    def asked(scale: float) -> list[Request]:
        return [replace(each, steering=unsteered()) for each in requests_at(model.loaded, scale)]

    found = measured(model, defined_by(model.loaded), asked=asked)
    assert found.is_close(model.description)
    assert found.share == 0


def test_a_mistake_that_only_a_small_scale_shows_is_noticed(model: juice.SteeredModel) -> None:
    """Kills: a check that judges only where rounding is small and the heads are all there is.

    A wrong scale of Gemma 3 in bfloat16 passed there.
    """
    right = defined_by(model.loaded)
    most_effect = measured(model, right).most_effect
    rounding = 1.5 * most_effect / MOST_FAR  # so coarse that the first scale is not enough

    def wrong_at(scale: float) -> Definition:
        def define(request: Request, *read: Any) -> Any:
            clean, steered = right(request, *read)
            if request.steering.report.beta_plus != scale:
                return clean, steered
            return clean, [2 * c - s for c, s in zip(clean, steered, strict=True)]

        return define

    found = measured(model, right, rounding=rounding)
    assert found.is_close(model.description)
    assert found.coefficient > LEAST_SCALE
    for scale in (LEAST_SCALE, found.coefficient):
        assert not measured(model, wrong_at(scale), rounding=rounding).is_close(model.description)


def test_unsteered_requests_may_differ_by_rounding_that_was_measured_apart(
    model: juice.SteeredModel,
) -> None:
    """Kills: the narrow bound in nats that sent Gemma 3 to batches of one length in bfloat16."""
    far = replace(GOOD, unsteered=0.4)
    assert not far.is_close(model.description)
    assert not replace(far, rounding=0.19).is_close(model.description)
    assert replace(far, rounding=0.21).is_close(model.description)


@pytest.mark.parametrize("name", ["unsteered", "share"])
def test_nan_is_not_close(name: str, model: juice.SteeredModel) -> None:
    assert GOOD.is_close(model.description)
    assert not replace(GOOD, **{name: float("nan")}).is_close(model.description)
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
