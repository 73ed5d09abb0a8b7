"""SteeredModel: prompts and options in, steered text out, whichever engine runs the model."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Self, Unpack

from juice.data.passages import followed
from juice.engine.answer import Completion
from juice.engine.contract import Engine, ModelDescription
from juice.engine.request import (
    GenerationOptions,
    OptionFields,
    Request,
    contrast_of,
    gate_of,
    tokens_of,
)
from juice.engine.steer import Steer, Steering, resolve
from juice.errors import HeadSetError, HeadSetMismatchError, JuiceError, RequestError, UsageError
from juice.formula import METHODS, Method, Target
from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary
from juice.head_set.schema import FORMAT, check_within, short
from juice.model.loaded import LoadedModel
from juice.model.prompts import PromptForm, own_template, read_template, sha256_of, user
from juice.progress import Progress, silent

Prompt = str | Sequence[int]


class SteeredModel:
    """A model that is steered request by request; any thread may generate.

    Made by `juice.load`; use it as a context manager, or `close` it.
    """

    def __init__(
        self, engine: Engine, head_sets: str | Path | None = None, *, allow_unverified: bool = False
    ) -> None:
        self.engine = engine
        self.prompts = PromptForm(engine.description.tokenizer)
        self._head_sets_folder = head_sets
        self._allow_unverified = allow_unverified

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        progress: Progress = silent,
        **fields: Unpack[OptionFields],
    ) -> list[Completion]:
        """Continue each prompt with its options; all of them share batches.

        Args:
            prompts: One text, or several texts or lists of tokens.
            options: How to continue them, or each of them; None: as the defaults say.
            progress: Reports how many prompts are done; see `juice.progress`.
            fields: Fields of `GenerationOptions` that differ from these: one value for all prompts,
                or a list with one value per prompt.

        Returns:
            A completion per prompt, in order.

        Raises:
            RequestError: An option is out of range, or a list does not have one value per prompt.
            HeadSetError: No head set serves a request, or the given one does not fit the model.
        """
        return self.engine.generate(self.requests(prompts, options, **fields), progress=progress)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        *,
        progress: Progress = silent,
        **fields: Unpack[OptionFields],
    ) -> list[Completion]:
        """As `generate`, without blocking the event loop."""
        requests = self.requests(prompts, options, **fields)
        done: dict[int, Completion] = {}
        with progress("generating", len(requests)) as advance:
            async for update in self.engine.astream(requests):
                if update.completion is not None:
                    done[update.index] = update.completion
                    advance(1)
        return [done[i] for i in range(len(requests))]

    def stream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Iterator[str]:
        """Continue one prompt and yield its text in pieces; takes what `request` takes."""
        updates = self.engine.stream([self.request(prompt, options, **fields)])
        return (update.text for update in updates if update.text)

    async def astream(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> AsyncIterator[str]:
        """As `stream`, without blocking the event loop; leaving it cancels the request."""
        updates = self.engine.astream([self.request(prompt, options, **fields)])
        try:
            async for update in updates:
                if update.text:
                    yield update.text
        finally:
            await updates.aclose()  # type: ignore[attr-defined]

    def next_token(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        top: int = 10,
        **fields: Unpack[OptionFields],
    ) -> list[tuple[str, float]]:
        """Return the likeliest next tokens and their probabilities, likeliest first.

        Args:
            prompt: A text, or tokens.
            options: The steering; None: none.
            top: The number of tokens to return.
            fields: Fields of `GenerationOptions` that differ from these.

        Raises:
            RequestError: An option is out of range.
            HeadSetError: No head set serves the request.
            MissingCapabilityError: The engine cannot report log-probabilities of given tokens.
        """
        tokenizer = self.description.tokenizer
        vocabulary = tuple(range(min(len(tokenizer), self.description.vocabulary_size)))
        fields |= {"max_tokens": 1, "watch": vocabulary}
        logprobs = self.engine.generate([self.request(prompt, options, **fields)])[0].watched
        best = sorted(vocabulary, key=lambda token: -logprobs[token])[:top]
        return [(str(tokenizer.decode([token])), math.exp(logprobs[token])) for token in best]

    def answer_logprobs(
        self, pairs: Sequence[tuple[str, str]], *, progress: Progress = silent
    ) -> list[tuple[float, ...] | None]:
        """Score answers where they continue their prompts.

        Args:
            pairs: Prompts and answers.
            progress: Reports how many pairs are done.

        Returns:
            The natural log-probabilities of each answer's tokens: empty for an answer without
            tokens of its own, None for a pair that is too long for the model.
        """
        scores: list[tuple[float, ...] | None] = [()] * len(pairs)
        asked: list[tuple[int, int, Request]] = []
        for i, (prompt, answer) in enumerate(pairs):
            ids, start = self.prompts.joined(prompt, answer)
            start = max(1, start)  # a first token has no log-probability
            if start >= len(ids) or not answer.strip():
                continue
            request = self.request(ids, max_tokens=0, prompt_logprobs=True)
            if self.engine.fits(request):
                asked.append((i, start, request))
            else:
                scores[i] = None
        completions = self.engine.generate(
            [request for *_, request in asked], progress=progress, description="scoring answers"
        )
        for (i, start, _), completion in zip(asked, completions, strict=True):
            scored = completion.prompt_tokens[start:]
            scores[i] = tuple(token.logprob for token in scored if token.logprob is not None)
        return scores

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        options: GenerationOptions | Sequence[GenerationOptions] | None = None,
        **fields: Unpack[OptionFields],
    ) -> list[Request]:
        """Return a request for each prompt; see `generate`."""
        listed: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        is_one = (
            isinstance(listed, str)
            or not hasattr(listed, "__iter__")  # `request` says what is expected
            or (listed and isinstance(listed[0], Integral))
        )
        texts: list[Any] = [listed] if is_one else list(listed)
        n = len(texts)
        each = options if isinstance(options, GenerationOptions | None) else list(options)
        given: dict[str, Any] = {**fields, "options": each}
        for name, value in given.items():
            if isinstance(value, list) and len(value) != n:
                stops = ", several stop strings of one prompt are a tuple" * (name == "stop")
                raise RequestError(
                    f"{name} lists {len(value)} values for {n} prompts; a list has one value per"
                    f" prompt{stops}",
                    param=name,
                )
        return [
            self.request(
                text, index=i, **{k: v[i] if isinstance(v, list) else v for k, v in given.items()}
            )
            for i, text in enumerate(texts)
        ]

    def request(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        client: Hashable = None,
        priority: int = 0,
        index: int = 0,
        **fields: Unpack[OptionFields],
    ) -> Request:
        """Make the request for the engine of a prompt and its options.

        Args:
            prompt: A text, or tokens.
            options: How to continue it; None: as the defaults say.
            client: For whom it is, where several share the engine.
            priority: Lower ones go first.
            index: Its number among those that are submitted together.
            fields: Fields of `GenerationOptions` that differ from these, one value each.

        Raises:
            RequestError: An option is out of range or does not go with the others.
            HeadSetError: No head set serves the request, or the one given does not fit.
        """
        for name, value in fields.items():
            if name not in GenerationOptions.model_fields:
                raise TypeError(f"{name} is no option; see juice.GenerationOptions")
            if isinstance(value, list) and name != "without_context":
                what = "several stop strings as a tuple" if name == "stop" else "one value"
                raise RequestError(
                    f"{name} is a list, which is one value a prompt (`generate` takes it); give "
                    f"{what}",
                    param=name,
                )
        options = GenerationOptions.of(options, **fields)
        steer, question_at, alone = options.as_steer, options.question_at, options.without_context
        if options.context is not None:
            if not isinstance(prompt, str) or alone is not None:
                raise RequestError(
                    "context needs a prompt that is text, without without_context", param="context"
                )
            alone = prompt
            if steer.positions == "question":
                question_at = self.prompts.position_behind(options.context, prompt)
            prompt = self.prompts.encode(self.prompts.behind(options.context, prompt))
        if steer.positions == "question" and question_at is None:
            raise RequestError(
                "positions is question, but nothing says where the question begins; give the"
                " context apart, as `context`",
                param="steer.positions",
            )
        without_context = None if alone is None else self._ids(alone)
        head_set = self.head_set_of(steer)
        ids = self._ids(prompt)
        if not 0 <= (question_at or 0) <= len(ids):
            raise RequestError(
                f"question_at is {question_at}, and the prompt has {len(ids)} tokens; expected the"
                " position of one, or of the first new token",
                param="question_at",
            )
        steering = self._steering(steer, head_set).placed(len(ids), question_at or 0)
        if len(ids) > 1 and ids[0] == ids[1] == self.description.tokenizer.bos_token_id:
            steering = steering.warning_of(
                "the prompt begins with two tokens that begin a text: leave out its own"
            )
        gate = None
        if steer.gate == "auto" and head_set is not None and steering.coefficients:
            gate = gate_of(
                steer,
                head_set,
                chat_template_sha256=self.prompts.sha256,
                without_context=without_context,
            )
        return Request(
            prompt_ids=ids,
            options=options,
            steering=steering,
            gate=gate,
            contrast=contrast_of(steer, without_context),
            without_context=(without_context or ()) if options.explain is not None else (),
            client=client,
            priority=priority,
            index=index,
        )

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        """Return whether a prompt leaves space for `max_tokens` new tokens; raises RequestError."""
        return self.engine.fits(Request.of(self._ids(prompt), max_tokens=max_tokens))

    def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return self.tokenize(prompt) if isinstance(prompt, str) else tokens_of(prompt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def id(self) -> str:
        """The id under which the model was loaded."""
        return self.description.identity.id

    @property
    def description(self) -> ModelDescription:
        """The model: its identity, tokenizer, shape and dtype."""
        return self.engine.description

    @property
    def loaded(self) -> LoadedModel:
        """The model's modules and hooks; raises MissingCapabilityError if the engine has none."""
        loaded: LoadedModel = self.engine.loaded
        return loaded

    def close(self) -> None:
        """Stop the engine and all requests; a model object can then be loaded again."""
        self.engine.close()

    def tokenize(
        self, prompt: str, *, opening: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, plain or through the chat template.

        Args:
            prompt: The text.
            opening: Words with which the reply begins; they are the model's own in a chat.
            add_special_tokens: Only for plain prompts; a chat template writes its own.

        Raises:
            RequestError: The prompt is empty, or not valid Unicode.
        """
        self.prompts.checked(prompt)
        if not add_special_tokens and self.prompts.chat_template is None:
            text = followed(prompt, opening) if opening else prompt
            return self.prompts.encode(self.prompts.raw(text), add_special_tokens=False)
        return self.prompts.tokens(prompt, opening)

    def first_token(self, prompt: str, answer: str, *, opening: str = "") -> int | None:
        """Return the first token of an answer that continues a prompt and an opening.

        None means that the answer shares all its tokens with what is before it.
        """
        return self.prompts.first_token(prompt, answer, opening)

    def with_chat_template(self, template: str | Path | None = "default") -> Self:
        """Return the same model, which takes each text prompt as a user's message in a chat.

        Both share the engine. `template` is "default" for the tokenizer's own, a file, or the text
        of one; None for plain prompts. Raises UsageError where the tokenizer has none, the file
        cannot be read, or the template leaves out the message.
        """
        if isinstance(template, Path) or (
            template not in (None, "default") and not re.search("{[{%]", template)
        ):
            template = read_template(Path(template))
        elif template == "default":
            template = self.own_chat_template
            if template is None:
                raise UsageError(
                    f"the tokenizer of {self.id} has no chat template; give a Jinja file"
                    " (--chat-template FILE), or leave out --chat-template for plain prompts"
                )
        other = copy(self)
        other.prompts = replace(self.prompts, chat_template=template)
        if template is not None:
            lemon, plum = (other.prompts.rendered([user(word)]) for word in ("lemon", "plum"))
            if lemon == plum:
                raise UsageError(
                    "the chat template leaves out the user's message; "
                    "give one that renders its messages"
                )
        return other

    def offering_functions(self) -> Self:
        """Return the same model for chats that offer functions; both share the engine.

        For these some tokenizers have a template of their own, which is called tool_use.
        """
        if self.prompts.chat_template != self.own_chat_template:
            return self
        other = copy(self)
        template = own_template(self.description.tokenizer, "tool_use")
        other.prompts = replace(self.prompts, chat_template=template)
        return other

    def allowing_control_tokens(self) -> Self:
        """Return the same model, for which messages and contexts may form control tokens.

        Give it text that you trust: a retrieved document could end the user's turn and speak as the
        assistant. Both share the engine.
        """
        other = copy(self)
        other.prompts = replace(self.prompts, allows_control_tokens=True)
        return other

    @property
    def chat_template_sha256(self) -> str | None:
        """The hash of the chat template that text prompts go through; None for plain prompts."""
        return self.prompts.sha256

    @property
    def own_chat_template(self) -> str | None:
        """The text of the tokenizer's chat template; None where it has none."""
        return own_template(self.description.tokenizer)

    def __repr__(self) -> str:
        description, identity = self.description, self.description.identity
        shape = (
            f"{identity.architecture}, {description.n_layers} layers of {identity.n_heads} heads, "
            f"{description.dtype} on {description.device}"
        )
        try:
            with warnings.catch_warnings(action="ignore"):
                sets = ", ".join(sorted(self.head_sets.by_name)) or "none"
        except JuiceError as error:
            sets = f"none ({error})"
        return f"<SteeredModel {self.id!r}: {shape}; head sets: {sets}>"

    @cached_property
    def head_sets(self) -> HeadSetLibrary:
        """The head sets for this model, looked up on first use.

        Warns of sets that were found through another chat template.
        """
        library = HeadSetLibrary.scan(
            self._head_sets_folder,
            self.description.identity,
            allow_unverified=self._allow_unverified,
            layers=self.engine.steerable_layers,
        )
        tokenizer_template = sha256_of(self.own_chat_template)
        for head_set in library.by_name.values():
            set_template = head_set.chat_template_sha256
            if set_template not in (None, tokenizer_template, self.prompts.sha256):
                warnings.warn(
                    f"head set {head_set.name!r} was found through the chat template"
                    f" {short(set_template)}, that of {self.id} is"
                    f" {short(tokenizer_template)}: it may steer less well",
                    stacklevel=2,
                )
        return library

    def with_head_sets(self, library: HeadSetLibrary) -> Self:
        """Return the same model with other head sets; both share the engine."""
        other = copy(self)
        other.head_sets = library
        return other

    def resolve(self, steer: Steer) -> Steering:
        """Return the steering of a request, at all positions: the coefficients of each head.

        Raises:
            HeadSetError: No head set serves the request, or the given one does not fit the model.
            RequestError: The head set has another target, neither it nor the request has betas, or
                the model lacks a head that the request gives.
        """
        return self._steering(steer, self.head_set_of(steer))

    def _steering(self, steer: Steer, head_set: HeadSet | None) -> Steering:
        return resolve(
            steer,
            head_set,
            model_id=self.id,
            heads_per_layer=self.description.heads_per_layer,
            chat_template_sha256=self.prompts.sha256,
            exact=self.description.exact,
        )

    def head_set_of(self, steer: Steer) -> HeadSet | None:
        """Return the head set that a request names, or None; raises HeadSetError."""
        if not steer.uses_heads or steer.inline is not None:
            return None
        if isinstance(steer.head_set, HeadSet):
            chosen = steer.head_set
            self.check_fits(chosen)
        else:
            name = steer.target if steer.head_set is None else steer.head_set
            chosen = self.head_sets.get(str(name))
        try:
            check_within(chosen.all_heads, self.description.heads_per_layer, self.id)
        except ValueError as error:
            raise HeadSetMismatchError(str(error)) from error
        return chosen

    def check_fits(self, head_set: HeadSet) -> None:
        """Raise HeadSetMismatchError unless a head set may steer this model."""
        # A set that was made with this very model needs no fingerprint to be known.
        if head_set.model is not self.description.identity:
            head_set.check_fits(self.description.identity, allow_unverified=self._allow_unverified)

    def in_form_of(self, head_set: HeadSet) -> Self:
        """Return the same model, which takes prompts as a head set was found: plain, or in a chat.

        Raises UsageError where the model takes another form, or the tokenizer has another template.
        """
        set_template, here = head_set.chat_template_sha256, self.prompts.sha256
        if head_set.identification is None or set_template == here:
            return self
        if set_template is None:
            raise UsageError(
                f"head set {head_set.name!r} was found on plain prompts; leave out --chat-template"
            )
        tokenizer_template = sha256_of(self.own_chat_template)
        if here is None and tokenizer_template == set_template:
            return self.with_chat_template()
        given = "the one given" if here else "the tokenizer's own"
        raise UsageError(
            f"head set {head_set.name!r} was found through the chat template {short(set_template)},"
            f" {given} is {short(here or tokenizer_template)}; give the set's own file with"
            " --chat-template FILE"
        )

    def make_head_set(
        self,
        *,
        name: str,
        target: Target,
        plus: Sequence[tuple[int, int]] = (),
        minus: Sequence[tuple[int, int]] = (),
        beta_plus: float | Sequence[float] | None = None,
        beta_minus: float | Sequence[float] | None = None,
        method: Method = "juice",
    ) -> HeadSet:
        """Make a head set by hand for this model.

        Args:
            name: Its name.
            target: `context` or `parametric`.
            plus: The + heads as (layer, head), best first.
            minus: The - heads.
            beta_plus: Scale of the + heads, 0 or more, or one for each of them; without betas, each
                request must give them.
            beta_minus: Scale of the - heads, 0 or less, or one for each. A sign without heads needs
                no beta.
            method: The method of the betas, which serves by default.

        Raises:
            HeadSetError: A head is out of range, or a beta has the wrong sign or is missing.
        """
        heads = {"plus": [list(head) for head in plus], "minus": [list(head) for head in minus]}
        given = {"plus": beta_plus, "minus": beta_minus}
        betas: dict[str, float | Sequence[float]] | None = None
        if any(beta is not None for beta in given.values()):
            if any(heads[sign] and beta is None for sign, beta in given.items()):
                raise HeadSetError("one beta is given, the other is missing; give both, or neither")
            is_per_head = any(isinstance(beta, Sequence) for beta in given.values())
            none: Sequence[float] | float = () if is_per_head else 0.0
            betas = {sign: none if beta is None else beta for sign, beta in given.items()}
        content = {
            "format": FORMAT,
            "name": name,
            "target": target,
            "model": self.description.identity.model_dump(),
            "method": method,
            "methods": {
                m: {"heads": heads, "betas": betas if m == method else None} for m in METHODS
            },
        }
        made = HeadSet.parse(content, f"head set {name!r}")
        return made.model_copy(update={"model": self.description.identity})
