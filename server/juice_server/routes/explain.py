"""POST /explain, /origins and /sweep: which heads decided, and where an answer comes from.

/explain leaves each steered head out in turn: what changes is its effect on a token of the answer,
other heads' steering included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import Field, model_validator

from juice.engine.answer import Completion
from juice.engine.request import MAX_TOP_LOGPROBS, Request
from juice.engine.steer import Steer, SteeringReport
from juice.errors import RequestError
from juice.formula import TARGETS, SteerTarget, Target
from juice.head_set.schema import MAX_BETA
from juice.origins import origin_requests, origins_of
from juice.steered_model import SteeredModel
from juice_server.chat import Document, Message
from juice_server.chat_prompt import prompt_of
from juice_server.fields import (
    MAX_PROMPTS,
    Answer,
    Body,
    GenerationFields,
    TokenId,
    TrustFields,
    at_most,
)
from juice_server.http import StrictRoute
from juice_server.requests import Prompt, TokenProbability, Translator, finite
from juice_server.service import AdmittingService, Service
from juice_server.trace import trace_of


class Question(TrustFields, Body):
    """A prompt, or the messages of a chat; `context` goes before it, or before the last words."""

    prompt: str | None = None
    """A text."""
    messages: Annotated[list[Message] | None, Field(min_length=1, max_length=4096)] = None
    """The turns of a chat, in place of a text."""
    context: str | None = None
    """What goes before the prompt, or before the last user's message."""
    documents: Annotated[list[Document] | None, Field(max_length=MAX_PROMPTS)] = None
    """Documents, which go where the chat template puts them, in place of a context."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Question:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give a prompt, or messages")
        if self.documents is not None and (self.context is not None or self.messages is None):
            raise ValueError("documents go with messages, without a context")
        return self

    @property
    def is_chat(self) -> bool:
        """Whether it goes through the chat template."""
        return self.messages is not None


class NamedHeadSets(Body):
    """Which head sets steer."""

    head_sets: Annotated[dict[Target, str] | None, at_most(2)] = None
    """The head set of each target, by name; else the set named after the target."""

    def head_set_of(self, target: SteerTarget) -> str | None:
        """Return the name of the head set that was given for a target."""
        return None if target == "none" else (self.head_sets or {}).get(target)

    def targets(self, served: Collection[str]) -> list[Target]:
        """Return the targets that can be steered to: those served, and those with a named set."""
        return [
            target for target in TARGETS if target in served or self.head_set_of(target) is not None
        ]


async def prompt_for(translator: Translator, request: HttpRequest, question: Question) -> Prompt:
    """Return the prompt of a question, made in its client's turn; raises as `prompt_of` does."""
    translator = translator.trusting(request, question)

    def read() -> Prompt:
        if question.messages is not None:
            turns = [message.plain() for message in question.messages]
            context, documents = question.context, question.documents
            return prompt_of(translator, turns, context=context, documents=documents)
        contexts = None if question.context is None else [question.context]
        return translator.joined([question.prompt or ""], contexts)[0]

    return await translator.off_loop(request, read)


async def request_for(
    translator: Translator,
    request: HttpRequest,
    question: Question,
    fields: GenerationFields,
    **options: Any,
) -> Request:
    """Return the engine's request for one answer to a question.

    `options` are further ones of `SteeredModel.request`. Raises RequestError for what the settings
    or the model do not allow.
    """
    prompt = await prompt_for(translator, request, question)
    made = await translator.requests(request, [prompt], fields, is_chat=question.is_chat, **options)
    return made[0]


def steered_otherwise(
    translator: Translator, question: Question, request: Request, steer: Steer
) -> Request:
    """Return the same request with other steering, its prompt not read again."""
    model = translator.chat_model if question.is_chat else translator.model
    options = request.options.model_copy(update={"steer": steer})
    made = model.request(request.prompt_ids, options, priority=request.priority)
    return translator.warned(made)


MAX_ANSWERS, MAX_ANSWER_TOKENS, MAX_STRENGTHS, MAX_HEADS = 8, 4096, 64, 64
Tokens = Annotated[list[TokenId], Field(fail_fast=True), at_most(MAX_ANSWER_TOKENS)]
DEFAULT_STRENGTHS = tuple(0.25 * i for i in range(13))


class OriginsRequest(Question):
    """The body of POST /origins: a question with a context, and answers to it."""

    answers: Annotated[list[Tokens], Field(min_length=1, max_length=MAX_ANSWERS)]
    """The tokens of each answer."""

    @model_validator(mode="after")
    def _has_a_context(self) -> OriginsRequest:
        if self.context is None and self.documents is None:
            raise ValueError("give the context apart, as context or documents")
        return self


