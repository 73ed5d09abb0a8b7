"""Head scores by attribution: derivatives of the lead of the target's answer by each head.

    S+[j][l, h] = mean over examples of  d/dc ( log p(target's answer) - log p(other answer) )
    S-[j][l, h] = -S+[j][l, h]

for every conflict type j, layer l and head h, where c is the head's coefficient in the dual run, at
c = 0, and p the probability of an answer's first token at the prompt's end. One forward and one
backward of each prompt give all heads, for both targets: the context's scores are memory's with the
other sign (docs/method.md, "Attribution").

`DualRun` is the dual run of prompts outside the engine, read or differentiated at their ends: one
clean run serves any number of steered ones. `gradients` differentiates any objective by all heads'
coefficients at once; at zero coefficients the clean run and the steered run are one. Only the
coefficients need gradients, so what is kept for the backward pass are activations; of a large model
only the layers' inputs, and the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from juice.data.example import ConflictExample, conflict_types
from juice.errors import JuiceError, UnsupportedModelError
from juice.formula import ConflictType, Method, Target, add_scaled
from juice.head_set.scores import HeadScores
from juice.identification.examples import scored_prompt
from juice.identification.task import Unfinished
from juice.model.definition import PaddedPrompts
from juice.model.layout import AttentionLayer
from juice.model.loaded import LoadedModel
from juice.model.steering_hooks import at_z, this_thread, working_for
from juice.progress import Advance, Progress, silent
from juice.steered_model import SteeredModel

MAX_TOKENS, MAX_PADDING = 2048, 128  # of a micro-batch
N_LARGE, N_SHORT = 4_000_000_000, 192  # parameters, positions
# Half precision has no room for small derivatives: they are scaled on the way.
FP16_SCALE = 1024.0


def micro_batches(
    lengths: Sequence[int], switch: int | None, most: int | None = None
) -> list[list[int]]:
    """Group prompts of similar lengths: at most `most` tokens a group, and little padding.

    `most` counts padding, too; None: MAX_TOKENS. Padding costs as much as tokens: beyond
    MAX_PADDING another forward is cheaper.

    Prompts on both sides of `switch`, the length beyond which a model's positions change, stay
    apart: padding would put the shorter ones on the wrong side.
    """
    most = MAX_TOKENS if most is None else most
    groups, n_padding = list[list[int]](), 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        n_padding += longest - lengths[i]
        is_alike = switch is None or (longest > switch) == (lengths[i] > switch)
        has_room = groups and (len(groups[-1]) + 1) * longest <= most and n_padding <= MAX_PADDING
        if is_alike and has_room:
            groups[-1].append(i)
        else:
            groups.append([i])
            n_padding = 0
    return groups


class DualRun:
    """The runs of one micro-batch of prompts: the clean one, and steered ones.

    Args:
        loaded: The model.
        prompts: The tokens of each prompt.
        read_at: The positions of each prompt at which it is read; None: its end.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[tuple[int, ...]],
        read_at: Sequence[Iterable[int]] | None = None,
    ) -> None:
        self._loaded = loaded
        self._clean: dict[int, torch.Tensor] | None = None
        self._prompts = PaddedPrompts(loaded, prompts, read_at)

    @property
    def n_bytes(self) -> int:
        """The bytes of the clean z that is kept."""
        return sum(z.nbytes for z in (self._clean or {}).values())

    @property
    def is_recorded(self) -> bool:
        """Whether the clean z is kept."""
        return self._clean is not None

    def record(self) -> torch.Tensor:
        """Run clean, keep z, and return the logits as `logits` does.

        Until then a run's own z, held constant, is the clean one: the two are equal where all
        coefficients are zero.
        """
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: AttentionLayer, z: torch.Tensor) -> None:
            kept[layer.index] = z  # [prompts, pos, n_heads * d_head]

        with torch.no_grad(), at_z(self._loaded.layout.layers, keep):
            logits = self.logits()
        self._clean = kept
        return logits

    def forget(self) -> None:
        """Drop what was recorded."""
        self._clean = None

    @contextmanager
    def steered(self, coefficients: torch.Tensor, method: Method) -> Iterator[None]:
        """Steer every forward within: add the clean z (`juice`), or scale the run's own.

        `coefficients` is float32 [n_layers, n_heads], or [prompts, n_layers, n_heads].
        """

        def add(layer: AttentionLayer, z: torch.Tensor) -> torch.Tensor:
            source = z  # [prompts, pos, n_heads * d_head]
            if method == "juice":
                source = z.detach() if self._clean is None else self._clean[layer.index]
            return add_scaled(z, source, coefficients[..., layer.index, None, : layer.n_heads])

        with at_z(self._loaded.layout.layers, add), short_attention(self._prompts.ids):
            yield

    def logits(self) -> torch.Tensor:
        """Return the logits where the prompts are read, float32 [places, vocabulary]."""
        return self._prompts.logits()


