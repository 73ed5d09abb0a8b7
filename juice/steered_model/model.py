"""SteeredModel: prompts and options in, steered text out, whichever engine runs the model."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

from juice.engine import Completion, GenerationRequest, Steer, SteerTarget, Structure
from juice.head_set import HeadSet
from juice.methods import GateMode
from juice.progress import Progress, silent
from juice.steered_model.arguments import OneOrEach, Stop, options_for, options_of
from juice.steered_model.requests import RequestingModel


class SteeredModel(RequestingModel):
    """A model that is steered request by request; any thread may generate.

    Made by `juice.load`; use it as a context manager, or `close` it.
    """

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        steer: OneOrEach[SteerTarget | Steer] = "none",
        strength: OneOrEach[float | None] = None,
        head_set: OneOrEach[str | HeadSet | None] = None,
        gate: OneOrEach[GateMode | None] = None,
        context: OneOrEach[str | None] = None,
        max_tokens: OneOrEach[int] = 64,
        min_tokens: OneOrEach[int] = 0,
        stop: OneOrEach[Stop] = None,
        stop_token_ids: OneOrEach[tuple[int, ...]] = (),
        ignore_eos: OneOrEach[bool] = False,
        top_logprobs: OneOrEach[int] = 0,
        temperature: OneOrEach[float] = 0.0,
        top_p: OneOrEach[float] = 1.0,
        top_k: OneOrEach[int] = 0,
        min_p: OneOrEach[float] = 0.0,
        repetition_penalty: OneOrEach[float] = 1.0,
        presence_penalty: OneOrEach[float] = 0.0,
        frequency_penalty: OneOrEach[float] = 0.0,
        logit_bias: OneOrEach[Mapping[int, float] | None] = None,
        seed: OneOrEach[int | None] = None,
        structure: OneOrEach[Structure | None] = None,
        skip_special_tokens: OneOrEach[bool] = True,
        progress: Progress = silent,
    ) -> list[Completion]:
        """Continue each prompt with its own options; all of them share batches.

        An option is one value for all prompts, or a list with one value per prompt.

        Args:
            prompts: One text, or several texts or lists of tokens.
            steer: `none`, `context`, `parametric`, or a `Steer` with more options.
            strength: Multiplies both betas, 0 to 100; None takes that of `steer`, by default 1.
            head_set: A head set or its name; None takes that of `steer`, by default the set
                named after the target.
            gate: `auto` steers only where the head set's gate finds a reason to; `off`, and None
                unless `steer` says otherwise, always.
            context: Text to put before the prompt; methods `cad` and `adacad` need it separate.
            max_tokens: The most new tokens.
            min_tokens: The fewest new tokens before generation may stop.
            stop: A string or a tuple of strings; generation ends before the first that occurs.
            stop_token_ids: Tokens that end generation, besides the model's own.
            ignore_eos: Do not stop at the model's own stop tokens.
            top_logprobs: How many alternatives to report for each token, 0 to 20.
            temperature: 0 takes the likeliest token; at most 2.
            top_p: Sample from the fewest tokens whose probabilities add up to this.
            top_k: Sample from the k likeliest tokens; 0 or -1 for all.
            min_p: Drop tokens below this share of the likeliest one's probability.
            repetition_penalty: Divides positive logits of tokens seen so far, and multiplies
                negative ones; 1 is none.
            presence_penalty: Subtracted from the logit of each token generated so far.
            frequency_penalty: Subtracted once for each time the token was generated.
            logit_bias: Added to the logits of these tokens, by id.
            seed: Seed of the sampling, the same for each prompt; None draws a new one.
            structure: The form that the answer must have, such as `Structure.json_schema(...)`.
            skip_special_tokens: Leave special tokens out of the text.
            progress: Reports how many prompts are done; see `juice.progress`.

        Returns:
            A completion per prompt, in order.

        Raises:
            RequestError: An option is out of range, or a list does not have one value per prompt.
            HeadSetError: No head set serves a request, or the given one does not fit the model.
        """
        given = {
            name: value
            for name, value in locals().items()
            if name not in ("self", "prompts", "progress")
        }
        return self.engine.generate(self._requests(prompts, given), progress=progress)

    @options_of(generate)
    async def agenerate(
        self, prompts: str | Sequence[str], *, progress: Progress = silent, **options: Any
    ) -> list[Completion]:
        """As `generate`, without blocking the event loop."""
        requests = self._requests(prompts, options)
        done: dict[int, Completion] = {}
        with progress("generating", len(requests)) as advance:
            async for update in self.engine.astream(requests):
                if update.completion is not None:
                    done[update.index] = update.completion
                    advance(1)
        return [done[i] for i in range(len(requests))]

    @options_of(RequestingModel.request)
    def stream(self, prompt: str | Sequence[int], **options: Any) -> Iterator[str]:
        """Continue one prompt and yield its text in pieces; takes the options of `request`."""
        return (
            update.text
            for update in self.engine.stream([self.request(prompt, **options)])
            if update.text
        )

    @options_of(RequestingModel.request)
    async def astream(self, prompt: str | Sequence[int], **options: Any) -> AsyncIterator[str]:
        """As `stream`, without blocking the event loop; leaving it cancels the generation."""
        updates = self.engine.astream([self.request(prompt, **options)])
        try:
            async for update in updates:
                if update.text:
                    yield update.text
        finally:
            await updates.aclose()  # type: ignore[attr-defined]

    def next_token(
        self,
        prompt: str | Sequence[int],
        *,
        top: int = 10,
        steer: SteerTarget | Steer = "none",
        strength: float | None = None,
        head_set: str | HeadSet | None = None,
        gate: GateMode | None = None,
        context: str | None = None,
    ) -> list[tuple[str, float]]:
        """Return the likeliest next tokens and their probabilities, likeliest first.

        Args:
            prompt: Text, or tokens.
            top: How many tokens to return.
            steer: As in `generate`.
            strength: Multiplies both betas.
            head_set: A head set or its name.
            gate: As in `generate`.
            context: Text to put before the prompt.

        Raises:
            RequestError: An option is out of range.
            HeadSetError: No head set serves the request.
            MissingCapabilityError: The engine cannot report log-probabilities of given tokens.
        """
        tokenizer = self.description.tokenizer
        vocabulary = tuple(range(min(len(tokenizer), self.description.vocabulary_size)))
        request = self.request(
            prompt,
            steer=steer,
            strength=strength,
            head_set=head_set,
            gate=gate,
            context=context,
            max_tokens=1,
            watch=vocabulary,
        )
        logprobs = self.engine.generate([request])[0].watched
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
        requests: dict[int, GenerationRequest] = {}
        scores: list[tuple[float, ...] | None] = [()] * len(pairs)
        starts: dict[int, int] = {}
        for i, (prompt, answer) in enumerate(pairs):
            ids, start = self.prompts.joined(prompt, answer)
            starts[i] = max(1, start)  # a first token has no log-probability
            if starts[i] >= len(ids) or not answer.strip():
                continue
            request = self.request(ids, max_tokens=0, prompt_logprobs=True)
            if self.engine.fits(request):
                requests[i] = request
            else:
                scores[i] = None
        completions = self.engine.generate(
            list(requests.values()), progress=progress, description="scoring answers"
        )
        for i, completion in zip(requests, completions, strict=True):
            scored = completion.prompt_tokens[starts[i] :]
            scores[i] = tuple(token.logprob for token in scored if token.logprob is not None)
        return scores

    def _requests(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], options: Mapping[str, Any]
    ) -> list[GenerationRequest]:
        texts: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        return [
            self.request(text, **options_for(options, i, len(texts)))
            for i, text in enumerate(texts)
        ]
