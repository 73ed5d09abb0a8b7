"""Answers of a given form in vLLM: the rules of our own engine, after the log-probabilities.

vLLM's own structured output masks the logits before it scores them, so its log-probabilities are
not those of the model. Logits processors come after the scores.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from juice.engine.structure import Constraint, Structure, Structures, rule_out
from juice.errors import RequestError
from juice.vllm.arguments import STRUCTURE


def to_text(structure: Structure, stop_token_ids: frozenset[int]) -> str:
    """Return what travels with a request in `extra_args`."""
    return json.dumps([asdict(structure), sorted(stop_token_ids)])


class _Answer:
    """The constraint of one row, and the list of its tokens, which vLLM goes on to fill."""

    def __init__(self, constraint: Constraint, token_ids: list[int]) -> None:
        self._constraint, self._token_ids = constraint, token_ids
        self._n_accepted = 0

    def constraint(self) -> Constraint:
        """Return the constraint after all tokens so far."""
        for token_id in self._token_ids[self._n_accepted :]:
            self._constraint.accept(token_id)
        self._n_accepted = len(self._token_ids)
        return self._constraint


class StructureProcessor(LogitsProcessor):
    """Rules out the tokens that may not come next."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._config = vllm_config.model_config
        self._structures: dict[tuple[int, ...], Structures] = {}
        self._answers: dict[int, _Answer] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all: JuICE has checked the structure, and who sends it."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy tokens stay the same: they do not."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note what was removed, added and moved since the last step."""
        process_dict_updates(self._answers, batch_update, self._new)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, minus infinity where a token may not come next."""
        if self._answers:
            rule_out(logits, {row: own.constraint() for row, own in self._answers.items()})
        return logits

    def _new(
        self, params: SamplingParams, _prompt: list[int] | None, token_ids: list[int]
    ) -> _Answer | None:
        text = (params.extra_args or {}).get(STRUCTURE)
        if text is None:
            return None
        structure, stop_token_ids = json.loads(text)
        own = self._structures_of(tuple(stop_token_ids))
        try:
            constraint = own.start(Structure(**structure))
        except RequestError:  # which must not end vLLM: the answer only stops, and is not whole
            constraint = Constraint(None, stop_token_ids)
        return _Answer(constraint, token_ids)

    def _structures_of(self, stop_token_ids: tuple[int, ...]) -> Structures:
        if stop_token_ids not in self._structures:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self._config.tokenizer, revision=self._config.tokenizer_revision
            )
            self._structures[stop_token_ids] = Structures(
                tokenizer,
                self._config.get_vocab_size(),
                frozenset(stop_token_ids),
                are_tried=True,
            )
        return self._structures[stop_token_ids]