def short_attention(ids: torch.Tensor) -> AbstractContextManager[None]:
    """Compute attention within in steps, where that has the faster derivatives.

    Those of PyTorch's fused kernel for CPUs take several times as long for short prompts, and the
    steps need memory for every pair of positions. `ids` are the prompts', [prompts, pos].
    """
    if torch.is_grad_enabled() and ids.device.type == "cpu" and ids.shape[1] <= N_SHORT:
        return sdpa_kernel(SDPBackend.MATH)
    return nullcontext()


# From logits, float32 [prompts, vocabulary], and which prompts they are of, to a value for each.
Objective = Callable[[torch.Tensor, list[int]], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Gradients:
    """An objective and its derivatives by the coefficient of each head; 0 for one not there."""

    values: torch.Tensor  # float32 [prompts], on the CPU
    by_head: torch.Tensor  # float32 [prompts, n_layers, n_heads], on the CPU


def gradients(
    loaded: LoadedModel,
    prompts: Sequence[tuple[int, ...]],
    objective: Objective,
    coefficients: torch.Tensor | None = None,
    *,
    method: Method = "juice",
    advance: Callable[[int], None] = lambda _: None,
) -> Gradients:
    """Differentiate an objective of the steered logits at the end of each prompt.

    Where is given by coefficients, float32 [n_layers, n_heads]; None: at zero. Raises
    UnsupportedModelError where gradients do not pass through the model.
    """
    shape = (loaded.layout.n_layers, loaded.layout.n_heads)
    at = torch.zeros(shape) if coefficients is None else coefficients.detach().cpu()
    scale = FP16_SCALE if loaded.dtype == torch.float16 else 1.0
    with differentiable(loaded):
        values, by_head = torch.zeros(len(prompts)), torch.zeros(len(prompts), *shape)
        for batch in micro_batches([len(prompt) for prompt in prompts], loaded.rope_switch):
            run = DualRun(loaded, [prompts[i] for i in batch])
            # A row for each prompt, so that each has derivatives of its own.
            rows = at.repeat(len(batch), 1, 1).to(loaded.device).requires_grad_()
            with loaded.turn:
                if at.any() and method == "juice":
                    run.record()
                with run.steered(rows, method):  # also while layers are computed again
                    objectives = objective(run.logits(), batch)
                    backward(loaded, objectives.sum() * scale)
            assert rows.grad is not None
            values[batch] = objectives.detach().float().cpu()
            by_head[batch] = rows.grad.cpu() / scale
            advance(len(batch))
    return Gradients(values, by_head)


def backward(loaded: LoadedModel, value: torch.Tensor) -> None:
    """Add an objective's derivatives to its leaves.

    Raises UnsupportedModelError where gradients do not pass through the model.
    """
    try:
        value.backward()  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(loaded.model).__name__
        quantized = f" ({loaded.quantization})" if loaded.quantization else ""
        raise UnsupportedModelError(
            f"gradients do not pass through {name}{quantized}: {error}; "
            "find heads without them, with --method probe"
        ) from error


@contextmanager
def differentiable(loaded: LoadedModel) -> Iterator[None]:
    """Let gradients pass through a model, but not to its weights.

    Raises UnsupportedModelError for weights that are elsewhere, and JuiceError where there is not
    enough memory for what is done within.
    """
    model = loaded.model
    if any(p.device.type == "meta" for p in model.parameters()):
        raise UnsupportedModelError(
            "parts of the model are fetched for each forward, and gradients need all of it at "
            "once; use a larger device, or --method probe"
        )
    wanted = [p for p in model.parameters() if p.requires_grad]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for parameter in wanted:
            parameter.requires_grad_(requires_grad=False)
            stack.callback(parameter.requires_grad_)
        # What a generation computed lazily, such as rotary frequencies, cannot be differentiated.
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_inference():
                    module._buffers[name] = buffer.clone()
        if sum(p.numel() for p in model.parameters()) > N_LARGE:
            stack.enter_context(checkpointed(loaded))
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise JuiceError(
                "there is not enough memory for the gradients; load the model with --dtype "
                "bfloat16, give shorter examples, or find heads without gradients, with --method "
                "probe"
            ) from error


@contextmanager
def checkpointed(loaded: LoadedModel) -> Iterator[None]:
    """Keep only the layers' inputs for the backward pass, where the layers can do so.

    On a GPU another thread computes that, in which the layers run again, and are steered again.
    """
    layers, thread = [s.layer for s in loaded.layout.layers], this_thread()
    flags: dict[str, Any] = {
        "gradient_checkpointing": True,
        "_gradient_checkpointing_func": partial(
            checkpoint,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), working_for(thread)),
        ),
        # The layer's own flag, not its children's: nothing is dropped out.
        "training": True,
    }
    able = [layer for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
    before = [
        {name: vars(layer)[name] for name in flags.keys() & vars(layer).keys()} for layer in able
    ]
    try:
        for layer in able:
            vars(layer).update(flags)
        yield
    finally:
        for layer, flags_before in zip(able, before, strict=True):
            for name in flags:
                del vars(layer)[name]
            vars(layer).update(flags_before)


def attribute_heads(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    *,
    targets: dict[Target, tuple[ConflictType, ...]],
    progress: Progress = silent,
    unfinished: Unfinished | None = None,
) -> dict[Target, HeadScores]:
    """Return the scores of every head for each target over its conflict types.

    The examples all have these conflict types. Derivatives by conflict type are kept in
    `unfinished`, and not computed again. Raises UnsupportedModelError where gradients do not pass
    through the model.
    """
    wanted = [t for t in conflict_types(examples) if any(t in types for types in targets.values())]
    unfinished = unfinished or Unfinished()
    slopes: dict[str, torch.Tensor] = {}
    with progress("scoring heads", len(wanted) * len(examples)) as advance:
        for conflict_type in wanted:
            key = f"attribution {conflict_type}"
            if (kept := unfinished.get(key)) is None:
                kept = _mean_slope(model, examples, conflict_type, advance).tolist()
                unfinished.put(key, kept)
            else:
                advance(len(examples))
            slopes[conflict_type] = torch.tensor(kept)  # [n_layers, n_heads]
    scores: dict[Target, HeadScores] = {}
    for target, types in targets.items():
        of_memory = torch.stack([slopes[t] for t in types])
        plus = of_memory if target == "parametric" else -of_memory
        scores[target] = HeadScores(
            target=target, conflict_types=types, plus=plus, minus=-plus, kind="attribution"
        )
    return scores


def _mean_slope(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    conflict_type: ConflictType,
    advance: Advance,
) -> torch.Tensor:
    """Return the derivatives of memory's lead by each head, float32 [n_layers, n_heads]."""
    prompts = [scored_prompt(model, e, conflict_type) for e in examples]
    pairs = torch.tensor(
        [[p.answer_tokens["parametric"], p.answer_tokens["context"]] for p in prompts]
    )

    def lead(logits: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        ahead, behind = logits.gather(1, pairs[chosen].to(logits.device)).unbind(1)
        return ahead - behind

    ids = [prompt.ids for prompt in prompts]
    return gradients(model.loaded, ids, lead, advance=advance).by_head.mean(0)
