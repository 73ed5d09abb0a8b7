"""POST /generate, /tokenize and /detokenize, which refuse unknown fields, as `steer` misspelt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from juice.engine.answer import Completion, FinishReason, ScoredToken, Update
from juice.engine.steer import SteeringReport
from juice.errors import RequestError
from juice_server.chat import Message, TemplateFields, Tools
from juice_server.chat_prompt import prompt_of
from juice_server.fields import (
    ABSENT,
    MAX_PROMPTS,
    TOP_LOGPROBS,
    Answer,
    Body,
    Contexts,
    GenerationFields,
    TokenId,
    TrustFields,
    Usage,
    as_list,
    at_most,
    streamed,
)
from juice_server.http import StrictRoute
from juice_server.requests import TokenScore
from juice_server.routes.stream import Event, Renderer
from juice_server.service import AdmittingService, Service, ServiceOf
from juice_server.tools import Offer


class GenerateRequest(GenerationFields):
    """The body of POST /generate; `logprobs` is how many alternatives are reported for every token.

    `context` goes before the prompt: one for all prompts, or one for each; contrasts need it
    apart.
    """

    prompt: Annotated[
        list[str], BeforeValidator(as_list), Field(min_length=1), at_most(MAX_PROMPTS)
    ]
    """A text, or several."""
    context: Contexts = None
    """What goes before the prompt: one for all prompts, or one for each. Contrasts need
    it apart.
    """
    logprobs: int | None = TOP_LOGPROBS
    """How many alternatives to report for every token; without it, no tokens are listed."""


class Timing(Answer):
    """Seconds since the request reached the engine; `total_s` since it reached the server."""

    queued_s: float
    """When the first answer started."""
    first_token_s: float | None
    """When the first token came; null where there is none."""
    total_s: float
    """When the answer was complete."""


class Choice(Answer):
    """One of several texts: choice i of prompt p has the index p * n + i."""

    index: int
    """The number of the choice."""
    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    logprobs: list[TokenScore] | None = ABSENT
    """Its tokens, where `logprobs` was asked for."""
    steering: SteeringReport | None = ABSENT
    """What was applied to it, where there are several prompts."""


class GenerateResponse(Answer):
    """The answer of POST /generate; `text` is the first choice, `choices` lists them if several."""

    id: str
    """The id of the answer."""
    model: str
    """The name of the model."""
    text: str
    """The new text."""
    finish_reason: FinishReason
    """`stop`, or `length` after `max_tokens`."""
    steering: SteeringReport
    """What was applied; of several prompts, to the first."""
    usage: Usage
    """Tokens of prompts and answers."""
    timing: Timing
    """Where the time went."""
    logprobs: list[TokenScore] | None = ABSENT
    """The tokens of the first choice, where `logprobs` was asked for."""
    choices: list[Choice] | None = ABSENT
    """All choices, where there are several."""


class TokenizeRequest(TemplateFields, TrustFields, Body):
    """The body of POST /tokenize: a text (vLLM calls it `prompt`), or the messages of a chat."""

    text: Annotated[str | None, Field(validation_alias=AliasChoices("text", "prompt"))] = None
    """The text; `prompt` is vLLM's name for it."""
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=4096)
    """The turns of a chat, in place of a text."""
    tools: Tools = None
    """The functions that the chat offers."""
    add_special_tokens: bool | None = None
    """Whether a text gets the tokens with which the model's prompts begin; it does by default. In
    a chat the template writes them.
    """
    return_token_strs: bool | None = None
    """Whether the answer has `token_strs`."""
    model: str | None = None
    """The name of the model; there is one."""

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give a text (or prompt), or messages")
        of_chats = {"tools", *TemplateFields.model_fields}
        if self.messages is None and (given := sorted(self.model_fields_set & of_chats)):
            raise ValueError(f"{given[0]} goes with messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("add_special_tokens goes with a text; a chat template writes them")
        return self

    def offer(self) -> Offer | None:
        """Return the functions that the chat lists, if it lists any."""
        return Offer(tuple(tool.function.function for tool in self.tools)) if self.tools else None


class TokenizeResponse(Answer):
    """Tokens as ids, and the text of each."""

    tokens: list[int]
    """The ids."""
    texts: list[str]
    """The text of each token."""
    count: int
    """How many tokens there are."""
    max_model_len: int | None
    """The most tokens of a request; null for no limit."""
    token_strs: list[str] | None
    """The tokens as the vocabulary has them, where `return_token_strs` asks for them."""


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    """The name of the model; there is one."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True), at_most(1_000_000)]
    """The ids."""


class DetokenizeResponse(Answer):
    """The text of tokens; `prompt` is vLLM's name for it."""

    text: str
    """The text."""
    prompt: str
    """The same text."""


router = APIRouter(route_class=StrictRoute)


@router.post("/generate", response_model=GenerateResponse, responses=streamed())
async def generate(body: GenerateRequest, request: Request, service: AdmittingService) -> Response:
    """Continue one or more prompts.

    With `stream`: events {"text", "index"}, a last one with the rest, and [DONE].
    """
    translator = service.translator.trusting(request, body)
    prompts = await translator.joined_off_loop(request, body.prompt, body.context)
    requests = await translator.requests(request, prompts, body, top_logprobs=body.logprobs or 0)
    renderer = GenerateRenderer(
        service, request, n_prompts=len(prompts), has_logprobs=body.logprobs is not None
    )
    return await renderer.answered(requests, is_stream=body.stream)


class NativeRenderer(Renderer):
    """Renders answers of JuICE's own routes, or a stream's events, whose last has the rest."""

    streamed: ClassVar[dict[str, Any]]
    """The fields of the answer that the last event of a stream leaves out."""

    def __init__(self, service: Service, request: Request, *, has_logprobs: bool) -> None:
        super().__init__(service, request)
        self._has_logprobs = has_logprobs

    def closing(self, completions: list[Completion]) -> Iterable[Event]:
        yield self.of(completions).model_dump(exclude=self.streamed)

    def logprobs(self, tokens: Sequence[ScoredToken]) -> list[TokenScore] | None:
        """Return the tokens of an answer, where they were asked for."""
        return self._texts.scores(tokens) if self._has_logprobs else None

    def timing(self, completions: list[Completion]) -> Timing:
        """Return the seconds until the first start, the first token, and now."""
        firsts = [c.timing.tokens_s[0] for c in completions if c.timing.tokens_s]
        return Timing(
            queued_s=round(min(c.timing.queued_s for c in completions), 4),
            first_token_s=round(min(firsts), 4) if firsts else None,
            total_s=round(self._trace.age_s, 4),
        )

    def piece(self, update: Update, place: Event) -> Iterable[Event]:
        """Yield the event of new text or tokens, if there are any, with their place."""
        scores = self.logprobs(update.tokens)
        more = {} if scores is None else {"logprobs": [score.model_dump() for score in scores]}
        if update.text or scores:
            yield {**place, **more}


class GenerateRenderer(NativeRenderer):
    """Renders the answer to POST /generate."""

    id_prefix = "gen-"
    streamed: ClassVar = {
        "text": True,
        "logprobs": True,
        "choices": {"__all__": {"text", "logprobs"}},
    }

    def __init__(
        self, service: Service, request: Request, *, n_prompts: int, has_logprobs: bool
    ) -> None:
        super().__init__(service, request, has_logprobs=has_logprobs)
        self._n_prompts = n_prompts

    def events(self, update: Update) -> Iterable[Event]:
        return self.piece(update, {"text": update.text, "index": update.index})

    def of(self, completions: list[Completion]) -> GenerateResponse:
        choices = [
            Choice(
                index=i,
                text=completion.text,
                finish_reason=completion.finish_reason,
                logprobs=self.logprobs(completion.tokens),
                # A gate decides about each prompt.
                steering=completion.steering if self._n_prompts > 1 else None,
            )
            for i, completion in enumerate(completions)
        ]
        return GenerateResponse(
            id=self._id,
            model=self._model_name,
            text=choices[0].text,
            finish_reason=choices[0].finish_reason,
            steering=completions[0].steering,
            usage=Usage.of(self._trace),
            timing=self.timing(completions),
            logprobs=choices[0].logprobs,
            choices=choices if len(choices) > 1 else None,
        )


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request, service: ServiceOf) -> Response:
    """Return a text's tokens, tokenized like a prompt."""
    tokenizer = service.model.description.tokenizer
    offer = body.offer()
    translator = service.translator.trusting(request, body).offering(offer)

    def work() -> Response:
        text = translator.model.prompts.raw(body.text or "")
        adds_special = body.add_special_tokens is not False
        if body.messages is not None:
            turns = [message.plain() for message in body.messages]
            prompt = prompt_of(translator, turns, body.for_template(), offer=offer)
            text, adds_special = str(prompt.text), False
        ids: tuple[int, ...] = ()
        if text:
            ids = translator.tokens(
                text, add_special_tokens=adds_special, param="text", is_to_fit=False
            )
        names = tokenizer.convert_ids_to_tokens(list(ids)) if body.return_token_strs else None
        answer = TokenizeResponse(
            tokens=list(ids),
            texts=[translator.texts[token] for token in ids],
            count=len(ids),
            max_model_len=translator.max_model_len,
            token_strs=names,
        )
        return JSONResponse(answer.model_dump())  # still off the event loop

    return await translator.off_loop(request, work)


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, service: ServiceOf
) -> DetokenizeResponse:
    """Return the text of tokens."""
    tokenizer, n = service.model.description.tokenizer, service.model.description.vocabulary_size
    if body.tokens and max(body.tokens) >= n:
        raise RequestError(
            f"tokens names token {max(body.tokens)}; the model has tokens 0 to {n - 1}",
            param="tokens",
        )
    text = await service.translator.off_loop(
        request, lambda: tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)
    )
    return DetokenizeResponse(text=str(text), prompt=str(text))