class TokenOrigin(Answer):
    """One token, read unsteered with and without the context."""

    id: int
    """The token."""
    token: str
    """Its text."""
    with_context: float
    """Its log-probability after the question with its context."""
    without_context: float
    """Its log-probability after the question alone."""


class OriginsResponse(Answer):
    """The answer of POST /origins."""

    origins: list[list[TokenOrigin]]
    """The tokens of each answer."""


class SteeredQuestion(Question, NamedHeadSets):
    """A question, and one way to steer its answer."""

    target: Target
    """What wins a conflict: `context` or `parametric`."""
    head_set: str | None = None
    """The target's head set, by name, in place of `head_sets`."""

    @model_validator(mode="after")
    def _one_name(self) -> SteeredQuestion:
        if self.head_set is not None and super().head_set_of(self.target) is not None:
            raise ValueError(f"give the head set of {self.target} once: head_set, or head_sets")
        return self

    def head_set_of(self, target: SteerTarget) -> str | None:
        named = super().head_set_of(target)
        return self.head_set if named is None and target == self.target else named

    def steer(self, strength: float, target: SteerTarget | None = None) -> Steer:
        """Return how to steer at a strength, toward the target or another."""
        target = target or self.target
        named = self.head_set_of(target)
        return Steer(target=target, head_set=named, strength=strength, gate="off")


class SweepRequest(SteeredQuestion):
    """The body of POST /sweep."""

    strengths: Annotated[
        list[Annotated[float, Field(ge=0, le=MAX_BETA)]],
        Field(min_length=2, max_length=MAX_STRENGTHS),
    ] = Field(default_factory=lambda: list(DEFAULT_STRENGTHS))
    """The strengths, in rising order."""
    answers: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """Two answers, as they follow the prompt; else the first tokens in which the unsteered answer,
    or that toward memory, and that toward the context differ.
    """
    max_tokens: int = Field(strict=True, default=32, ge=1, le=256)
    """How far to look for a difference."""

    @model_validator(mode="after")
    def _rise(self) -> SweepRequest:
        if self.strengths != sorted(set(self.strengths)):
            raise ValueError("strengths are not in rising order; give each once, the lowest first")
        if self.answers is not None and self.answers[0] == self.answers[1]:
            raise ValueError("the two answers are the same")
        return self


class Curve(Answer):
    """How likely one answer is at each strength."""

    text: str
    """The answer."""
    tokens: list[int]
    """Its tokens."""
    probabilities: list[float]
    """Its probability at each strength."""


class SweepResponse(Answer):
    """The answer of POST /sweep."""

    strengths: list[float]
    """The strengths."""
    curves: list[Curve]
    """Two answers: the first is what memory, or no steering, says; none where both say the same."""
    after: str
    """What both answers begin with; the curves are about what comes next."""
    flip: float | None
    """The lowest strength at which the other answer becomes the likelier one; null for none."""
    steering: SteeringReport
    """What is applied at strength 1."""


class ExplainRequest(SteeredQuestion):
    """The body of POST /explain: one token of an answer."""

    strength: float = Field(strict=True, default=1.0, ge=0, le=MAX_BETA)
    """Multiplies the betas."""
    answer: Tokens = Field(default_factory=list)
    """The tokens of the answer before the one that is explained."""
    tokens: Annotated[list[TokenId], Field(min_length=2, max_length=2)] | None = None
    """Two tokens that may come; else the likeliest steered one, and the likeliest unsteered one."""
    top: int = Field(strict=True, default=10, ge=2, le=MAX_TOP_LOGPROBS)
    """How many candidates to report for each way of steering."""

    @model_validator(mode="after")
    def _differ(self) -> ExplainRequest:
        if self.tokens is not None and self.tokens[0] == self.tokens[1]:
            raise ValueError("the two tokens are the same")
        return self


class HeadEffect(Answer):
    """What one steered head does."""

    layer: int
    """Its layer."""
    head: int
    """Its number in the layer."""
    beta: float
    """What its clean output is multiplied by before it is added."""
    effect: float
    """How much lower the steered difference is without this head."""


class ExplainResponse(Answer):
    """The answer of POST /explain.

    A difference is that of the logits of two tokens, which is that of their log-probabilities.
    """

    tokens: list[TokenProbability]
    """The two tokens, with their steered log-probabilities."""
    unsteered: float
    """The difference without steering."""
    steered: float
    """The difference with steering."""
    heads: list[HeadEffect]
    """The steered heads, the largest effect first."""
    candidates: dict[SteerTarget, list[TokenProbability]]
    """The likeliest tokens under each way of steering, best first."""
    steering: SteeringReport
    """What was applied, and its `effect` on the token, without the context where that is apart."""


