"""The loop: requests join, a forward gives every running sequence its next token, finished ones leave.

At every step the waiting requests that fit are prefilled in one forward, then all running sequences decode in another.
The engine is not thread-safe: one thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from juice.engine.request import Completion, GenerationRequest
from juice.engine.request import Sequence as Generation
from juice.engine.rows import RowTable, forward_batch
from juice.engine.runner import Runner
from juice.engine.sampling import choose
from juice.engine.scheduler import Scheduler
from juice.engine.text import TextStream
from juice.errors import ContextLengthError, JuiceError
from juice.model.loading import LoadedModel


class Piece(NamedTuple):
    """Text of request number `request_index` that has become final; `completion` comes with the last piece."""

    request_index: int
    text: str
    completion: Completion | None


class Engine:
    """Generates for any number of requests on one loaded model."""

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler | None = None) -> None:
        self._loaded = loaded
        self._runner = Runner(loaded)
        self._scheduler = scheduler or Scheduler()
        cache = self._runner.cache
        self._table = RowTable(loaded.layout.n_layers, cache.move_main, cache.move_companion)
        self._is_open = False
        self._n_heads = [layer.n_heads for layer in loaded.layout.layers]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Run all requests and return their completions in their order; raises ContextLengthError before any runs."""
        results = {piece.request_index: piece.completion for piece in self.stream(requests) if piece.completion is not None}
        return [results[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[Piece]:
        """Run all requests, yielding each one's text as it becomes final; raises JuiceError while another stream is open."""
        if self._is_open:
            raise JuiceError("another generation is still open on this model; read its stream to the end or close it first")
        for request in requests:
            self._check_length(request)
        sequences = [Generation(r, TextStream(self._loaded.tokenizer, r.prompt_ids, r.stop)) for r in requests]
        index_of = {sequence: i for i, sequence in enumerate(sequences)}
        self._is_open = True
        # Longest first: prompts that are prefilled together then need little padding.
        self._scheduler.waiting.extend(sorted(sequences, key=lambda s: -len(s.request.prompt_ids)))
        try:
            while self._scheduler.waiting or self._table.mains:
                for sequence, text in self._step():
                    done = sequence.finish_reason is not None
                    yield Piece(index_of[sequence], text, sequence.completion() if done else None)
        except JuiceError:
            # What is not finite in a slot would reach whoever gets the slot next: masked keys still meet a zero weight.
            self._runner.cache.clear()
            raise
        finally:
            self._is_open = False
            self._scheduler.waiting.clear()
            self._table.clear()

    def _step(self) -> Iterator[tuple[Generation, str]]:
        """Advance every sequence by one token; yield each with its new text."""
        n_running = len(self._table.mains)
        joining = self._scheduler.admit(self._table.n_rows)
        for sequence in joining:
            self._table.join(sequence)
        advanced = []
        if joining:
            advanced += self._advance(n_running, len(self._table.mains))
        if n_running:
            advanced += self._advance(0, n_running)
        for sequence, _ in advanced:
            if sequence.finish_reason is not None:
                self._table.leave(sequence)
        yield from advanced

    def _advance(self, first: int, last: int) -> list[tuple[Generation, str]]:
        """Run the sequences of main rows first ... last - 1 on their pending tokens and choose each one's next."""
        batch = forward_batch(self._table.span(first, last), self._n_heads, self._loaded.device)
        logits = self._runner.forward(batch)
        if not logits.isfinite().all():
            raise JuiceError("the model's logits are not finite; lower the strength, or load it with --dtype float32")
        logprobs = logits.log_softmax(-1)
        greedy = logits.argmax(-1).tolist()
        advanced = []
        for i, sequence in enumerate(batch.span.mains):
            sequence.n_cached += len(sequence.pending)
            sequence.observe(logprobs[i])
            token = greedy[i] if sequence.generator is None else choose(logits[i], sequence.request.sampling, sequence.generator)
            text = sequence.append(token, float(logprobs[i, token]), self._loaded.stop_token_ids)
            advanced.append((sequence, text))
        return advanced

    def _check_length(self, request: GenerationRequest) -> None:
        limit = self._loaded.max_positions
        n_prompt = len(request.prompt_ids)
        if limit is not None and n_prompt + request.max_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {n_prompt} tokens and max_tokens is {request.max_tokens}; {self._loaded.identity.id} has a context "
                f"of {limit} tokens: shorten the prompt or lower max_tokens",
                param="prompt" if n_prompt >= limit else "max_tokens",
            )
