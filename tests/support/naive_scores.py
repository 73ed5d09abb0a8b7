"""Identification as method.md defines it: a loop over heads and alphas, with a forward for each.

The oracle of the tests, and the baseline of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from tests.support import oracle


@torch.no_grad()
def mean_changes(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[int],
    alphas: Sequence[float],
    heads: Sequence[tuple[int, int]] | None = None,
    on_forward: Callable[[int], None] = lambda _n: None,
) -> torch.Tensor:
    """Return the mean over prompts and alphas of p_y(scaled) - p_y, [n_layers, n_heads].

    Only `heads` are scored where they are given; the others stay 0. The prompts are one
    right-padded batch; logits are computed only at each prompt's last position.
    """
    n_layers, n_heads = model.config.num_hidden_layers, model.config.num_attention_heads
    width = max(map(len, prompts))
    ids = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts])
    rows, last = torch.arange(len(prompts)), torch.tensor([len(p) - 1 for p in prompts])
    head_of = model.get_output_embeddings()

    def p_y() -> torch.Tensor:
        on_forward(ids.numel())
        gather = head_of.register_forward_pre_hook(
            lambda _m, args: (args[0][rows, last].unsqueeze(1),)
        )
        logits = model(ids, use_cache=False).logits[:, 0]
        gather.remove()
        return logits.softmax(-1)[rows, torch.tensor(answers)]

    original = p_y()
    scores = torch.zeros(n_layers, n_heads)
    for layer, projection in enumerate(oracle.projections(model)):
        for head in range(n_heads):
            if heads is not None and (layer, head) not in heads:
                continue
            for alpha in alphas:

                def scale(_module, args, head=head, alpha=alpha):
                    z = args[0].clone()
                    d_head = z.shape[-1] // n_heads
                    z[..., head * d_head : (head + 1) * d_head] *= 1 + alpha
                    return (z, *args[1:])

                handle = projection.register_forward_pre_hook(scale)
                scores[layer, head] += (p_y() - original).mean() / len(alphas)
                handle.remove()
    return scores
