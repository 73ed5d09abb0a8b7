"""RequestingModel: prompts and options in, requests for the engine out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from juice.engine import (
    Contrast,
    GenerationRequest,
    RequestGate,
    SamplingOptions,
    Steer,
    SteerTarget,
    Structure,
)
from juice.engine.gate import gate_of
from juice.errors import RequestError
from juice.head_set import HeadSet
from juice.methods import CONTRASTS, GateMode
from juice.steered_model.arguments import Stop, join_context, steer_of
from juice.steered_model.steerable import SteerableModel


class RequestingModel(SteerableModel):
    """The part of a SteeredModel that turns prompts and options into requests."""

    def request(
        self,
        prompt: str | Sequence[int],
        *,
        steer: SteerTarget | Steer = "none",
        strength: float | None = None,
        head_set: str | HeadSet | None = None,
        gate: GateMode | None = None,
        context: str | None = None,
        without_context: str | Sequence[int] | None = None,
        question_at: int | None = None,
        max_tokens: int = 64,
        min_tokens: int = 0,
        stop: Stop = None,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        watch: tuple[int, ...] = (),
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        structure: Structure | None = None,
        skip_special_tokens: bool = True,
    ) -> GenerationRequest:
        """Turn a prompt and its options into a request for the engine.

        Takes the options of `generate`, one value each. For a prompt that already contains its
        context, `without_context` is the prompt alone, which `cad` and `adacad` need and gates
        toward memory use, and `question_at` the position of the first token after the context, for
        `positions: question`. With `prompt_logprobs` the prompt's tokens are scored too, and
        `max_tokens` may be 0. `watch` lists tokens whose log-probabilities at the first new
        position are reported.

        Raises:
            RequestError: An option is out of range or does not go with the others.
            HeadSetError: No head set serves the request, or the one given does not fit.
        """
        asked = steer_of(steer, strength, head_set, gate)
        if context is not None:
            if not isinstance(prompt, str) or without_context is not None:
                raise RequestError(
                    "context needs a prompt that is text, without without_context",
                    param="context",
                )
            joined = join_context(context, prompt)
            if asked.positions == "question":
                question_at = self.prompts.first_position(joined, len(joined) - len(prompt))
            prompt, without_context = joined, prompt
        if isinstance(stop, list):
            raise RequestError(
                "stop is a list, which is one value a prompt (`generate` takes it); give several"
                " stop strings as a tuple",
                param="stop",
            )
        alone = None if without_context is None else self._ids(without_context)
        first_position = 0
        if asked.positions == "question":
            if question_at is None:
                raise RequestError(
                    "positions is question, but nothing says where the question begins; give the"
                    " context apart, as `context`",
                    param="steer.positions",
                )
            first_position = question_at
        steering = self.resolve(asked, first_position=first_position)
        return GenerationRequest(
            prompt_ids=self._ids(prompt),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            steering=steering,
            gate=self._gate(asked, alone) if steering.coefficients else None,
            contrast=_contrast(asked, alone),
            sampling=SamplingOptions.of(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                logit_bias=logit_bias or {},
                seed=seed,
            ),
            stop=(stop,) if isinstance(stop, str) else stop or (),
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            top_logprobs=top_logprobs,
            prompt_logprobs=prompt_logprobs,
            watch=watch,
            structure=structure,
            skip_special_tokens=skip_special_tokens,
        )

    def fits(self, prompt: str | Sequence[int], *, max_tokens: int) -> bool:
        """Return whether a prompt leaves room for `max_tokens` new tokens.

        Raises RequestError for a prompt that is not text.
        """
        return self.engine.fits(self.request(prompt, max_tokens=max_tokens))

    def _ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return self.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _gate(self, steer: Steer, without_context: tuple[int, ...] | None) -> RequestGate | None:
        head_set = self.head_set_of(steer)
        if steer.gate != "auto" or head_set is None:
            return None
        return gate_of(
            steer,
            head_set,
            chat_template_sha256=self.prompts.sha256,
            without_context=without_context,
        )


def _contrast(steer: Steer, without_context: tuple[int, ...] | None) -> Contrast | None:
    if steer.method not in CONTRASTS or not steer.strength:
        return None
    if without_context is None:
        raise RequestError(
            f"method {steer.method} needs the context separately; give it as `context`",
            param="context",
        )
    return Contrast(
        prompt_ids=without_context,
        weight=steer.strength,
        is_adaptive=steer.method == "adacad",
    )
