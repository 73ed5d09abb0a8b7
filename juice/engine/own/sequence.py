"""A request while it waits and runs: its tokens and text so far, and how much of it is cached."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from juice.engine.answer import ScoredToken
from juice.engine.own.contrast import Mixer
from juice.engine.own.sampler import Draw, new_generator
from juice.engine.request import Request
from juice.engine.structure import Constraint
from juice.engine.text import Transcript
from juice.errors import CancelledError, JuiceError, RequestError


class Sequence:
    """The state of one request, numbered by arrival; its `window` is the layers with a companion.

    Any thread may call `cancel`; everything else belongs to the engine's thread. A request with a
    contrast has two sequences: `without` has the prompt without its context, shares the new
    tokens and reports nothing; its `owner` decides for both.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        window: range,
        transcript: Transcript,
        constraint: Constraint | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.window = window
        self.transcript = transcript
        self.without: Sequence | None = None
        self._owner: Sequence | None = None
        self.cancelled: JuiceError | None = None
        self.n_cached = 0
        self.has_crossed = False  # the length at which the model's positions change
        self.most_new = sys.maxsize  # tokens in a forward; lowered where memory lacks for more
        self._generator = new_generator(request.options)
        self._uniform: float | None = None
        # For the repetition penalty; a prompt is long, so not anew for every token.
        self._seen = set(request.prompt_ids) if request.options.repetition_penalty != 1 else None
        self._held: torch.Tensor | None = None
        self.constraint = constraint
        self._mixer: Mixer | None = None
        if request.contrast is not None:
            self._mixer = Mixer(request.contrast)
            alone = replace(request, prompt_ids=request.contrast.prompt_ids, contrast=None)
            self.without = Sequence(number, alone, range(0), transcript)
            self.without._owner = self

    @property
    def tokens(self) -> list[ScoredToken]:
        return self.transcript.tokens

    @property
    def owner(self) -> Sequence:
        """The sequence that decides: this one, unless it is the `without` of another."""
        return self._owner or self

    @property
    def rows(self) -> tuple[Sequence, ...]:
        """The sequences that join, run and leave together: this one and its `without`."""
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

    def pending(self, n_tokens: int) -> tuple[int, ...]:
        """Return the next n tokens for the model: the rest of the prompt, then new ones."""
        start, n_prompt = self.n_cached, len(self.request.prompt_ids)
        prompt = self.request.prompt_ids[start : start + n_tokens]
        new = self.tokens[max(0, start - n_prompt) : max(0, start + n_tokens - n_prompt)]
        return (*prompt, *(token.id for token in new))

    def cancel(self, reason: JuiceError | None = None) -> None:
        """End the sequence before the next step."""
        self.cancelled = reason or CancelledError("the request was cancelled")

    @property
    def to_watch(self) -> tuple[int, ...]:
        """The tokens to watch beside the next one."""
        return () if self.tokens else self.request.options.watch

    def to_score(self, n_kept: int) -> tuple[int, ...]:
        """Return the next tokens of the prompt that the logits of n tokens before them score."""
        if not self.request.options.prompt_logprobs or self.tokens:
            return ()
        first = len(self.transcript.prompt_tokens)
        return self.request.prompt_ids[first : first + n_kept]

    def draw(self) -> Draw:
        """Return the draw of the next token; until that is taken, the same one each time."""
        options = self.request.options
        if self._generator is not None and self._uniform is None:
            self._uniform = float(torch.rand(1, generator=self._generator, dtype=torch.float64))
        is_held_back = len(self.tokens) < options.min_tokens
        return Draw(
            sampling=options,
            uniform=self._uniform,
            seen=self._seen or frozenset(),
            token_ids=[token.id for token in self.tokens] if options.changes_logits else (),
            banned=self.transcript.stop_token_ids if is_held_back else frozenset(),
            constraint=self.constraint,
        )

    def contrasted(self, row: Sequence, logits: torch.Tensor) -> torch.Tensor | None:
        """Hold a row's logits, float32 [vocabulary], until both rows have theirs.

        Return their combination then, None before.
        """
        mixer, without = self._mixer, self.without
        assert mixer is not None, "only a contrast has two rows"
        assert without is not None, "only a contrast has two rows"
        row._held = logits
        with_context, alone = self._held, without._held
        if with_context is None or alone is None:
            return None
        self._held = without._held = None
        return mixer.mixed(with_context, alone)

    def advance(self, token: ScoredToken, watched: tuple[float, ...]) -> None:
        """Take the next token and send the text that is final; `complete` sends the last update.

        Raises whatever a tokenizer or a sink raises, and RequestError where no token may follow.
        """
        self._uniform = None
        if self._seen is not None:
            self._seen.add(token.id)
        if self.constraint is not None:
            self.constraint.accept(token.id)
            if self.constraint.failure:
                raise RequestError(self.constraint.failure, param="structure")
        if not self.tokens:
            self.transcript.watched = watched
        if self.request.options.max_tokens == 0:
            self.transcript.finish_reason = "length"
        else:
            self.transcript.add([token])
