"""The two-run definition of method.md, slow and obvious: the oracle of every fast path.

No cache, no batch, no code of `juice`: for each token the clean run records z, the steered run has
`z_h <- z_h + beta * z_h(clean)`, and the likeliest token of the steered run is chosen. Heads are
{(layer, head): beta}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

Heads = Mapping[tuple[int, int], float]


PROJECTIONS = {
    "bloom": "transformer.h.{}.self_attention.dense",
    "falcon": "transformer.h.{}.self_attention.dense",
    "gemma3": "model.language_model.layers.{}.self_attn.o_proj",
    "gpt2": "transformer.h.{}.attn.c_proj",
    "gpt_bigcode": "transformer.h.{}.attn.c_proj",
    "gpt_neo": "transformer.h.{}.attn.attention.out_proj",
    "gpt_neox": "gpt_neox.layers.{}.attention.dense",
    "gptj": "transformer.h.{}.attn.out_proj",
    "mpt": "transformer.blocks.{}.attn.out_proj",
    "opt": "model.decoder.layers.{}.self_attn.out_proj",
    "phi": "model.layers.{}.self_attn.dense",
}


def projections(model: PreTrainedModel) -> list[nn.Module]:
    """Return the attention output projections, by name for each architecture."""
    path = PROJECTIONS.get(model.config.model_type, "model.layers.{}.self_attn.o_proj")
    return [
        model.get_submodule(path.format(i))
        for i in range(model.config.get_text_config().num_hidden_layers)
    ]


def forward(
    model: PreTrainedModel, ids: list[int], change: Mapping[int, object] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run one prompt without a cache; return its logits and each layer's z.

    The logits are [pos, vocabulary]; each z is [pos, n_heads * d_head], as it was before `change`.
    """
    recorded: list[torch.Tensor] = []
    handles = []

    def hook(layer: int):
        def keep(_module, args):
            z = args[0]
            recorded.append(z[0].clone())
            if change and layer in change:
                return (change[layer](z.clone()), *args[1:])
            return None

        return keep

    for layer, projection in enumerate(projections(model)):
        handles.append(projection.register_forward_pre_hook(hook(layer)))
    try:
        with torch.no_grad():
            # The hooks of a device map move the tokens themselves.
            device = None if hasattr(model, "hf_device_map") else model.device
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits, recorded


def steered_logits(
    model: PreTrainedModel,
    ids: list[int],
    heads: Heads,
    *,
    method: str = "juice",
    first: int = 0,
    scales: Sequence[float] | None = None,
) -> torch.Tensor:
    """Return the logits [pos, vocabulary] of the steered run on these tokens.

    It is steered from the token `first` on, or at each token by its scale.
    """
    if not heads:
        return forward(model, ids)[0]
    if scales is None:
        scales = [float(at >= first) for at in range(len(ids))]
    n_heads = model.config.get_text_config().num_attention_heads
    clean = forward(model, ids)[1] if method == "juice" else []
    by_token = torch.tensor(scales)[:, None]
    change = {}
    for layer in {layer for layer, _ in heads}:

        def add(z, layer=layer):
            d_head = z.shape[-1] // n_heads
            original = z.clone()
            for (at, head), beta in heads.items():
                if at == layer:
                    columns = slice(head * d_head, (head + 1) * d_head)
                    source = clean[layer] if method == "juice" else original[0]
                    z[0, :, columns] += beta * by_token.to(z) * source[:, columns]
            return z

        change[layer] = add
    return forward(model, ids, change)[0]


def generate(
    model: PreTrainedModel,
    ids: list[int],
    heads: Heads,
    n_tokens: int,
    *,
    method: str = "juice",
    first: int = 0,
    scale_of: Callable[[int], float] | None = None,
) -> tuple[list[int], torch.Tensor]:
    """Return n greedy tokens and the logits [n_tokens, vocabulary] that chose them.

    `scale_of` gives the scale of the steering at a position; without it, `first` says where it
    begins.
    """
    ids, chosen, seen = list(ids), [], []
    for _ in range(n_tokens):
        scales = None if scale_of is None else [scale_of(at) for at in range(len(ids))]
        logits = steered_logits(model, ids, heads, method=method, first=first, scales=scales)[-1]
        token = int(logits.argmax())
        ids.append(token)
        chosen.append(token)
        seen.append(logits)
    return chosen, torch.stack(seen)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the Jensen-Shannon divergence of two distributions in bits, token by token."""
    total = 0.0
    both = (logits.double().softmax(-1).tolist() for logits in (one, other))
    for p, q in zip(*both, strict=True):
        middle = (p + q) / 2
        total += sum(x * math.log2(x / middle) / 2 for x in (p, q) if x > 0)
    return total


def relative_entropy(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return KL(one || other) of the distributions of two rows of logits, in nats."""
    p, q = (logits.double().softmax(-1) for logits in (one, other))
    can_come = p > 0
    return float((p * (p / q).log())[can_come].sum())


