"""From bodies to the engine's requests, and from tokens to text, the same for every route."""

from __future__ import annotations

import logging
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from juice.engine.answer import ScoredToken
from juice.engine.request import GenerationOptions, Request
from juice.engine.steer import Steer
from juice.engine.structure import Structure
from juice.errors import ContextLengthError, JuiceError, RequestError
from juice.formula import STEER_TARGETS, SteerTarget
from juice.head_set.library import HeadSetLibrary
from juice.steered_model import SteeredModel
from juice_server.dispatcher import Tokenizing
from juice_server.errors import NotAllowedError, UnknownModelError
from juice_server.fields import Documented, GenerationFields, TrustFields
from juice_server.http import while_present
from juice_server.keys import Client
from juice_server.settings import Settings
from juice_server.tools import Offer, format_of
from juice_server.trace import trace_of

LOG = logging.getLogger("juice_server")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt as guarded text (`juice.model.control_tokens`) or tokens.

    Where its context is given apart, also the prompt without it. The question begins at the
    character `question_start` of the text.
    """

    text: str | Sequence[int]
    without_context: str | None = None
    question_start: int | None = None


LOWEST_LOGPROB = -9999.0


class TokenProbability(Documented):
    """One token of a distribution."""

    id: int
    """The token."""
    token: str
    """Its text."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""


class TokenScore(Documented):
    """A generated token and its alternatives, best first."""

    id: int
    """The token."""
    token: str
    """Its text when it stands alone."""
    logprob: float
    """Its log-probability, that of the steered model before sampling."""
    top: list[TokenProbability]
    """The likeliest tokens in its place, best first."""
    text: str
    """Its share of the answer: the shares of all tokens, joined, are the answer's text. A special
    token has none, nor has one that ends within a character.
    """


# How tokenizers write bytes that are no text, and spaces.
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}
A_BYTE, SPACE = re.compile("<0x([0-9A-F]{2})>"), "\N{LOWER ONE EIGHTH BLOCK}"


