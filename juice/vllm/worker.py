"""What vLLM's workers can be asked, beside their work (`worker_extension_cls`)."""

from __future__ import annotations

from typing import Any

import torch

from juice.vllm.arguments import Coefficients
from juice.vllm.reference import two_runs


class WorkerExtension:
    """Methods that vLLM adds to its worker class; every rank runs them together."""

    vllm_config: Any
    model_runner: Any

    def juice_facts(self) -> dict[str, Any]:
        """Return how this worker runs the model: `dtype`, `device`, and what users are told."""
        config, runner = self.vllm_config, self.model_runner
        caches = runner.kv_cache_config
        specs = {
            name: group.kv_cache_spec
            for group in caches.kv_cache_groups
            for name in group.layer_names
        }
        own = {name: _spec_of(spec, name) for name, spec in specs.items()}
        n_ranks = config.parallel_config.world_size
        per_token = {name: spec.page_size_bytes / spec.block_size for name, spec in own.items()}
        layers = config.compilation_config.static_forward_context
        return {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "device": config.device_config.device_type,
            "block_size": max(spec.block_size for spec in own.values()),
            "n_stages": config.parallel_config.pipeline_parallel_size,
            "runner": "V1",
            "attention": sorted({layers[name].attn_backend.get_name() for name in specs}),
            "compiled": not config.model_config.enforce_eager,
            "n_kv_bytes": n_ranks * sum(tensor.size for tensor in caches.kv_cache_tensors),
            "n_kv_bytes_per_token": round(n_ranks * sum(per_token.values())),
            "n_companion_kv_bytes_per_token": round(
                n_ranks * sum(n for name, n in per_token.items() if ".shadow." in name)
            ),
        }

    def juice_two_runs(
        self, tokens: list[int], coefficients: str | None, read: list[list[int]]
    ) -> list[list[float]] | None:
        """Return log-probabilities at the last tokens by the definition, on one rank.

        `read` has the tokens whose to return, a list for each of the last tokens.
        """
        model = self.model_runner.get_model()
        own = None if coefficients is None else Coefficients.from_json(coefficients)
        logits = two_runs(model, self.vllm_config, tokens, own)
        if logits is None:
            return None
        scores = logits[-len(read) - 1 : -1].log_softmax(-1)
        return scores.gather(1, torch.tensor(read, device=scores.device)).tolist()


def _spec_of(spec: Any, name: str) -> Any:
    """Return a layer's own spec from its group's."""
    return getattr(spec, "kv_cache_specs", {}).get(name, spec)
