"""A request while it waits and runs: its tokens and text so far, and how much of it is cached."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from juice.batching.sampling import adjusted, choose, new_generator
from juice.batching.text import TextStream
from juice.engine import (
    Completion,
    FinishReason,
    GenerationRequest,
    ScoredToken,
    Sink,
    Timing,
    Update,
)
from juice.errors import CancelledError, JuiceError


class Generation:
    """The state of one request.

    Any thread may call `cancel`; everything else belongs to the engine's thread. A request with a
    contrast has two generations: `without` has the prompt without its context, shares the new
    tokens and reports nothing; its `owner` decides for both.

    Args:
        index: The number of the request among those submitted together.
        number: Its number in the order of arrival.
        request: The request.
        window: The layers in which it has a companion.
        text: The text of its new tokens.
        stop_token_ids: The model's own stop tokens.
        sink: Takes its updates.
    """

    def __init__(
        self,
        index: int,
        number: int,
        request: GenerationRequest,
        window: range,
        text: TextStream,
        stop_token_ids: frozenset[int],
        sink: Sink,
    ) -> None:
        self.index = index
        self.number = number
        self.request = request
        self.window = window
        self.without: Generation | None = None
        self._owner: Generation | None = None
        self.cancelled: JuiceError | None = None
        self.n_cached = 0
        self.tokens: list[ScoredToken] = []
        self.finish_reason: FinishReason | None = None
        self._text = text
        self._sink = sink
        self._generator = new_generator(request.sampling)
        own = frozenset(request.stop_token_ids)
        self._stop_token_ids = own if request.ignore_eos else own | stop_token_ids
        self._prompt_tokens = (
            [ScoredToken(request.prompt_ids[0], None)] if request.prompt_logprobs else []
        )
        self._watched: tuple[float, ...] = ()
        self._news, self._n_sent = "", 0
        self._arrived = time.monotonic()
        self._queued_s = 0.0
        self._tokens_s: list[float] = []
        self._held: torch.Tensor | None = None
        if request.contrast is not None:
            alone = replace(request, prompt_ids=request.contrast.prompt_ids, contrast=None)
            self.without = Generation(
                index, number, alone, range(0), text, frozenset(), lambda _update: None
            )
            self.without._owner, self.without.tokens = self, self.tokens

    @property
    def owner(self) -> Generation:
        """The generation that decides: this one, unless it is the `without` of another."""
        return self._owner or self

    @property
    def rows(self) -> tuple[Generation, ...]:
        """The generations that join, run and leave together: this one and its `without`."""
        return (self,) if self.without is None else (self, self.without)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt has not been through the model yet."""
        return not self.tokens and self.n_cached < len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """The tokens so far, prompt and new."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def n_to_prefill(self) -> int:
        """The tokens of the prompt that are not cached yet."""
        return len(self.request.prompt_ids) - self.n_cached

    @property
    def n_rows(self) -> int:
        """The rows that this generation occupies in its widest layer."""
        return 2 if self.window else 1

    def pending(self, n_tokens: int) -> tuple[int, ...]:
        """Return the next n tokens for the model: the rest of the prompt, then new ones."""
        start, n_prompt = self.n_cached, len(self.request.prompt_ids)
        prompt = self.request.prompt_ids[start : start + n_tokens]
        new = self.tokens[max(0, start - n_prompt) : max(0, start + n_tokens - n_prompt)]
        return (*prompt, *(token.id for token in new))

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End the generation before the next step."""
        self.cancelled = reason or CancelledError("the request was cancelled")

    def start(self) -> None:
        """Record that the generation no longer waits."""
        self._queued_s = time.monotonic() - self._arrived

    def score_prompt(self, logits: torch.Tensor, normalizers: list[float]) -> None:
        """Score the next tokens of the prompt.

        logits: float32 [tokens, vocabulary], of the tokens before them; normalizers: their
        logsumexps.
        """
        first = len(self._prompt_tokens)
        for i, token in enumerate(self.request.prompt_ids[first : first + len(logits)]):
            self._prompt_tokens.append(self._scored(token, logits[i], normalizers[i]))

    def contrasted(self, row: Generation, logits: torch.Tensor) -> torch.Tensor | None:
        """Hold a row's logits, float32 [vocabulary], until both rows have theirs.

        Return their combination then, None before.
        """
        row._held = logits
        if (
            self.without is None
            or self.request.contrast is None
            or self._held is None
            or self.without._held is None
        ):
            return None
        with_context, alone, weight = self._held, self.without._held, self.request.contrast.weight
        self._held = self.without._held = None
        # Tokens that a model rules out have minus infinity in both.
        return torch.where(
            with_context.isneginf(), with_context, (1 + weight) * with_context - weight * alone
        )

    def advance(self, logits: torch.Tensor, normalizer: float, likeliest: int) -> None:
        """Choose the next token and send what it makes final; `complete` sends the last update.

        logits: float32 [vocabulary] of the next token; normalizer: their logsumexp; likeliest:
        their argmax. Raises whatever a tokenizer or a sink raises.
        """
        request, sampling = self.request, self.request.sampling
        if request.watch and not self.tokens:
            self._watched = tuple((logits[list(request.watch)] - normalizer).tolist())
        if request.max_tokens == 0:
            self.finish_reason = "length"
            return
        banned = self._stop_token_ids if len(self.tokens) < request.min_tokens else frozenset[int]()
        if self._generator is not None or banned or sampling.changes_logits:
            generated = [token.id for token in self.tokens] if sampling.changes_logits else []
            token = choose(
                adjusted(logits, sampling, request.prompt_ids, generated, banned),
                sampling,
                self._generator,
            )
        else:
            token = likeliest
        self.tokens.append(self._scored(token, logits, normalizer))
        self._tokens_s.append(time.monotonic() - self._arrived)
        self._news += self._text_of(token)
        if self.finish_reason is None:
            self._sink(self._update())

    def complete(self) -> None:
        """Send the last update: the completion of a finished generation."""
        self._sink(self._update(self._completion()))

    def fail(self, error: JuiceError) -> None:
        """Send an error as the last update."""
        self._sink(Update(index=self.index, error=error))

    def _text_of(self, token: int) -> str:
        """Return the text that the newest token makes final, and note whether it is the last."""
        if token in self._stop_token_ids:
            self.finish_reason = "stop"
            return self._text.finish()
        piece = self._text.push(token, may_stop=len(self.tokens) > self.request.min_tokens)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.max_tokens:
            self.finish_reason = "length"
            piece += self._text.finish()
        return piece

    def _update(self, completion: Completion | None = None) -> Update:
        text, self._news = self._news, ""
        new, self._n_sent = tuple(self.tokens[self._n_sent :]), len(self.tokens)
        return Update(index=self.index, text=text, tokens=new, completion=completion)

    def _scored(self, token: int, logits: torch.Tensor, normalizer: float) -> ScoredToken:
        logprob = float(logits[token]) - normalizer
        n_top = min(self.request.top_logprobs, len(logits))
        if not n_top:
            return ScoredToken(token, logprob)
        best, ids = logits.topk(n_top)
        return ScoredToken(
            token,
            logprob,
            tuple(
                (i, logit - normalizer)
                for i, logit in zip(ids.tolist(), best.tolist(), strict=True)
            ),
        )

    def _completion(self) -> Completion:
        assert self.finish_reason is not None, "the generation still runs"
        return Completion(
            text=self._text.text,
            tokens=tuple(self.tokens),
            finish_reason=self.finish_reason,
            steering=self.request.steering.report,
            n_prompt_tokens=len(self.request.prompt_ids),
            timing=Timing(queued_s=self._queued_s, tokens_s=tuple(self._tokens_s)),
            prompt_tokens=tuple(self._prompt_tokens),
            watched=self._watched,
        )