router = APIRouter(route_class=StrictRoute)


@router.post("/explain")
async def explain(
    body: ExplainRequest, request: HttpRequest, service: AdmittingService
) -> ExplainResponse:
    """Show what could have come in a token's place, and which heads decided."""
    steer, translator = body.steer(body.strength), service.translator
    steering = translator.model.resolve(steer)
    if len(steering.heads) > MAX_HEADS:
        raise RequestError(
            f"the head set steers {len(steering.heads)} heads; expected at most {MAX_HEADS}",
            param="head_set",
        )
    fields = GenerationFields(steer=steer, max_tokens=1, explain="effect")
    made = await request_for(translator, request, body, fields)
    made = replace(
        made.with_options(top_logprobs=body.top),
        prompt_ids=(*made.prompt_ids, *body.answer),
        without_context=(*made.without_context, *body.answer) if made.without_context else (),
    )
    steered = made.with_options(explain=None)
    ways = {**_ways(translator.model, body, steered), body.target: made}
    done = dict(zip(ways, await service.complete(request, list(ways.values())), strict=True))
    pair = body.tokens or _pair(done[body.target], done["none"])
    less = [replace(steered, steering=steering.without(*head)) for head in steering.heads]
    watching = [
        watched.with_options(watch=tuple(pair), top_logprobs=0)
        for watched in (ways["none"], steered, *less)
    ]
    none, full, *others = await service.complete(request, watching)
    effects = [
        HeadEffect(
            layer=layer,
            head=head,
            beta=float(steering.coefficients[layer][head]),
            effect=_difference(full) - _difference(without_head),
        )
        for (layer, head), without_head in zip(steering.heads, others, strict=True)
    ]
    texts = translator.texts
    return ExplainResponse(
        tokens=[
            TokenProbability(id=token, token=texts[token], logprob=finite(logprob))
            for token, logprob in zip(pair, full.watched, strict=True)
        ],
        unsteered=_difference(none),
        steered=_difference(full),
        heads=sorted(effects, key=lambda head: -abs(head.effect)),
        candidates={way: texts.alternatives(answer.tokens[0]) for way, answer in done.items()},
        steering=done[body.target].steering,
    )


def _ways(model: SteeredModel, body: ExplainRequest, steered: Request) -> dict[str, Request]:
    """Return the steered request under each way of steering."""
    ways = {"none": replace(steered, steering=model.resolve(Steer(target="none")))}
    for target in body.targets({body.target, *model.head_sets.targets()}):
        steering = model.resolve(body.steer(body.strength, target))
        is_given = target == body.target
        ways[target] = steered if is_given else replace(steered, steering=steering)
    return ways


def _pair(steered: Completion, unsteered: Completion) -> list[int]:
    """Return the likeliest steered token, and the likeliest unsteered one or the runner-up."""
    first, second = (token for token, _ in steered.tokens[0].top[:2])
    other = unsteered.tokens[0].top[0][0]
    return [first, second if other == first else other]


def _difference(completion: Completion) -> float:
    """Return by how much the first of two watched tokens is likelier, as a logarithm."""
    first, second = (finite(logprob) for logprob in completion.watched)
    return first - second


@router.post("/origins")
async def origins(
    body: OriginsRequest, request: HttpRequest, service: AdmittingService
) -> OriginsResponse:
    """Show whether the tokens of answers come from the context or from memory.

    What is likelier with the context than without it comes from there.
    """
    translator = service.translator
    prompt = await prompt_for(translator, request, body)

    def work() -> list[Request]:
        whole, alone = (
            translator.tokens(text, add_special_tokens=not body.is_chat)
            for text in (prompt.text, prompt.without_context or "")
        )
        return origin_requests(service.model, whole, alone, body.answers)

    requests = await translator.off_loop(request, work)
    done = await service.complete(request, requests)
    return OriginsResponse(
        origins=[
            [
                TokenOrigin(
                    id=token.id,
                    token=translator.texts[token.id],
                    with_context=finite(token.with_context),
                    without_context=finite(token.without_context),
                )
                for token in answer
            ]
            for answer in origins_of(done, body.answers)
        ]
    )


Ids = tuple[int, ...]
N_FINER = 8  # steps between the two strengths around the flip
LEAST = 1e-300


@router.post("/sweep")
async def sweep(
    body: SweepRequest, request: HttpRequest, service: AdmittingService
) -> SweepResponse:
    """Show at which strength one answer takes the place of another."""
    return await _Sweep(body, request, service).run()


