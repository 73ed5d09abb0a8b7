"""POST /v1/completions, as OpenAI's clients expect it, plus `steer`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from juice.engine import Completion, ScoredToken, Update
from juice_server.prompts import joined
from juice_server.routes.openai_answer import OpenAIAnswer, alternatives
from juice_server.routes.strict import StrictRoute
from juice_server.schemas.openai import CompletionRequest
from juice_server.schemas.openai_answers import COMPLETION_EVENTS, CompletionAnswer
from juice_server.schemas.streams import STREAMED
from juice_server.service import Service, ServiceOf
from juice_server.sse import Event, answered
from juice_server.tokens import finite
from juice_server.trace import Trace, trace_of

router = APIRouter(route_class=StrictRoute)


@router.post(
    "/v1/completions",
    response_model=CompletionAnswer,
    response_description=COMPLETION_EVENTS,
    responses=STREAMED,
)
async def completions(body: CompletionRequest, request: Request, service: ServiceOf) -> Response:
    """Continue one or more prompts."""
    trace = trace_of(request.scope)
    scored_prompt = body.echo and (body.logprobs is not None or body.max_tokens == 0)
    requests = await service.translator.requests(
        request,
        joined(body.prompt, body.context),
        body,
        alias=body.model,
        add_special_tokens=body.add_special_tokens,
        top_logprobs=body.logprobs or 0,
        prompt_logprobs=scored_prompt,
    )
    answer = _Answer(service, body, trace)
    return await answered(service, request, requests, answer, is_stream=body.stream)


class _Answer(OpenAIAnswer):
    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, trace: Trace) -> None:
        super().__init__(service, body, trace)
        self._body = body
        self._tokenizer = service.model.description.tokenizer
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

    def of(self, completions: list[Completion]) -> Event:
        choices = []
        for i, c in enumerate(completions):
            text = self._echoed(i) + c.text
            choices.append(self._choice(i, text, (*c.prompt_tokens, *c.tokens), c.finish_reason))
        return self._whole(choices, completions[0].steering)

    def events(self, update: Update) -> Iterable[Event]:
        i, done = update.index, update.completion
        text = update.text if i in self._begun else self._echoed(i) + update.text
        self._begun.add(i)
        if text or done or (self._body.logprobs is not None and update.tokens):
            choice = self._choice(i, text, update.tokens, done.finish_reason if done else None)
            yield self._chunk(choice, done.steering if done else None)

    def _choice(
        self, index: int, text: str, tokens: Sequence[ScoredToken], finish_reason: str | None
    ) -> Event:
        return {
            "index": index,
            "text": text,
            "finish_reason": finish_reason,
            "logprobs": self._logprobs(index, tokens),
        }

    def _echoed(self, index: int) -> str:
        """Return the prompt of a choice, where it is to be echoed."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt[index // self._body.n]
        return prompt if isinstance(prompt, str) else str(self._tokenizer.decode(prompt))

    def _logprobs(self, index: int, tokens: Sequence[ScoredToken]) -> Event | None:
        if self._body.logprobs is None:
            return None
        texts = [self._texts[t.id] for t in tokens]
        offset = self._offsets.get(index, 0)
        if index not in self._offsets and self._body.echo:
            offset = -self._n_unwritten(index, tokens)
        offsets = [offset := offset + n for n in (0, *map(len, texts))]
        self._offsets[index] = offsets[-1]
        return {
            "tokens": texts,
            "token_logprobs": [None if t.logprob is None else finite(t.logprob) for t in tokens],
            "top_logprobs": [self._top(t) for t in tokens],
            "text_offset": [max(0, own) for own in offsets[:-1]],
        }

    def _n_unwritten(self, index: int, tokens: Sequence[ScoredToken]) -> int:
        """Return how many characters of the first tokens the echo of a prompt leaves out.

        They are those of the special tokens that the tokenizer has put before the text.
        """
        special = {*self._tokenizer.all_special_ids}
        first = itertools.takewhile(lambda token: token.id in special, tokens)
        texts, prompt = [self._texts[token.id] for token in first], self._echoed(index)
        written = (i for i in range(len(texts) + 1) if prompt.startswith("".join(texts[i:])))
        return sum(map(len, texts[: next(written)]))

    def _top(self, token: ScoredToken) -> dict[str, float] | None:
        if token.logprob is None:
            return None
        # Of two tokens with the same text, the likelier one is kept.
        return {
            self._texts[other]: finite(logprob) for other, logprob in reversed(alternatives(token))
        }
