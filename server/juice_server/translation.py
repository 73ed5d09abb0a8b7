"""From bodies to the engine's requests, and from tokens to text, the same for every route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request

from juice import SteeredModel
from juice.engine import GenerationRequest, Steer, SteerTarget
from juice.errors import ContextLengthError, RequestError
from juice.head_set import HeadSetLibrary
from juice.methods import STEER_TARGETS, scales_heads
from juice_server.clients import Client
from juice_server.errors import NotAllowedError, UnknownModelError
from juice_server.presence import while_present
from juice_server.prompts import Prompt
from juice_server.schemas.shared import GenerationFields
from juice_server.settings import Settings
from juice_server.tokenizing import Tokenizing
from juice_server.tokens import TokenTexts
from juice_server.tools.formats import format_of
from juice_server.trace import trace_of

T = TypeVar("T")
# Text has about four characters a token; this many hold well over two tokens each that fits.
CHARACTERS_PER_TOKEN = 16


class Translator:
    """Translates for one model and its head sets, within the bounds of the settings."""

    def __init__(self, model: SteeredModel, settings: Settings) -> None:
        self.model = model
        # For prompts that went through the tokenizer's chat template, if it has one.
        self.chat_model = model.with_chat_template(model.own_chat_template)
        self.settings = settings
        self.model_name = settings.served_model_name or model.id
        self.texts = TokenTexts(model.description.tokenizer)
        self.tokenizing = Tokenizing(settings.max_body)
        template = self.chat_model.prompts.chat_template or ""
        self.tool_format = format_of(model.description.tokenizer, template, settings.tool_format)

    def with_head_sets(self, library: HeadSetLibrary) -> Translator:
        """Return the same with other head sets; what has begun with this one keeps its own."""
        other = copy(self)
        other.model = self.model.with_head_sets(library)
        other.chat_model = self.chat_model.with_head_sets(library)
        return other

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a request, prompt and new ones together."""
        return self.model.engine.limits.max_model_len

    async def off_loop(self, request: Request, work: Callable[[], T]) -> T:
        """Do work that is slow for large bodies in a thread, when it is its client's turn.

        Raises BusyError, ClientGoneError, TimedOutError, and what the work raises.
        """
        trace = trace_of(request.scope)
        turn = self.tokenizing.run(trace.client.name, trace.n_body_bytes, work)
        return await while_present(request, self.settings.request_timeout, turn)

    async def requests(
        self,
        request: Request,
        prompts: Sequence[Prompt],
        fields: GenerationFields,
        *,
        alias: str | None = None,
        is_chat: bool = False,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> list[GenerationRequest]:
        """Turn prompts and a body's fields into requests, n for each prompt, off the event loop.

        Args:
            request: The HTTP request; its trace records the target.
            prompts: The prompts.
            fields: How to steer, sample and stop.
            alias: The model name in the body, which may carry a target.
            is_chat: Whether the chat template made the prompts, special tokens included.
            add_special_tokens: Whether other prompts get those with which the model's begin.
            **options: Further arguments of `SteeredModel.request`.

        Raises RequestError for what the settings or the model do not allow.
        """
        steer, trace = self.steer(fields, alias), trace_of(request.scope)
        trace.priority = _priority(fields.priority, trace.client)
        trace.steer, trace.n_choices = steer.target, fields.n
        if self.settings.log_prompts:
            trace.prompts = [
                own.text if isinstance(own.text, str) else str(own.text) for own in prompts
            ]
        return await self.off_loop(
            request,
            lambda: self._requests(
                prompts,
                fields,
                steer,
                options,
                is_chat=is_chat,
                add_special_tokens=add_special_tokens and not is_chat,
            ),
        )

    def steer(self, fields: GenerationFields, model_name: str | None) -> Steer:
        """Return how to steer: from the body, else from the model's alias, else the default.

        Raises RequestError where body and alias contradict each other.
        """
        alias = self._alias(model_name)
        steer = fields.steer or Steer(target=alias or self.settings.default_steer)
        if alias is not None and alias != steer.target:
            raise RequestError(
                f"the model {model_name!r} steers toward {alias}, "
                f"but steer is {steer.target}; drop one",
                param="steer",
            )
        has_gates = steer.target != "none" and scales_heads(steer.method)
        if has_gates and steer.gate is None:
            return replace(steer, gate=self.settings.default_gate)
        return steer

    def _alias(self, name: str | None) -> SteerTarget | None:
        """Return the target in a model name such as `mini:context`, None for the plain name.

        Raises UnknownModelError.
        """
        if name is None or name == self.model_name:
            return None
        known: dict[str, SteerTarget] = {
            f"{self.model_name}:{target}": target for target in STEER_TARGETS
        }
        if name not in known:
            raise UnknownModelError(
                f"the model {name!r} is not served; {self.model_name} is, see /v1/models",
                param="model",
            )
        return known[name]

    def _requests(
        self,
        prompts: Sequence[Prompt],
        fields: GenerationFields,
        steer: Steer,
        options: dict[str, Any],
        *,
        is_chat: bool,
        add_special_tokens: bool,
    ) -> list[GenerationRequest]:
        settings = self.settings
        if len(prompts) > settings.max_prompts:
            raise RequestError(
                f"there are {len(prompts)} prompts; "
                f"expected at most {settings.max_prompts} in one request",
                param="prompt",
            )
        if fields.n > settings.max_n:
            raise RequestError(f"n is {fields.n}; expected at most {settings.max_n}", param="n")
        # As many as of one client may wait, and no fewer than it may have prompts.
        most = max(settings.max_prompts, settings.max_batch + settings.max_queue)
        if (n_answers := len(prompts) * fields.n) > most:
            raise RequestError(
                f"n is {fields.n} for each of {len(prompts)} prompts, {n_answers} answers in all;"
                f" expected at most {most} in one request: send several",
                param="n",
            )
        model, made = self.chat_model if is_chat else self.model, []
        structure = options.get("structure", fields.structure)
        if structure is not None:
            # Compiling it takes a while: this thread may wait, the event loop may not.
            try:
                model.engine.structures.check(structure)
            except RequestError as error:
                error.param = "tools" if "structure" in options else fields.structure_field
                raise
        for prompt in prompts:
            ids = self.tokens(prompt.text, add_special_tokens=add_special_tokens)
            own = {**fields.options(), **options, "max_tokens": self._max_tokens(fields, ids)}
            if prompt.without_context is not None:
                own["without_context"] = self.tokens(
                    prompt.without_context, add_special_tokens=add_special_tokens
                )
            if (
                steer.positions == "question"
                and isinstance(prompt.text, str)
                and prompt.question_start is not None
            ):
                own["question_at"] = model.prompts.position_in(
                    prompt.text, prompt.question_start, add_special_tokens=add_special_tokens
                )
            one = model.request(ids, steer=steer, **own)
            made += [
                one.with_seed(None if fields.seed is None else fields.seed + i)
                for i in range(fields.n)
            ]
        return made

    def tokens(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        is_to_fit: bool = True,
    ) -> tuple[int, ...]:
        """Return a prompt's tokens; raises RequestError for one that is too long.

        Unless it `is_to_fit`, it may have more tokens than the model takes.
        """
        settings = self.settings
        if isinstance(prompt, str):
            if len(prompt) > settings.max_prompt_characters:
                raise RequestError(
                    f"the {param} has {len(prompt)} characters; "
                    f"expected at most {settings.max_prompt_characters}",
                    param=param,
                )
            try:
                if is_to_fit:
                    self._check_beginning(prompt)
                ids = self.model.tokenize(prompt, add_special_tokens=add_special_tokens)
            except RequestError as error:
                error.param = param
                raise
        else:
            ids = tuple(prompt)
        if settings.max_prompt_tokens is not None and len(ids) > settings.max_prompt_tokens:
            raise RequestError(
                f"the {param} has {len(ids)} tokens; expected at most {settings.max_prompt_tokens}",
                param=param,
            )
        return ids

    def _check_beginning(self, prompt: str) -> None:
        """Raise ContextLengthError for a text whose beginning alone is far too long.

        Tokenizing all of it would take seconds, only to refuse it then.
        """
        bounds = (self.settings.max_prompt_tokens, self.max_model_len)
        most = min((bound for bound in bounds if bound is not None), default=None)
        if most is None or len(prompt) <= 2 * CHARACTERS_PER_TOKEN * most:
            return
        beginning = prompt[: CHARACTERS_PER_TOKEN * most]
        if len(self.model.tokenize(beginning, add_special_tokens=False)) > 2 * most:
            raise ContextLengthError(
                f"the text has {len(prompt)} characters, and more than twice as many tokens as "
                f"the {most} that fit; shorten it"
            )

    def _max_tokens(self, fields: GenerationFields, ids: Sequence[int]) -> int:
        """Return the requested max_tokens, else the default, cut to the room after the prompt."""
        if fields.max_tokens is not None:
            self.check_max_tokens(fields.max_tokens)
            return fields.max_tokens
        bound = self.settings.max_tokens
        left = max(1, (self.max_model_len or len(ids) + fields.default_max_tokens) - len(ids))
        return min(fields.default_max_tokens, left, bound or left)

    def check_max_tokens(self, max_tokens: int) -> None:
        """Raise RequestError for more new tokens than the settings allow."""
        bound = self.settings.max_tokens
        if bound is not None and max_tokens > bound:
            raise RequestError(
                f"max_tokens is {max_tokens}; expected at most {bound}", param="max_tokens"
            )


def _priority(asked: int | None, client: Client) -> int:
    """Return the priority of a request; raises NotAllowedError for one before the client's own."""
    if asked is not None and asked < client.priority:
        raise NotAllowedError(
            f"priority is {asked}; this client may use {client.priority} and later ones, which are "
            "higher"
        )
    return client.priority if asked is None else asked
