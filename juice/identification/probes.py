"""Head scores by probes: one head scaled at a time (docs/method.md, stage 1, step 1).

    S[sign][j][l, h] = mean over examples and the sign's alphas of
                       p_y(z_h <- z_h + alpha * z_h at every position) - p_y(unmodified)

for every conflict type j, layer l and head h; p_y is the probability of the first token of the
target's answer at the prompt's last position. One pass of probes serves both targets: they differ
only in which probability is read.

The probe of head h in layer l scales z[l][:, :, h] at every position and reads the next-token
logits. Below layer l, and in the attention of layer l itself, nothing differs from the clean run,
so the two share it: a batch of n prompts runs once, the inputs of every layer are kept, and m
probes of one layer go through the model as one forward:

1. The model is called with a single token; the layers below l cost nothing.
2. Layer l receives the clean run's inputs, n rows; its attention runs once for all probes.
3. Before its output projection z becomes m copies, [m, n, pos, n_heads * d_head], each with its
   head scaled; the residual stream, [n, pos, d_model], broadcasts against them.
4. The layers above receive m * n rows. In the last one only each prompt's last position goes on
   after the attention.

The modules are transformers' own, with hooks that exist only within a call. Because an architecture
may not allow this, `Prober` first probes every layer with a factor of one: where that does not give
the clean logits, every row runs through the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from juice.data.example import ConflictExample
from juice.errors import ExampleError
from juice.formula import CONFLICT_TYPES, ConflictType, Target, add_scaled
from juice.head_set.scores import HeadScores
from juice.identification.examples import scored_prompt
from juice.identification.task import Unfinished
from juice.model.definition import PaddedPrompts, most_places
from juice.model.layout import AttentionLayer
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import SteeringPlan, copy_rows, hooked, in_this_thread
from juice.progress import Advance, Progress, silent
from juice.steered_model import SteeredModel

# The largest difference of a logit, as a share of the largest, that rounding may make.
TOLERANCES = {torch.bfloat16: 0.05, torch.float16: 0.01}
TOLERANCE = 1e-4
PROBE_TOKENS = 8192  # in one forward


class CleanRun:
    """One unmodified forward over n prompts: every layer's inputs, and each prompt's last logits.

    `ids` is int64 [n, pos], right-padded, `last` int64 [n], `logits` float32 [n, vocabulary].
    """

    def __init__(self, loaded: LoadedModel, prompts: list[tuple[int, ...]]) -> None:
        self.n, self.n_positions = len(prompts), max(map(len, prompts))
        switch = loaded.rope_switch or self.n_positions
        if self.n_positions > switch and min(map(len, prompts)) <= switch:
            raise ExampleError(
                f"some prompts are longer than {switch} tokens, beyond which this model changes "
                "its positions, and others are not; use examples of one kind"
            )
        padded = PaddedPrompts(loaded, prompts)
        self.ids, self.last = padded.ids, padded.last
        self.layer_inputs: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        keep = in_this_thread(self._keep)
        with hooked(
            s.layer.register_forward_pre_hook(keep, with_kwargs=True) for s in loaded.layout.layers
        ):
            self.logits = padded.logits()

    def _keep(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.layer_inputs.append((args, kwargs))


class Prober:
    """Probes the heads of one model on the prompts of one clean run."""

    def __init__(self, loaded: LoadedModel, clean: CleanRun) -> None:
        self._loaded = loaded
        self.clean = clean
        self.shares_clean_run = self._sharing_is_exact()

    @property
    def n_at_once(self) -> int:
        """The most probes that go through the model as one forward, beside an unscaled one."""
        by_tokens = PROBE_TOKENS // self.clean.ids.numel()
        by_logits = most_places(self._loaded) // self.clean.n - 1
        return max(1, min(by_tokens, by_logits))

    def logits(self, layer: int, factors: torch.Tensor) -> torch.Tensor:
        """Return the logits of m probes, float32 [m, n, vocabulary].

        `factors` is float32 [m, n_heads], 1 for an unscaled head.
        """
        return (self._shared if self.shares_clean_run else self._whole)(layer, factors)

    def _sharing_is_exact(self) -> bool:
        tolerance = TOLERANCES.get(self._loaded.dtype, TOLERANCE)
        scale = self.clean.logits.abs().max()
        try:
            for layer in self._loaded.layout.layers:
                ones = torch.ones(2, layer.n_heads, device=self._loaded.device)
                logits = self._shared(layer.index, ones)
                if (logits - self.clean.logits).abs().max() > tolerance * scale:
                    return False
        except (RuntimeError, ValueError, TypeError, IndexError):
            # Some part of this architecture insists on its own shapes; it gets whole forwards.
            return False
        return True

    def _whole(self, layer: int, factors: torch.Tensor) -> torch.Tensor:
        coefficients = (factors - 1).repeat_interleave(self.clean.n, 0)
        rows = torch.arange(len(coefficients), device=coefficients.device)
        plan = SteeringPlan({layer: rows}, {layer: coefficients})
        with self._loaded.hooks.steer(plan):
            return self._probed(self.clean.ids.repeat(len(factors), 1), len(factors))

    def _shared(self, layer: int, factors: torch.Tensor) -> torch.Tensor:
        with hooked(_SharedForward(self._loaded, self.clean, layer, factors).hooks()):
            return self._probed(self.clean.ids[:1, :1], len(factors))

    def _probed(self, ids: torch.Tensor, n_probes: int) -> torch.Tensor:
        clean = self.clean
        rows = torch.arange(n_probes * clean.n, device=clean.ids.device)
        with self._loaded.hooks.keep_logits(rows, clean.last.repeat(n_probes), clean.n_positions):
            logits: torch.Tensor = self._loaded.run(input_ids=ids, use_cache=False).logits
        return logits.float().view(n_probes, clean.n, -1)


class _SharedForward:
    """The hooks of one forward that enters at layer `probed`."""

    def __init__(
        self, loaded: LoadedModel, clean: CleanRun, probed: int, factors: torch.Tensor
    ) -> None:
        self._layers = loaded.layout.layers
        self._clean = clean
        self._probed = probed
        self._factors = factors
        self._attention_is_done = False
        # Every probe has a row for each prompt of the clean run.
        self._origins = torch.arange(clean.n, device=clean.ids.device).repeat(len(factors))

    def hooks(self) -> Iterator[RemovableHandle]:
        for layer in self._layers[self._probed :]:
            enter = in_this_thread(partial(self._enter, layer.index))
            yield layer.layer.register_forward_pre_hook(enter, with_kwargs=True)
            if layer.index in (self._probed, len(self._layers) - 1):
                yield from self._around_attention(layer)

    def _enter(
        self, index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Give a layer the clean run's inputs, above the probed one all but the hidden states."""
        self._attention_is_done = False
        clean_inputs = self._clean.layer_inputs[index]
        if index == self._probed:
            return clean_inputs
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = hidden.reshape(-1, self._clean.n_positions, hidden.shape[-1])  # [m * n, pos, ...]
        new_args, new_kwargs = copy_rows(clean_inputs, self._clean.n, self._origins)
        if args:
            return (hidden, *new_args[1:]), new_kwargs
        return new_args, {**new_kwargs, "hidden_states": hidden}

    def _around_attention(self, layer: AttentionLayer) -> Iterator[RemovableHandle]:
        at_projection, into_child = (
            in_this_thread(partial(hook, layer.index))
            for hook in (self._at_projection, self._into_child)
        )
        yield layer.projection.register_forward_pre_hook(at_projection)
        for child in layer.layer.children():
            if child is not layer.attention:
                yield child.register_forward_pre_hook(into_child)
                if layer.index == self._probed:
                    yield child.register_forward_hook(in_this_thread(self._out_of_child))

    def _at_projection(
        self, index: int, _module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Scale the heads, in copies of z; in the last layer keep only the last positions."""
        self._attention_is_done = True
        z = args[0]  # [n or m * n, pos, n_heads * d_head]
        if index == len(self._layers) - 1:
            z = self._last_positions(z)
        if index == self._probed:
            alphas = self._factors[:, None, None] - 1  # [m, 1, 1, n_heads]
            z = add_scaled(z, z, alphas)  # [m, n, pos, n_heads * d_head]
        return (z, *args[1:])

    def _into_child(
        self, index: int, _module: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """Give modules after the attention [rows, pos, d_model], one pos in the last layer."""
        if not self._attention_is_done or not args or args[0].dim() < 3:
            return None
        hidden = args[0].reshape(-1, *args[0].shape[-2:])
        if index == len(self._layers) - 1:
            hidden = self._last_positions(hidden)
        return (hidden, *args[1:])

    def _out_of_child(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Restore the probes' dimension, [m, n, pos, d_model]: the residual stream broadcasts."""
        if not self._attention_is_done:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.dim() == 3 and len(hidden) == len(self._factors) * self._clean.n:
            hidden = hidden.view(len(self._factors), self._clean.n, *hidden.shape[1:])
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _last_positions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Keep each prompt's last position; hidden: [n or m * n, pos or 1, width]."""
        if hidden.shape[1] == 1:
            return hidden
        last = self._clean.last.repeat(len(hidden) // self._clean.n)
        return hidden[torch.arange(len(hidden), device=hidden.device), last].unsqueeze(1)


@torch.inference_mode()
def score_heads(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    targets: dict[Target, tuple[ConflictType, ...]],
    alphas_plus: Sequence[float],
    alphas_minus: Sequence[float],
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadScores]:
    """Return the scores of every head for each target over its conflict types.

    The examples all have these conflict types. The alphas of the + scores are above 0, those of the
    - scores below; without any, these scores are NaN. Changes by conflict type and layer are kept
    in `unfinished`, and not computed again.
    """
    loaded, unfinished = model.loaded, unfinished or Unfinished()
    alphas = torch.tensor([*alphas_plus, *alphas_minus], device=loaded.device)
    wanted = [t for t in CONFLICT_TYPES if any(t in types for types in targets.values())]
    n_probes = sum(layer.n_heads for layer in loaded.layout.layers) * len(alphas)
    shape = (loaded.layout.n_layers, loaded.layout.n_heads, len(alphas), len(targets))
    # Heads that a layer does not have change nothing.
    changes = {t: torch.zeros(shape) for t in wanted}
    with loaded.turn, progress("scoring heads", n_probes * len(wanted)) as advance:
        for conflict_type, table in changes.items():
            prompts = [scored_prompt(model, example, conflict_type) for example in examples]
            prober = Prober(loaded, CleanRun(loaded, [prompt.ids for prompt in prompts]))
            tokens = torch.tensor(
                [[p.answer_tokens[t] for t in targets] for p in prompts], device=loaded.device
            )  # [n, target]
            for layer in loaded.layout.layers:
                key, n_heads = f"probes {conflict_type} {layer.index}", layer.n_heads
                if (kept := unfinished.get(key)) is None:
                    kept = _changes(prober, layer, alphas, tokens, advance).tolist()
                    unfinished.put(key, kept)
                else:
                    advance(n_heads * len(alphas))
                table[layer.index, :n_heads] = torch.tensor(kept).view(n_heads, *shape[2:])
    scores = {}
    for i, (target, types) in enumerate(targets.items()):
        of_target = torch.stack([changes[t][..., i] for t in types])  # [type, layer, head, alpha]
        plus, minus = torch.split(of_target, [len(alphas_plus), len(alphas_minus)], -1)
        scores[target] = HeadScores(
            target=target, conflict_types=types, plus=plus.mean(-1), minus=minus.mean(-1)
        )
    return scores


def _changes(
    prober: Prober,
    layer: AttentionLayer,
    alphas: torch.Tensor,
    tokens: torch.Tensor,
    advance: Advance,
) -> torch.Tensor:
    """Return the mean change of p of the tokens, [n, target], by each probe: [m, target].

    The probes are those of each head of a layer with each alpha; heads vary slowest.
    """
    one_hot = torch.eye(layer.n_heads, device=alphas.device)[:, None, :]  # [head probed, 1, head]
    factors = (1 + alphas[None, :, None] * one_hot).flatten(0, 1)  # [m, head]
    found = []
    for chunk in torch.split(factors, prober.n_at_once):
        # An unscaled row beside them: half precision rounds by a forward's shape.
        probes = torch.cat([torch.ones_like(chunk[:1]), chunk])
        p = prober.logits(layer.index, probes).softmax(-1)  # [1 + m, n, vocabulary]
        p = p.gather(2, tokens.expand(len(probes), -1, -1))
        found.append((p[1:] - p[:1]).mean(1))
        advance(len(chunk))
    return torch.cat(found)
