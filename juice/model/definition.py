"""The definition of steering, slow and obvious: two runs, no cache, no batch, no permanent hooks.

Run 1, the clean run, is the unmodified model and keeps z of the steered layers. Run 2, the steered
run, adds to z of each steered head its coefficient times the clean run's z; the single run (JuNe)
adds its own z instead. Everything faster is checked against this.

`PaddedPrompts` is the forward for all that reads prompts at their ends or elsewhere, outside the
engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from inspect import signature

import torch

from juice.formula import Method, add_scaled
from juice.model.layout import AttentionLayer
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import at_z

# Logits that are held at once, of one of two runs, unless a text has more: 256 MB in float32.
MOST_LOGITS = 64_000_000


@torch.inference_mode()
def two_runs(
    loaded: LoadedModel,
    ids: torch.Tensor,
    coefficients: Mapping[int, torch.Tensor],
    n_kept: int,
    factors: torch.Tensor,
    method: Method,
    *,
    n_rows: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of the last tokens in the clean run and in the steered run.

    Both are float32 [n_kept, vocabulary].

    Args:
        loaded: The model.
        ids: The tokens, int64 [tokens].
        coefficients: By layer, float32 [n_heads].
        n_kept: The number of last tokens.
        factors: The factor of the coefficients at each token, float32 [tokens].
        method: The run whose z is added: the clean one (`juice`) or the steered itself (`june`).
        n_rows: The number of equal rows that run together, which changes how products are rounded.
    """
    clean: dict[int, torch.Tensor] = {}

    def keep(layer: AttentionLayer, z: torch.Tensor) -> None:
        clean[layer.index] = z  # [n_rows, tokens, n_heads * d_head]

    def add(layer: AttentionLayer, z: torch.Tensor) -> torch.Tensor:
        source = clean[layer.index] if method == "juice" else z
        coefficient = coefficients[layer.index][: layer.n_heads].to(factors.device)
        return add_scaled(z, source, factors[None, :, None] * coefficient)

    # Many models can compute the logits of the last tokens only; those of a whole prompt would take
    # gigabytes.
    kept = (
        {"logits_to_keep": n_kept}
        if "logits_to_keep" in signature(loaded.model.forward).parameters
        else {}
    )
    layers, runs = [loaded.layout.layers[index] for index in coefficients], list[torch.Tensor]()
    with loaded.turn:
        for act in (keep, add) if layers else (keep,):
            with at_z(layers, act):
                run = loaded.run(input_ids=ids.expand(n_rows, -1), use_cache=False, **kept)
            runs.append(run.logits[0, -n_kept:].float())
    return runs[0], runs[-1]


def most_places(loaded: LoadedModel) -> int:
    """Return the number of places whose logits are held at once."""
    return MOST_LOGITS // int(loaded.model.get_input_embeddings().weight.shape[0])


class PaddedPrompts:
    """Prompts as one batch, padded on the right: a causal model never looks at what follows one.

    `ids` are their tokens with the padding, int64 [prompts, pos], and `last` the last position of
    each prompt, int64 [prompts].

    Args:
        loaded: The model.
        prompts: The tokens of each prompt.
        read_at: The positions of each prompt at which it is read; None: its end.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Sequence[int]],
        read_at: Sequence[Iterable[int]] | None = None,
    ) -> None:
        width = max(map(len, prompts))
        padded = [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]
        self._loaded = loaded
        self.ids = torch.tensor(padded, device=loaded.device)
        self.last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=loaded.device)
        self._places = torch.arange(len(prompts), device=loaded.device), self.last
        if read_at is not None:
            places = [(row, at) for row, positions in enumerate(read_at) for at in positions]
            rows, positions = torch.tensor(places, device=loaded.device).unbind(1)
            self._places = rows, positions

    def logits(self) -> torch.Tensor:
        """Run once; return the logits where the prompts are read, float32 [places, vocabulary].

        The places are in the order of the prompts. Gradients pass where they are enabled.
        """
        loaded = self._loaded
        with loaded.turn, loaded.hooks.keep_logits(*self._places, self.ids.shape[1]):
            logits: torch.Tensor = loaded.run(input_ids=self.ids, use_cache=False).logits
        return logits[:, 0].float()
