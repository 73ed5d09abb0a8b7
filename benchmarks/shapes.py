"""What the benchmarks of speed run: Llamas of random weights, their prompts and their steering."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from juice.engine import Steering, SteeringReport

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama."""

    n_layers: int
    width: int
    n_heads: int
    n_kv_heads: int
    intermediate: int
    vocabulary: int

    @property
    def steered_layers(self) -> range:
        """A third of the layers, in the middle; with heads in all of them, that is the window."""
        third = self.n_layers // 3
        return range(third, 2 * third)

    @property
    def n_weights(self) -> int:
        """How many weights the model has, embeddings included."""
        d_head = self.width // self.n_heads
        attention = 2 * self.width * (self.width + self.n_kv_heads * d_head)
        layer = attention + 3 * self.width * self.intermediate
        return self.n_layers * layer + 2 * self.vocabulary * self.width

    def n_kv_bytes(self, n_tokens: int, bytes_each: int) -> int:
        """Return what the keys and values of steered tokens take, those of companions included."""
        layers = self.n_layers + len(self.steered_layers)
        per_layer = 2 * self.n_kv_heads * self.width // self.n_heads
        return n_tokens * layers * per_layer * bytes_each

    def network(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
        """Return a model of this shape, always with the same weights on one device."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
            dtype=dtype,
        )
        torch.manual_seed(0)
        with torch.device(device):
            return LlamaForCausalLM(config).to(dtype).eval()

    def heads(self, seed: int) -> dict[tuple[int, int], float]:
        """Return a random head in each steered layer, each with its own beta."""
        random = torch.Generator().manual_seed(seed)
        return {
            (layer, int(torch.randint(self.n_heads, (1,), generator=random))): 0.5
            + float(torch.rand(1, generator=random))
            for layer in self.steered_layers
        }

    def steering(self, seed: int) -> Steering:
        """Return the steering by those heads."""
        heads = self.heads(seed)
        coefficients = {layer: torch.zeros(self.n_heads) for layer, _ in heads}
        for (layer, head), beta in heads.items():
            coefficients[layer][head] = beta
        report = SteeringReport(
            applied=True,
            target="context",
            head_set="benchmark",
            beta_plus=1,
            beta_minus=0,
            strength=1,
            method="juice",
            n_heads=len(heads),
        )
        return Steering(coefficients=coefficients, report=report)


SMALL = Shape(12, 384, 6, 6, 1024, 4096)
SHAPES = {
    "small": SMALL,
    "1b": Shape(16, 2048, 32, 8, 8192, 128_256),
    "8b": Shape(32, 4096, 32, 8, 14_336, 128_256),
}


def prompts(n: int) -> list[Prompt]:
    """Return prompts of 192 to 320 tokens."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(192, 321, (n,), generator=random)
    return [
        tuple(torch.randint(1, 280, (int(length),), generator=random).tolist())
        for length in lengths
    ]