class _Sweep:
    """One sweep."""

    def __init__(self, body: SweepRequest, request: HttpRequest, service: Service) -> None:
        self._body, self._http, self._service = body, request, service
        self._translator = service.translator
        self._model = self._translator.model

    async def run(self) -> SweepResponse:
        body, translator = self._body, self._translator
        at_one = self._model.resolve(body.steer(1.0)).report
        fields = GenerationFields(steer=Steer(target="none"), max_tokens=body.max_tokens)
        self._unsteered = await request_for(translator, self._http, body, fields)
        trace_of(self._http.scope).steer = body.target
        pair = await self._given_answers() if body.answers else await self._found_answers()
        n = _n_shared(*pair)
        shared, ends = pair[0][:n], [ids[n:] for ids in pair]
        curves: list[Curve] = []
        flip = None
        if all(ends):
            before = (*self._unsteered.prompt_ids, *shared)
            found = await self._probabilities(before, ends, body.strengths)
            curves = [
                Curve(text=self._text(ids), tokens=list(ids), probabilities=probabilities)
                for ids, probabilities in zip(ends, found, strict=True)
            ]
            if crossing := _crossing(body.strengths, found):
                low, high, _ = crossing
                finer = [low + (high - low) * i / N_FINER for i in range(N_FINER + 1)]
                crossing = _crossing(finer, await self._probabilities(before, ends, finer))
                flip = None if crossing is None else crossing[2]
        return SweepResponse(
            strengths=body.strengths,
            curves=curves,
            after=self._text(shared, skip_special_tokens=True),
            flip=flip,
            steering=at_one,
        )

    async def _given_answers(self) -> list[Ids]:
        translator, answers = self._translator, self._body.answers or []

        def work() -> list[Ids]:
            raw = translator.model.prompts.raw
            return [translator.tokens(raw(a), add_special_tokens=False) for a in answers]

        return await translator.off_loop(self._http, work)

    async def _found_answers(self) -> list[Ids]:
        """Return what memory and context answer, up to the first token in which they differ."""
        body = self._body
        targets = body.targets(self._model.head_sets.targets())
        others: list[SteerTarget] = [target for target in targets if target != body.target]
        steers = [body.steer(1.0, others[0] if others else "none"), body.steer(1.0)]
        if body.target == "parametric":
            steers.reverse()
        requests = [
            steered_otherwise(self._translator, body, self._unsteered, steer) for steer in steers
        ]
        pair = [done.token_ids for done in await self._complete(requests)]
        n = _n_shared(*pair) + 1
        return [ids[:n] for ids in pair]

    async def _probabilities(
        self, prompt: Ids, ends: Sequence[Ids], strengths: Sequence[float]
    ) -> list[list[float]]:
        """Return how likely each end is at each strength, in one batch."""
        steers = [self._body.steer(strength) for strength in strengths]
        request = partial(self._model.request, priority=self._unsteered.priority)
        if all(len(end) == 1 for end in ends):
            watch = tuple(end[0] for end in ends)
            done = await self._complete(
                [request(prompt, steer=steer, max_tokens=1, watch=watch) for steer in steers]
            )
            return [[math.exp(answer.watched[i]) for answer in done] for i in range(len(ends))]
        scored: dict[str, Any] = {"max_tokens": 0, "prompt_logprobs": True}
        done = await self._complete(
            [request([*prompt, *end], steer=steer, **scored) for end in ends for steer in steers]
        )
        found = [
            math.exp(sum(token.logprob or 0.0 for token in answer.prompt_tokens[len(prompt) :]))
            for answer in done
        ]
        return [found[i : i + len(steers)] for i in range(0, len(found), len(steers))]

    async def _complete(self, requests: list[Request]) -> list[Completion]:
        return await self._service.complete(self._http, requests)

    def _text(self, ids: Ids, **options: bool) -> str:
        tokenizer = self._model.description.tokenizer
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))


def _n_shared(one: Ids, other: Ids) -> int:
    """Return how many tokens two answers begin with together."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _crossing(
    strengths: Sequence[float], found: Sequence[Sequence[float]]
) -> tuple[float, float, float] | None:
    """Return the first two strengths between which the curves cross, and where on a line."""
    leads = [  # by how much the first answer is likelier, as a logarithm
        math.log(max(one, LEAST)) - math.log(max(other, LEAST))
        for one, other in zip(*found, strict=True)
    ]
    for (low, before), (high, after) in pairwise(zip(strengths, leads, strict=True)):
        if before != 0 and (before > 0) != (after > 0):
            return low, high, low + (high - low) * before / (before - after)
    return None
