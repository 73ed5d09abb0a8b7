"""POST /sweep: how likely two answers are as the strength of the steering rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fastapi import APIRouter, Request

from juice.engine import GenerationRequest, Steer, SteerTarget
from juice_server.questions import asked
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.inside import Curve, SweepRequest, SweepResponse
from juice_server.schemas.shared import GenerationFields
from juice_server.service import Service, ServiceOf

router = APIRouter(route_class=StrictRoute)
Ids = tuple[int, ...]
N_FINER = 8  # steps between the two strengths around the flip
LEAST = 1e-300


@router.post("/sweep")
async def sweep(body: SweepRequest, request: Request, service: ServiceOf) -> SweepResponse:
    """Show at which strength one answer takes the place of another."""
    return await _Sweep(body, request, service).run()


class _Sweep:
    """One sweep."""

    def __init__(self, body: SweepRequest, request: Request, service: Service) -> None:
        self._body, self._request, self._service = body, request, service
        self._translator = service.translator
        self._model = self._translator.model
        self._at_one = self._model.resolve(body.steer(1.0)).report

    async def run(self) -> SweepResponse:
        body = self._body
        prompt = (await self._asked(Steer(target="none"))).prompt_ids
        pair = await self._given() if body.answers else await self._found()
        n_shared = _n_shared(*pair)
        ends = [ids[n_shared:] for ids in pair]
        curves: list[Curve] = []
        flip = None
        if all(ends):
            asked_of = (*prompt, *pair[0][:n_shared])
            found = await self._probabilities(asked_of, ends, body.strengths)
            curves = [
                Curve(text=self._text(ids), tokens=list(ids), probabilities=own)
                for ids, own in zip(ends, found, strict=True)
            ]
            if around := _crossing(body.strengths, found):
                low, high = around
                finer = [low + (high - low) * i / N_FINER for i in range(N_FINER + 1)]
                flip = _flip(finer, await self._probabilities(asked_of, ends, finer))
        return SweepResponse(
            strengths=body.strengths,
            curves=curves,
            after=self._text(pair[0][:n_shared], skip_special_tokens=True),
            flip=flip,
            steering=self._at_one,
        )

    async def _asked(self, steer: Steer, **options: Any) -> GenerationRequest:
        fields = GenerationFields(steer=steer, max_tokens=self._body.max_tokens)
        return await asked(self._translator, self._request, self._body, fields, **options)

    async def _given(self) -> list[Ids]:
        """Return the tokens of the answers that were given, as they follow the prompt."""
        translator, answers = self._translator, self._body.answers or []

        def work() -> list[Ids]:
            return [translator.tokens(own, add_special_tokens=False) for own in answers]

        return await translator.off_loop(self._request, work)

    async def _found(self) -> list[Ids]:
        """Return what memory and context answer, up to the first token in which they differ."""
        targets = self._body.targets(self._model.head_sets.targets())
        others = [own for own in targets if own != self._body.target]
        first: SteerTarget = others[0] if others else "none"
        steers = [self._body.steer(1.0, first), self._body.steer(1.0)]
        if self._body.target == "parametric":
            steers.reverse()
        requests = [await self._asked(steer) for steer in steers]
        done = await self._service.complete(self._request, requests)
        ids = [own.token_ids for own in done]
        n = _n_shared(*ids) + 1
        return [own[:n] for own in ids]

    async def _probabilities(
        self, prompt: Ids, ends: Sequence[Ids], strengths: Sequence[float]
    ) -> list[list[float]]:
        """Return how likely each end is at each strength, in one batch."""
        model = self._model
        if all(len(end) == 1 for end in ends):
            watch = tuple(end[0] for end in ends)
            requests = [
                model.request(prompt, steer=self._body.steer(own), max_tokens=1, watch=watch)
                for own in strengths
            ]
            done = await self._service.complete(self._request, requests)
            return [[math.exp(own.watched[i]) for own in done] for i in range(len(ends))]
        requests = [
            model.request(
                [*prompt, *end],
                steer=self._body.steer(own),
                max_tokens=0,
                prompt_logprobs=True,
            )
            for end in ends
            for own in strengths
        ]
        done = await self._service.complete(self._request, requests)
        sums = [
            math.exp(sum(token.logprob or 0.0 for token in own.prompt_tokens[len(prompt) :]))
            for own in done
        ]
        n = len(strengths)
        return [sums[i * n : (i + 1) * n] for i in range(len(ends))]

    def _text(self, ids: Ids, **options: bool) -> str:
        tokenizer = self._model.description.tokenizer
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))


def _n_shared(one: Ids, other: Ids) -> int:
    """Return how many tokens two answers begin with together."""
    n = 0
    for own, its in zip(one, other, strict=False):
        if own != its:
            break
        n += 1
    return n


def _leads(found: Sequence[Sequence[float]]) -> list[float]:
    """Return by how much the first answer is likelier at each strength, as a logarithm."""
    return [
        math.log(max(one, LEAST)) - math.log(max(other, LEAST))
        for one, other in zip(*found, strict=True)
    ]


def _crossing(
    strengths: Sequence[float], found: Sequence[Sequence[float]]
) -> tuple[float, float] | None:
    """Return the first two strengths between which the curves cross."""
    points = list(zip(strengths, _leads(found), strict=True))
    for (low, before), (high, after) in pairwise(points):
        if before != 0 and (before > 0) != (after > 0):
            return low, high
    return None


def _flip(strengths: Sequence[float], found: Sequence[Sequence[float]]) -> float | None:
    """Return where the curves cross, on a line between the two strengths next to it."""
    around = _crossing(strengths, found)
    if around is None:
        return None
    at = dict(zip(strengths, _leads(found), strict=True))
    low, high = around
    return low + (high - low) * at[low] / (at[low] - at[high])
