"""A model's state under vLLM's V2 model runner: it fills the table, and places the tokens.

V2 asks the model for it, on every rank. A request keeps its slot for life, which is its row in the
table; a batch is ordered anew before each step. What is written here is written outside of graphs.

Graphs of whole steps are captured twice where companions may rest in a step; each step replays one
of both.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.states import RequestState

from juice.engine.vllm.arguments import Coefficients


class SteeredState(DefaultModelState):
    """vLLM's state of a model, and the rows of the model's table."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._staged: dict[int, Coefficients | None] = {}

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        """Note the coefficients of a request that joins, or that comes back after a preemption."""
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        self._staged[req_index] = Coefficients.read(params.extra_args) if params else None

    def apply_staged_writes(self) -> None:
        """Write what was noted since the last step."""
        super().apply_staged_writes()
        for slot, coefficients in self._staged.items():
            self.model.table.write(slot, coefficients)
        self._staged.clear()

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        """Say whose each token of the step is, and what steering them takes."""
        n_tokens, n_requests = input_batch.num_tokens_after_padding, input_batch.num_reqs
        table, slots = self.model.table, input_batch.idx_mapping_np[:n_requests].tolist()
        table.place(
            input_batch.query_start_loc[: n_requests + 1],
            input_batch.positions[:n_tokens],
            input_batch.idx_mapping[:n_requests],
        )
        self.model.rows = slots
        self.model.n_runs = max((table.n_runs[slot] for slot in slots), default=0)
        return super().prepare_inputs(input_batch, req_states)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        """Let the tokens of a step that is captured belong to nobody."""
        self.model.table.clear()
        return super().prepare_dummy_inputs(num_reqs, num_tokens)


_capture, _run_fullgraph = ModelCudaGraphManager.capture, ModelCudaGraphManager.run_fullgraph


def capture_both() -> None:
    """Change the graphs of this process."""
    ModelCudaGraphManager.capture = _capture_both
    ModelCudaGraphManager.run_fullgraph = _run_either


def _capture_both(self: Any, model: Any, *arguments: Any, **options: Any) -> None:
    """Capture the steps without companions, where these may rest, and those with them."""
    self.model, self.by_doubled = model, {}
    for n_runs in (1, 2) if model.may_rest else (2,):
        model.n_runs, self.graphs = n_runs, {}
        _capture(self, model, *arguments, **options)
        self.by_doubled[n_runs > 1] = self.graphs
    if samples := self._capture_mem_samples:
        # vLLM reckons with one set: each sample is of the graphs of a size in both.
        n = len(samples) // len(self.by_doubled)
        samples[:] = [sum(samples[i::n]) for i in range(n)]


def _run_either(self: Any, descriptor: Any) -> Any:
    self.graphs = self.by_doubled[self.model.n_runs > 1 or not self.model.may_rest]
    return _run_fullgraph(self, descriptor)