def generate_contrasted(
    model: PreTrainedModel,
    ids: list[int],
    without: list[int],
    n_tokens: int,
    *,
    method: str = "cad",
    target: str = "context",
    strength: float = 1.0,
) -> tuple[list[int], torch.Tensor]:
    """Return n greedy tokens of a contrast and the logits that chose them.

    `ids` are the prompt with its context, `without` the prompt alone; the logits are
    [n_tokens, vocabulary]. docs/method.md, "Contrasts", has the rules.
    """
    chosen: list[int] = []
    seen: list[torch.Tensor] = []
    trusts: bool | None = None
    for _ in range(n_tokens):
        given, alone = forward(model, ids + chosen)[0][-1], forward(model, without + chosen)[0][-1]
        row, trusts = contrasted(given, alone, method, target, strength, trusts)
        seen.append(row)
        chosen.append(int(row.argmax()))
    return chosen, torch.stack(seen)


def contrasted(
    given: torch.Tensor,
    alone: torch.Tensor,
    method: str,
    target: str = "context",
    strength: float = 1.0,
    trusts: bool | None = None,
) -> tuple[torch.Tensor, bool | None]:
    """Return the row of a contrast from those with and without the context, token by token.

    And whether GRD trusts the memory from now on; None while it has not decided.
    """
    c, m = (row.double().log_softmax(-1).tolist() for row in (given, alone))
    told, known = (max(range(len(row)), key=row.__getitem__) for row in (c, m))
    if method == "ckplug":
        return torch.tensor(plugged(c, m, target, strength)), trusts
    w = strength
    if method == "adacad":
        w *= divergence(given, alone)
    if method == "cocoa":
        apart = -2 * math.log(sum(math.exp((a + b) / 2) for a, b in zip(c, m, strict=True)))
        x = entropy(m) - entropy(c) + apart / (1 + apart)
        w *= min(0.9, max(0.1, 1 / (1 + math.exp(-x))))
    if method == "grd":
        w = 0.0
        if told != known:
            if trusts is None:
                trusts = math.exp(m[known]) > 0.5 and entropy(m) < entropy(c)
            if trusts:
                lead, lag = m[known] - m[told], c[told] - c[known]
                w = max(0.0, 1 - 0.75 * strength) * lead / (lead + lag) - 1
    return torch.tensor([(1 + w) * a - w * b for a, b in zip(c, m, strict=True)]), trusts


def entropy(logprobs: Sequence[float]) -> float:
    """Return the entropy of a distribution in nats."""
    return -sum(math.exp(a) * a for a in logprobs)


def plugged(c: list[float], m: list[float], target: str, strength: float) -> list[float]:
    """Return the row of CK-PLUG; tokens that it leaves out have at most -100."""
    kept = set()
    for row in (c, m):
        ranked = sorted(range(len(row)), key=lambda i: -row[i])
        kept |= {*ranked[:10], *(i for i in ranked if row[i] >= row[ranked[0]] + math.log(0.01))}

    def among(row: list[float]) -> dict[int, float]:
        total = math.log(sum(math.exp(row[i]) for i in kept))
        return {i: row[i] - total for i in kept}

    told, known = among(c), among(m)
    mixed = dict(told)
    if entropy([*told.values()]) > entropy([*known.values()]):
        a = (1 + strength) / 2 if target == "parametric" else (1 - strength) / 2
        mixed = {i: a * known[i] + (1 - a) * (told[i] - known[i]) for i in kept}
    least = min(mixed.values())
    return [mixed.get(i, least - 100 + c[i]) for i in range(len(c))]
