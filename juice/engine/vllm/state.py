"""The state of vLLM's persistent batch: the coefficients of its rows, and the forms of its answers.

At layer l and head h, a token of row r gets

    z <- z + factor * (own[r, h] * z + clean[r, h] * z of its companion)

with z as it was before, and a factor that is 1, 0 where the request is not steered, or that of its
schedule. The tensors of the table stay where they are from the start on, and are
written in the order of the stream before a step runs, so graphs that replay whole steps read them.
vLLM's V1 model runner tells logits processors what happens to its rows: `RowWriter` fills the table
and changes no logits. V2 tells the model's state (`juice.engine.vllm.slots`).

Answers of a given form follow the rules of our own engine: vLLM's own structured output masks the
logits before it scores them, so its log-probabilities are not those of the model. Logits processors
come after the scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from juice.engine.steer import MAX_SCHEDULE
from juice.engine.structure import Constraint, Structure, Structures, rule_out
from juice.engine.vllm.arguments import STRUCTURE, Coefficients, Layers, check_origin
from juice.errors import RequestError, UnsupportedModelError
from juice.model.identity import stored_tokenizer

OWN, CLEAN = 0, 1
ENDLESS = 2**62


class Table:
    """The coefficients of the batch's rows, and the row and the factor of every token of the step.

    One more row than the batch has, of zeros, is that of padding.

    Args:
        n_rows: The largest number of requests in a batch.
        n_tokens: The largest number of tokens in a step.
        layers: The layers whose heads can be scaled.
        n_heads: The query heads of a layer, over all ranks.
        device: The device that the model runs on.
    """

    def __init__(
        self, n_rows: int, n_tokens: int, layers: range, n_heads: int, device: torch.device
    ) -> None:
        self.layers, self.n_heads, self.n_rows = layers, n_heads, n_rows
        # By layer, kind (own or clean), row and head.
        self.coefficients = torch.zeros(
            len(layers), 2, n_rows + 1, n_heads, dtype=torch.float32, device=device
        )
        self.row_of_token = torch.full((n_tokens,), n_rows, dtype=torch.int64, device=device)
        self.factor_of_token = torch.zeros(n_tokens, dtype=torch.float32, device=device)
        # By row: the first token that is steered, the one after the last, and the prompt's number.
        self._bounds = torch.zeros(n_rows + 1, 3, dtype=torch.int64, device=device)
        self._schedules = torch.ones(n_rows + 1, MAX_SCHEDULE, device=device)
        self._tokens = torch.arange(n_tokens, device=device)
        # What steering each row takes: no run, its own, or a companion's as well.
        self.n_runs = [0] * n_rows

    def write(self, row: int, coefficients: Coefficients | None) -> None:
        """Set the coefficients of a row, in the order of the stream, without waiting for it."""
        self.n_runs[row] = 0 if coefficients is None else 1 if coefficients.is_single else 2
        pinned = self.coefficients.is_cuda
        values = torch.zeros(len(self.layers), 2, self.n_heads, pin_memory=pinned)
        if coefficients is not None:
            kind = OWN if coefficients.is_single else CLEAN
            for layer, head, value in coefficients.heads:
                values[self.layers.index(layer), kind, head] += value
        self.coefficients[:, :, row].copy_(values, non_blocking=True)
        bounds, schedule = torch.zeros(3, dtype=torch.int64), torch.ones(MAX_SCHEDULE)
        if coefficients is not None:
            last = coefficients.last_position
            bounds[0], bounds[2] = coefficients.first_position, coefficients.n_prompt
            bounds[1] = ENDLESS if last is None else last
            if factors := coefficients.schedule:
                schedule[: len(factors)] = torch.tensor(factors)
                schedule[len(factors) :] = factors[-1]
        for all_rows, of_row in ((self._bounds, bounds), (self._schedules, schedule)):
            all_rows[row].copy_(of_row.pin_memory() if pinned else of_row, non_blocking=True)

    def move(self, source: int, destination: int) -> None:
        """Move a row to the number of another; its own is then empty."""
        self.coefficients[:, :, destination] = self.coefficients[:, :, source]
        for of_rows in (self._bounds, self._schedules):
            of_rows[destination] = of_rows[source]
        self.n_runs[destination] = self.n_runs[source]
        self.write(source, None)

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        pair, exchanged = [one, other], [other, one]
        self.coefficients[:, :, pair] = self.coefficients[:, :, exchanged]
        for of_rows in (self._bounds, self._schedules):
            of_rows[pair] = of_rows[exchanged]
        self.n_runs[one], self.n_runs[other] = self.n_runs[other], self.n_runs[one]

    def clear(self) -> None:
        """Say that the tokens of the step belong to no row."""
        self.row_of_token.fill_(self.n_rows)

    def place(
        self, starts: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None = None
    ) -> None:
        """Say which row every token of the step belongs to, and its factor there.

        Args:
            starts: The start of each request's tokens, and the end of the last one's, int
                [requests + 1].
            positions: The position of each token in its request, int [tokens].
            rows: The row of each request, int [requests]; None: they are in the order of rows.
        """
        n = len(positions)
        if rows is None:
            rows = self._tokens[: len(starts) - 1]
        request = torch.searchsorted(starts[1:], self._tokens[:n].to(starts.dtype), right=True)
        # What is beyond the last one's end is padding, and belongs to nobody.
        row = pad(rows.long(), (0, 1), value=self.n_rows)[request]
        first, last, n_prompt = self._bounds[row].unbind(-1)
        at = (positions - n_prompt + 1).clamp(0, MAX_SCHEDULE - 1)
        factors = self._schedules[row, at]
        is_steered = (positions >= first) & (positions < last)
        self.factor_of_token[:n] = torch.where(is_steered, factors, 0.0)
        self.row_of_token[:n] = row


class RowWriter(LogitsProcessor, V2LogitsProcessor):
    """Writes the table of this process' model before each step of vLLM's V1 model runner.

    Under V2, `juice.engine.vllm.slots` does, on every rank.
    """

    table: Table

    def __init__(self, vllm_config: VllmConfig, *_of_runner: Any) -> None:
        if not vllm_config.model_config.architecture.startswith("Transformers"):
            raise UnsupportedModelError(
                "vLLM's own class of the model is not steered: start vLLM with --model-impl "
                "transformers"
            )
        if Layers.of(vllm_config) is None:
            raise UnsupportedModelError(
                "nothing can be steered: start vLLM with JUICE_HEAD_SETS, and where VLLM_PLUGINS "
                "is set let it name juice"
            )

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request that steers past JuICE."""
        check_origin(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        """Whether greedy tokens stay the same: the logits do."""
        return True

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Return whether logits change."""
        return False

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Return the logits, [rows, vocabulary], unchanged."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Write what was removed, added and moved since the last step, in this order."""
        if batch_update is None:
            return
        table = RowWriter.table
        for row in batch_update.removed:
            table.write(row, None)
        for row, params, _prompt, _output in batch_update.added:
            table.write(row, Coefficients.read(params.extra_args))
        for source, destination, how in batch_update.moved:
            if how is MoveDirectionality.SWAP:
                table.swap(source, destination)
            else:
                table.move(source, destination)


def structures_of(model: ModelConfig, stop_token_ids: Iterable[int]) -> Structures:
    """Return the structures of a worker's answers, which JuICE's own process has checked."""
    n_tokens, stops = model.get_vocab_size(), frozenset(stop_token_ids)
    return _structures(model.tokenizer, model.tokenizer_revision, n_tokens, stops)


@cache
def _structures(
    tokenizer: str, revision: str | None, n_tokens: int, stop_token_ids: frozenset[int]
) -> Structures:
    stored = stored_tokenizer(tokenizer, revision=revision)
    return Structures(stored, n_tokens, stop_token_ids, are_checked=True)


def to_text(structure: Structure, stop_token_ids: frozenset[int]) -> str:
    """Return a structure as text for a request's `extra_args`."""
    return json.dumps([asdict(structure), sorted(stop_token_ids)])


class _Answer:
    """The constraint of one row, and the list of its tokens, which goes on to be filled."""

    def __init__(self, constraint: Constraint, token_ids: list[int]) -> None:
        self._constraint, self.token_ids = constraint, token_ids
        self._n_accepted = 0

    def constraint(self) -> Constraint:
        """Return the constraint after all tokens so far."""
        for token_id in self.token_ids[self._n_accepted :]:
            self._constraint.accept(token_id)
        self._n_accepted = len(self.token_ids)
        return self._constraint


class StructureProcessor(LogitsProcessor, V2LogitsProcessor):
    """Rules out the tokens that may not come next, under either model runner."""

    def __init__(self, vllm_config: VllmConfig, *of_runner: Any) -> None:
        self._model = vllm_config.model_config
        self._answers: dict[int, _Answer] = {}  # by row, or by slot
        # V2's, whose tokens have to be read.
        self._requests = next((o for o in of_runner if isinstance(o, LogitsProcRequestState)), None)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Accept all: JuICE has checked the structure, and who sends it."""

    def is_argmax_invariant(self) -> bool:
        """Whether greedy tokens stay the same: they do not."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Note what was removed, added and moved since the last step."""
        process_dict_updates(self._answers, batch_update, self._new)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note a request of a slot, and return whether it is given a form."""
        self._answers.pop(req_idx, None)
        answer = self._new(sampling_params, None, [])
        if answer is not None:
            self._answers[req_idx] = answer
        return answer is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Return the logits, [rows, vocabulary], minus infinity where a token may not come next."""
        answers = self._answers
        if ctx is not None and answers:
            answers = {
                row: self._read(answer, slot, int(ctx.seq_lens_upper_bound_np[row]))
                for row, slot in enumerate(ctx.idx_mapping_np.tolist())
                if (answer := self._answers.get(slot)) is not None
            }
        if answers:
            rule_out(logits, {row: answer.constraint() for row, answer in answers.items()})
        return logits

    def _read(self, answer: _Answer, slot: int, n_tokens: int) -> _Answer:
        """Give an answer the tokens that it has got since, of its request's first so many."""
        assert self._requests is not None
        first = int(self._requests.prompt_len.np[slot]) + len(answer.token_ids)
        new = self._requests.all_token_ids.gpu[slot, first : max(first, n_tokens)]
        answer.token_ids.extend(new.tolist())
        return answer

    def _new(
        self, params: SamplingParams, _prompt: list[int] | None, token_ids: list[int]
    ) -> _Answer | None:
        text = (params.extra_args or {}).get(STRUCTURE)
        if text is None:
            return None
        structure, stop_token_ids = json.loads(text)
        structures = structures_of(self._model, stop_token_ids)
        try:
            constraint = structures.start(Structure(**structure))
        except RequestError:  # which must not end vLLM: the answer only stops, and is not whole
            constraint = Constraint(None, stop_token_ids)
        return _Answer(constraint, token_ids)