class TokenTexts(dict[int, str]):
    """The text of single tokens, cached; part of a character becomes the replacement character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        """Return and keep one token's text."""
        text = str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return self.setdefault(token, text)

    @cached_property
    def special(self) -> frozenset[int]:
        """The special tokens, which the text of an answer leaves out unless it is to have them."""
        return frozenset(self._tokenizer.all_special_ids)

    def bytes_of(self, token: int) -> bytes:
        """Return what a token adds to a text, in UTF-8; it may begin or end within a character."""
        if token in self._added:
            return str(self._added[token].content).encode()
        if not self._knows(token):
            return b""
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if "ByteLevel" in self._decoder and all(char in BYTES for char in piece):
            return bytes(BYTES[char] for char in piece)
        if "ByteFallback" in self._decoder and (found := A_BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        if SPACE in self._decoder:
            return piece.replace(SPACE, " ").encode()
        return self[token].encode()

    def name_of(self, token: int) -> str:
        r"""Return a token's text, or its bytes where they are no text, as `bytes:\xe2\x80`.

        One that the tokenizer does not know has its number, as `token_id:300`.
        """
        if not self._knows(token):
            return f"token_id:{token}"
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _knows(self, token: int) -> bool:
        """Return whether the tokenizer knows a token; models may have more, to fill a matrix."""
        return self._tokenizer.convert_ids_to_tokens(token) is not None

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(self._tokenizer.added_tokens_decoder)

    @cached_property
    def _decoder(self) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "" if backend is None else repr(backend.decoder)

    def alternatives(self, token: ScoredToken) -> list[TokenProbability]:
        """Return the likeliest tokens at the place of a token."""
        return [
            TokenProbability(id=other, token=self[other], logprob=finite(logprob))
            for other, logprob in token.top
        ]

    def scores(self, tokens: Sequence[ScoredToken]) -> list[TokenScore]:
        """Return every token with its alternatives."""
        return [
            TokenScore(
                id=token.id,
                token=self[token.id],
                logprob=finite(token.logprob or 0.0),
                top=self.alternatives(token),
                text=token.text,
            )
            for token in tokens
        ]


class Offsets:
    """The characters of a text at which its tokens begin, from their bytes."""

    def __init__(self, start: int = 0) -> None:
        self._at, self._decoder = start, getincrementaldecoder("utf-8")("replace")

    def of(self, pieces: Iterable[bytes]) -> list[int]:
        """Return where the next tokens begin: within a character, where that begins."""
        found = []
        for piece in pieces:
            found.append(max(0, self._at))
            self._at += len(self._decoder.decode(piece))
        return found


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold: excluded tokens have minus infinity."""
    return max(logprob, LOWEST_LOGPROB)


# Text has about four characters a token; this many hold well over two tokens each that fits.
CHARACTERS_PER_TOKEN = 16


class Translator:
    """Translates for one model and its head sets, within the bounds of the settings."""

    def __init__(self, model: SteeredModel, settings: Settings) -> None:
        self.model = model
        # For prompts that went through the tokenizer's chat template, if it has one that serves.
        self.chat_model, self.why_no_chat = model, "has no chat template"
        try:
            self.chat_model = model.with_chat_template(model.own_chat_template)
        except JuiceError as error:
            self.why_no_chat = f"serves no chats, since {error}"
            LOG.warning("%s %s; give another with --chat-template FILE", model.id, self.why_no_chat)
        with_tools = self.chat_model.offering_functions()
        for each in (self.chat_model, with_tools):
            if each.prompts.chat_template is not None:
                each.prompts.control.prepare()
        self.settings = settings
        self.model_name = settings.served_model_name or model.id
        self.texts = TokenTexts(model.description.tokenizer)
        self.tokenizing = Tokenizing(settings.max_body)
        template = with_tools.prompts.chat_template or ""
        self.tool_format = format_of(model.description.tokenizer, template, settings.tool_format)

    def with_head_sets(self, library: HeadSetLibrary) -> Translator:
        """Return a translator for other head sets; requests made by this one keep theirs."""
        other = copy(self)
        other.model = self.model.with_head_sets(library)
        other.chat_model = self.chat_model.with_head_sets(library)
        return other

    def trusting(self, request: HttpRequest, body: TrustFields) -> Translator:
        """Return a translator for a body whose text may form control tokens, where it asks so.

        Raises NotAllowedError for a client that may not ask.
        """
        if not body.allow_control_tokens:
            return self
        client = trace_of(request.scope).client
        if not client.control_tokens:
            raise NotAllowedError(
                f"allow_control_tokens is not for the key {client.name}; leave it out, or take "
                "control_tokens = false out of its table"
            )
        other = copy(self)
        other.model = self.model.allowing_control_tokens()
        other.chat_model = self.chat_model.allowing_control_tokens()
        return other

    def offering(self, offer: Offer | None) -> Translator:
        """Return a translator for a chat that offers functions, or none."""
        if offer is None:
            return self
        other = copy(self)
        other.model = other.chat_model = self.chat_model.offering_functions()
        return other

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a request, prompt and new ones together."""
        return self.model.engine.limits.max_model_len

    async def joined_off_loop(
        self,
        request: HttpRequest,
        prompts: Sequence[str | Sequence[int]],
        contexts: Sequence[str] | None,
    ) -> list[Prompt]:
        """As `joined`, in its client's turn where there is something to join."""
        if contexts is None:
            return self.joined(prompts, contexts)
        return await self.off_loop(request, lambda: self.joined(prompts, contexts))

    def joined(
        self, prompts: Sequence[str | Sequence[int]], contexts: Sequence[str] | None
    ) -> list[Prompt]:
        """Put each prompt's context before it: one for all, or one for each.

        Raises RequestError where they do not match.
        """
        form = self.model.prompts
        if contexts is None:
            return [Prompt(text=form.raw(p) if isinstance(p, str) else p) for p in prompts]
        if len(contexts) not in (1, len(prompts)):
            raise RequestError(
                f"there are {len(contexts)} contexts for {len(prompts)} prompts; "
                "give one, or one for each prompt",
                param="context",
            )
        each = contexts if len(contexts) == len(prompts) else [contexts[0]] * len(prompts)
        made: list[Prompt] = []
        for prompt, context in zip(prompts, each, strict=True):
            if not isinstance(prompt, str):
                raise RequestError(
                    "a context goes before a prompt of text, but this one is tokens; "
                    "put both into the prompt",
                    param="context",
                )
            text, alone = form.behind(context, prompt), form.raw(prompt)
            start = len(text) - len(alone)
            made.append(Prompt(text=text, without_context=alone, question_start=start))
        return made

    async def off_loop(self, request: HttpRequest, work: Callable[[], T]) -> T:
        """Do work that is slow for large bodies in a thread, when it is its client's turn.

        Raises BusyError, ClientGoneError, TimedOutError, and what the work raises.
        """
        trace = trace_of(request.scope)
        turn = self.tokenizing.run(trace.client.name, trace.n_body_bytes, work)
        return await while_present(request, self.settings.request_timeout, turn)

    async def requests(
        self,
        request: HttpRequest,
        prompts: Sequence[Prompt],
        fields: GenerationFields,
        *,
        alias: str | None = None,
        is_chat: bool = False,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> list[Request]:
        """Turn prompts and a body's fields into requests, n for each prompt, off the event loop.

        Args:
            request: The HTTP request; its trace records the target.
            prompts: The prompts.
            fields: The body's options for steering, sampling and stopping.
            alias: The model name in the body, which may carry a target.
            is_chat: Whether the chat template made the prompts, special tokens included.
            add_special_tokens: Whether other prompts begin with the model's special tokens.
            **options: Further arguments of `SteeredModel.request`.

        Raises RequestError for what the settings or the model do not allow.
        """
        trace, steer = trace_of(request.scope), self.steer(fields, alias)
        priority = _priority(fields.priority, trace.client)
        trace.steer, trace.n_choices = steer.target or "inline", fields.n
        if self.settings.log_prompts:
            trace.prompts = [self.model.prompts.shown(str(prompt.text)) for prompt in prompts]

        model = self.chat_model if is_chat else self.model
        seeds = [
            None if fields.seed is None else _wrapped(fields.seed + i) for i in range(fields.n)
        ]
        special = add_special_tokens and not is_chat

        def work() -> list[Request]:
            # The fields were checked with the body.
            shared = GenerationOptions.model_construct(
                **{**fields.options(), **options, "steer": steer}
            )
            self._check_counts(len(prompts), fields.n)
            if fields.explain is not None and len(prompts) > 1:
                raise RequestError(
                    f"explain is about one prompt, but there are {len(prompts)}; send it alone",
                    param="explain",
                )
            param = "tools" if "structure" in options else fields.structure_field
            self._check_structure(shared.structure, param)
            made: list[Request] = []
            for prompt in prompts:
                ids = self.tokens(prompt.text, add_special_tokens=special)
                limits = {
                    "max_tokens": self._max_tokens(fields, len(ids)),
                    **self._about_context(prompt, model, steer, add_special_tokens=special),
                }
                of_prompt = shared.model_copy(update=limits)
                one = self.warned(model.request(ids, of_prompt, priority=priority))
                # The report is that of the first answer.
                made += [
                    one.with_options(seed=seed, explain=fields.explain if i == 0 else None)
                    for i, seed in enumerate(seeds)
                ]
            return made

        return await self.off_loop(request, work)

    def steer(self, fields: GenerationFields, model_name: str | None) -> Steer:
        """Return the steering of the body, else of the model's alias, else the default.

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
        return self.settled(steer)

    def settled(self, steer: Steer) -> Steer:
        """Return a steering with the default gate, where one holds.

        Raises RequestError for heads in the request that the settings do not allow.
        """
        self._check_inline(steer)
        if steer.uses_heads and steer.gate is None and steer.beyond_gates is None:
            return replace(steer, gate=self.settings.default_gate)
        return steer

    def _check_inline(self, steer: Steer) -> None:
        """Raise RequestError for heads in the request that the settings do not allow."""
        inline, settings = steer.inline, self.settings
        if inline is None:
            return
        param = "steer.heads" if steer.coefficients is None else "steer.coefficients"
        if settings.max_inline_heads == 0:
            raise RequestError(
                "this server takes no heads in a request (--max-inline-heads 0); name a head set",
                param=param,
            )
        n = len(inline.heads.all)
        _check_bound(n, settings.max_inline_heads, f"the request gives {n} heads", param)
        strengths = steer.strength if isinstance(steer.strength, tuple) else (steer.strength,)
        largest, most = max(strengths) * inline.largest, settings.max_inline_coefficient
        if most is not None and largest > most:
            raise RequestError(
                f"the largest coefficient is {largest:g}, strength included; expected at most "
                f"{most:g}",
                param=param,
            )

    def warned(self, request: Request) -> Request:
        """Return a request that warns where the default gate does not hold for it."""
        steer = request.options.as_steer
        reason = steer.beyond_gates if steer.uses_heads and steer.gate is None else None
        if reason is None or self.settings.default_gate == "off":
            return request
        warning = f"steered without a gate, which is the default here: {reason}"
        return request.with_steering(request.steering.warning_of(warning))

    def _alias(self, name: str | None) -> SteerTarget | None:
        """Return the target in a model name such as `mini:context`, None for the plain name.

        Raises UnknownModelError.
        """
        if name is None or name == self.model_name:
            return None
        for target in STEER_TARGETS:
            if name == f"{self.model_name}:{target}":
                return target
        raise UnknownModelError(
            f"the model {name!r} is not served; {self.model_name} is, see /v1/models",
            param="model",
        )

    def _check_counts(self, n_prompts: int, n: int) -> None:
        """Raise RequestError for more prompts or answers than the settings allow."""
        settings, place = self.settings, " in one request"
        text = f"there are {n_prompts} prompts"
        _check_bound(n_prompts, settings.max_prompts, text, "prompt", place)
        _check_bound(n, settings.max_n, f"n is {n}", "n")
        # As many as of one client may wait, and no fewer than it may have prompts.
        most = max(settings.max_prompts, settings.max_batch + settings.max_queue)
        text = f"n is {n} for each of {n_prompts} prompts, {n_prompts * n} answers in all"
        _check_bound(n_prompts * n, most, text, "n", f"{place}: send several")

    def _check_structure(self, structure: Structure | None, param: str | None) -> None:
        """Raise RequestError for an impossible structure, which takes a while to compile."""
        try:
            if structure is not None:
                self.model.engine.structures.check(structure)
        except RequestError as error:
            error.param = param
            raise

    def _about_context(
        self, prompt: Prompt, model: SteeredModel, steer: Steer, *, add_special_tokens: bool
    ) -> dict[str, Any]:
        """Return the options that say what of a prompt is its context."""
        options: dict[str, Any] = {}
        text, alone, start = prompt.text, prompt.without_context, prompt.question_start
        if alone is not None:
            options["without_context"] = self.tokens(alone, add_special_tokens=add_special_tokens)
        if steer.positions == "question" and start is not None and isinstance(text, str):
            options["question_at"] = model.prompts.position_in(
                text, start, add_special_tokens=add_special_tokens
            )
        return options

    def tokens(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        is_to_fit: bool = True,
    ) -> tuple[int, ...]:
        """Return the tokens of guarded text; raises RequestError for too many.

        Unless it `is_to_fit`, it may have more tokens than the model takes.
        """
        settings = self.settings
        if isinstance(prompt, str):
            n_shown = len(self.model.prompts.shown(prompt))
            text = f"the {param} has {n_shown} characters"
            _check_bound(n_shown, settings.max_prompt_characters, text, param)
            try:
                if is_to_fit:
                    self._check_beginning(prompt)
                form = self.model.prompts
                ids = form.encode(form.checked(prompt), add_special_tokens=add_special_tokens)
            except RequestError as error:
                error.param = param
                raise
        else:
            ids = tuple(prompt)
        text = f"the {param} has {len(ids)} tokens"
        _check_bound(len(ids), settings.max_prompt_tokens, text, param)
        return ids

    def _check_beginning(self, prompt: str) -> None:
        """Raise ContextLengthError where the beginning is too long: the whole takes seconds."""
        bounds = (self.settings.max_prompt_tokens, self.max_model_len)
        most = min((bound for bound in bounds if bound is not None), default=None)
        if most is None or len(prompt) <= 2 * CHARACTERS_PER_TOKEN * most:
            return
        beginning = prompt[: CHARACTERS_PER_TOKEN * most]
        if len(self.model.prompts.encode(beginning, add_special_tokens=False)) > 2 * most:
            raise ContextLengthError(
                f"the text has {len(prompt)} characters, and more than twice as many tokens as "
                f"the {most} that fit; shorten it"
            )

    def _max_tokens(self, fields: GenerationFields, n_prompt: int) -> int:
        """Return the requested max_tokens, else the default, cut to the room after the prompt."""
        asked, default, most = (
            fields.max_tokens,
            fields.default_max_tokens,
            self.settings.max_tokens,
        )
        if asked is not None:
            _check_bound(asked, most, f"max_tokens is {asked}", "max_tokens")
            return asked
        left = max(1, self.max_model_len - n_prompt) if self.max_model_len else default
        return min(default, left, most or left)


def _wrapped(seed: int) -> int:
    """Return a seed as 64 bits with a sign, beyond whose largest the smallest comes."""
    return (seed + 2**63) % 2**64 - 2**63


def _check_bound(n: int, most: int | None, text: str, param: str, place: str = "") -> None:
    """Raise RequestError, saying the text, for an n above the bound."""
    if most is not None and n > most:
        raise RequestError(f"{text}; expected at most {most}{place}", param=param)


def _priority(asked: int | None, client: Client) -> int:
    """Return the priority of a request; raises NotAllowedError for one before the client's own."""
    if asked is not None and asked < client.priority:
        raise NotAllowedError(
            f"priority is {asked}; this client may use {client.priority} and later ones, which are "
            "higher"
        )
    return client.priority if asked is None else asked
