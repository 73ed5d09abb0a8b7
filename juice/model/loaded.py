"""A model ready to be steered; how it was loaded is not known here.

A compiled model is run uncompiled. `torch.compile` traces the hooks that exist at its first call
and silently ignores later ones; and every new set of rows that join and leave would be compiled
again. So our forwards run the modules themselves, whether they were compiled before the model was
loaded or after, and restore the compiled code afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from juice.engine.contract import ModelDescription
from juice.head_set.schema import ModelIdentity
from juice.model.identity import describe
from juice.model.layout import Layout, text_config
from juice.model.masks import AttentionPattern
from juice.model.steering_hooks import ModelHooks


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Replace every compiled call or forward of these modules by the original, while within."""
    compiled = [
        (module.__dict__, name, module.__dict__[name], plain)
        for module in modules
        for name in ("_compiled_call_impl", "forward")
        if (plain := getattr(module.__dict__.get(name), "_torchdynamo_orig_callable", None))
        is not None
    ]
    for attributes, name, _, plain in compiled:
        attributes[name] = plain
    try:
        yield
    finally:
        for attributes, name, before, _ in compiled:
            attributes[name] = before


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready to be steered: its parts, its hooks and its identity.

    `mask_pattern` is None where the model must build its own masks; `rope_switch` is the number of
    tokens beyond which its positions change, if they do.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    layout: Layout
    mask_pattern: AttentionPattern | None
    rope_switch: int | None
    hooks: ModelHooks
    identity: ModelIdentity
    modules: tuple[nn.Module, ...]
    # False where the projections are not linear row by row: then steering is approximate, and
    # every answer reports it.
    exact: bool = True
    # Where JuICE chose the dtype by the CPU.
    dtype_reason: str | None = None
    # Held during a forward: the cache and the hooks that come and go serve one at a time.
    turn: RLock = field(default_factory=RLock)

    def release(self) -> None:
        """Remove the hooks, so that the model can be loaded again."""
        self.hooks.remove()
        self.model._juice_hooked = False

    def run(self, **inputs: Any) -> Any:
        """Run one forward, uncompiled, and return the model's output."""
        with uncompiled(self.modules):
            return self.model(**inputs, **self._options)

    @cached_property
    def _options(self) -> dict[str, Any]:
        """Options of every forward: no loss that balances experts, which takes no masks of ours."""
        balances = getattr(text_config(self.model), "output_router_logits", False)
        return {"output_router_logits": False} if balances else {}

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return input_device(self.model)

    @property
    def n_layers_on(self) -> Counter[torch.device]:
        """The number of layers on each device; those that are fetched run on the inputs'."""
        found = Counter[torch.device]()
        for layer in self.layout.layers:
            projection = layer.projection  # some quantised ones have no parameters
            held = next(chain(projection.parameters(), projection.buffers()), None)
            at = self.device if held is None else held.device
            found[self.device if at.type == "meta" else at] += 1
        return found

    @property
    def n_weights(self) -> int:
        """The number of weights."""
        return sum(weight.numel() for weight in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def quantization(self) -> str | None:
        """The quantisation that transformers knows of, such as bitsandbytes-4bit or torchao."""
        config = getattr(self.model.config, "quantization_config", None)
        if config is None:
            return None
        values: dict[str, Any] = config if isinstance(config, dict) else config.to_dict()
        method = values.get("quant_method")
        bits = next((f"-{n}bit" for n in (4, 8) if values.get(f"load_in_{n}bit")), "")
        return f"{getattr(method, 'value', method)}{bits}"

    def describe(self) -> ModelDescription:
        """Return the model's description in the terms of the engine contract."""
        return describe(
            self.model,
            self.tokenizer,
            self.layout,
            self.identity,
            dtype=str(self.dtype).removeprefix("torch."),
            dtype_reason=self.dtype_reason,
            device=str(self.device),
            quantization=self.quantization,
            exact=self.exact,
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs, also where the embedding is fetched each time."""
    embedding = model.get_input_embeddings()
    if embedding.weight.device.type != "meta":
        return torch.device(embedding.weight.device)
    return torch.device(
        getattr(getattr(embedding, "_hf_hook", None), "execution_device", None) or "cpu"
    )
