"""The model classes: vLLM's transformers backend, with companions in the window.

They replace vLLM's own classes of the same names, and do what these do unless layers are prepared
(`juice.engine.vllm.plugin`). In the layers of the window every token runs twice, steered and clean.

Before the window's first layer the tokens [1, n, width] become [1, n + k, width]: the tokens of the
batch, then companions, of all of them or of some (`juice.engine.vllm.gather`). Behind its last
layer the first n go on. Projections, norms and MLPs see n + k tokens and know nothing. Attention
sends the companions through a layer of their own, a shadow: vLLM allocates a cache for it under the
same block tables, so that scheduler, block manager and sampler know nothing either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models import transformers as backend
from vllm.model_executor.models.transformers import vllm_attention_forward
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR, Base
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from juice.engine.vllm.arguments import Layers
from juice.engine.vllm.gather import Gathering, choose, may_gather, sources
from juice.engine.vllm.patches import score_both, take_back_by_state
from juice.engine.vllm.processes import check_config, told
from juice.engine.vllm.slots import SteeredState, capture_both
from juice.engine.vllm.state import CLEAN, OWN, RowWriter, Table
from juice.engine.vllm.twin import has_twin, twin_of
from juice.errors import UnsupportedModelError


class Shadow(nn.Module):
    """Holds the companions' attention layer under the name that vLLM's forward looks for."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.attn = attn


class Companions:
    """The hooks of one rank's layers.

    A step scales heads where it is `steering`, and runs companions where it is `doubled`. `dense`,
    where it is set, attends in place of vLLM's layers.

    Args:
        table: The coefficients of the batch's rows.
        window: The layers that have companions.
        rank: This rank, among those that share the heads.
        of_some: Whether some tokens of a step may have companions, and others none.
    """

    def __init__(self, table: Table, window: range, rank: int, *, of_some: bool) -> None:
        self.table = table
        self._window = window
        self._rank = rank
        self.of_some = of_some
        self._sources: torch.Tensor | None = None  # the tokens that have some; None: all
        self.steering, self.doubled = True, bool(window)
        self.dense: Any = None
        self.projections: dict[int, Any] = {}
        self._head_widths: dict[int, int] = {}

    def install(self, layers: dict[int, nn.Module], projections: dict[int, Any]) -> None:
        """Hook the decoder layers of the window that this rank holds, and all projections."""
        self.projections = projections
        n_heads = self.table.n_heads
        self._head_widths = {
            i: projection.input_size // n_heads for i, projection in projections.items()
        }
        for index, projection in projections.items():
            projection.register_forward_pre_hook(self._steer(index))
        for index, layer in layers.items():
            layer.register_forward_pre_hook(
                self._enter if index == min(layers) else self._follow, with_kwargs=True
            )
        if layers:
            layers[max(layers)].register_forward_hook(self._leave)

    def _enter(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.doubled:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        n = hidden.shape[1]
        self._sources = sources(hidden) if self.of_some else None
        return self._with_companions(args, n), self._with_companions(kwargs, n)

    def _follow(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Give companions to what goes with the hidden states, which have theirs already."""
        if not self.doubled:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        n = self.n_of(hidden.shape[1])
        named = {} if args else {"hidden_states": hidden}
        others = {key: value for key, value in kwargs.items() if key not in named}
        return (
            (*args[:1], *self._with_companions(args[1:], n)),
            {**self._with_companions(others, n), **named},
        )

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if not self.doubled:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = hidden[:, : self.n_of(hidden.shape[1])]
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def n_of(self, n_all: int) -> int:
        """Return the number of the step's tokens from that of all with companions."""
        return n_all // 2 if self._sources is None else n_all - self._sources.shape[0]

    def _with_companions(self, value: Any, n: int) -> Any:
        """Add companions to every tensor [.., n, ..] whose second dimension is n, the tokens."""
        if isinstance(value, torch.Tensor):
            if value.dim() < 2 or value.shape[1] != n:
                return value
            at = self._sources
            return torch.cat([value, value if at is None else value.index_select(1, at)], 1)
        if isinstance(value, tuple | list):
            return type(value)(self._with_companions(item, n) for item in value)
        if isinstance(value, dict):
            return {key: self._with_companions(item, n) for key, item in value.items()}
        return value

    def by_head(self, index: int, z: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return a layer's z, [..., heads * width], as [..., heads, width], and which heads it has.

        A rank has its own part of them, or all where its projection splits z itself.
        """
        parts = z.unflatten(-1, (-1, self._head_widths[index]))
        n_here = parts.shape[-2]
        first = 0 if n_here == self.table.n_heads else self._rank * n_here
        return parts, slice(first, first + n_here)

    def _steer(self, index: int) -> Any:
        table, at = self.table, self.table.layers.index(index)

        def steer(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not self.steering:
                return None
            z, has_companions = args[0], self.doubled and index in self._window
            parts, heads = self.by_head(index, z)
            n = self.n_of(z.shape[-2]) if has_companions else z.shape[-2]
            here = table.coefficients[at][:, table.row_of_token[:n], heads]  # [2, token, head]
            here = here * table.factor_of_token[:n, None]
            main, clean = parts[..., :n, :, :], parts[..., n:, :, :]
            steered = main + scaled(main, here[OWN, ..., None])
            if not has_companions:
                return (steered.to(z.dtype).flatten(-2), *args[1:])
            if self._sources is None:
                steered = steered + scaled(clean, here[CLEAN, ..., None])
            else:
                by = here[CLEAN].index_select(0, self._sources)
                steered = steered.index_add(-3, self._sources, scaled(clean, by[..., None]))
            new = steered.to(z.dtype).flatten(-2)
            return (torch.cat([new, z[..., n:, :]], -2), *args[1:])

        return steer


def scaled(z: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Return z, [..., tokens, heads, d_head], times its coefficients, float32 [tokens, heads, 1].

    Where one is zero, z is not read: the companion of an unsteered token may hold anything.
    """
    return torch.where(by == 0, 0, by * z)


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: tokens through the layer's own cache, companions through its shadow's.

    The function of the attention interface; query, key and value are [1, heads, tokens, d_head],
    its result is [1, tokens, heads, d_head].
    """
    companions, shadow, n_heads, n_tokens = module.companions, module.shadow, *query.shape[1:3]
    if companions.dense is not None:
        z = companions.dense(module, query, key, value)
    elif shadow is None or not companions.doubled:
        z, _ = vllm_attention_forward(module, query, key, value, attention_mask, **kwargs)
    else:
        n = companions.n_of(n_tokens)
        own, _ = vllm_attention_forward(
            module, query[:, :, :n], key[:, :, :n], value[:, :, :n], None, **kwargs
        )
        z = torch.cat([own, _companions_z(shadow.attn, query, key, value, n)])
    return z.view(1, n_tokens, n_heads, -1), None  # some models want the heads apart


def _companions_z(
    attn: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, n: int
) -> torch.Tensor:
    """Return z of all after the first n tokens, [companions, heads * d_value].

    How many there are is not known where it is compiled. Values that are narrower than keys
    (expanded latent attention) are padded, and z is cut, as in `vllm_attention_forward`.
    """
    # [companions, heads, d_head], with fewer heads of keys and values where these share them
    query, key, value = (x[0, :, n:].transpose(0, 1) for x in (query, key, value))
    width, value_width = query.shape[-1], value.shape[-1]
    is_padded = value_width < width
    if is_padded:
        value = pad(value, (0, width - value_width))
    z = attn(*(x.flatten(1) for x in (query, key, value)))
    return z.unflatten(-1, (-1, width))[..., :value_width].flatten(1) if is_padded else z


class Steered(Base):
    """Steering, as a mixin of the classes of vLLM's transformers backend."""

    companions: Companions
    rows: Sequence[int]  # of the table, for each request of the step

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with told():
            prepared = Layers.of(vllm_config)
            self.is_prepared, self.layers = prepared is not None, prepared or Layers()
            if self.is_prepared:
                check_config(vllm_config)
                score_both()
                if vllm_config.device_config.device_type == "cpu":
                    take_back_by_state()
            if self.layers.window:
                # It has room for a step's tokens, and the window runs more.
                vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False
            self.n_runs = 2
            self._gathering = Gathering(vllm_config)
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.is_compiled = not getattr(self.model, "do_not_compile", True)
            self.has_twin = self.is_compiled and has_twin(vllm_config, self.layers)
            # Breakable graphs are replayed by a description that says nothing of companions.
            chooses = self.has_twin or not (self.is_compiled or is_breakable_cudagraph_enabled())
            self.may_rest = bool(self.layers.window) and chooses
            self._twin: tuple[nn.Module, ...] = ()  # no module of this one: it shares all of them
            self.compiled_in: set[str] = set()  # folders

    def recursive_replace(self) -> None:
        """Let vLLM put its layers in place of transformers'; those of GPT-2 it does not know."""
        self.transposed = _replace_conv1d(self.model)
        super().recursive_replace()

    def load_weights(self, weights: Any) -> set[str]:
        """Load the weights; those of GPT-2's projections are stored transposed."""
        loaded = super().load_weights(
            (name, weight.t().contiguous() if _module_name(name) in self.transposed else weight)
            for name, weight in weights
        )
        for module in self.model.modules():
            if (shadow := getattr(module, "shadow", None)) is not None:
                share_scales(module.attn, shadow.attn)
        return loaded

    def _create_hf_to_vllm_mapper(self) -> None:
        """Skip whole names alone: vLLM takes GPT-2's `c_attn.bias` for its mask `attn.bias`."""
        skipped = self.model._keys_to_ignore_on_load_unexpected or []
        self.model._keys_to_ignore_on_load_unexpected = [rf"(?<!\w){name}" for name in skipped]
        super()._create_hf_to_vllm_mapper()

    def _get_attn_cls(self) -> Any:
        """Return the maker of attention layers, which remembers the arguments of each."""
        cls = super()._get_attn_cls()
        if not self.is_prepared:
            return cls
        if cls is not Attention:
            remedy = (
                "start vLLM with VLLM_MLA_DISABLE=1"
                if cls is MLAAttention
                else "use juice's own engine"
            )
            raise UnsupportedModelError(
                f"{type(self.model).__name__} attends through vLLM's {cls.__name__}, which JuICE "
                f"does not steer: {remedy}"
            )

        def make(**arguments: Any) -> nn.Module:
            self._arguments.append(arguments)
            return cls(**arguments)

        return make

    def _create_attention_instances(self, prefix: str = "") -> None:
        """Create the attention layers, a shadow of each in the window, and the hooks."""
        self._arguments: list[dict[str, Any]] = []
        super()._create_attention_instances(prefix)
        if not self.is_prepared:
            return
        ALL_ATTENTION_FUNCTIONS.register("vllm", attention)
        scheduler = self.vllm_config.scheduler_config
        self.table = Table(
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
            self.layers.steered,
            self.text_config.num_attention_heads,
            torch.device(self.device_config.device),
        )
        for name, tensor in vars(self.table).items():
            if isinstance(tensor, torch.Tensor):  # what sleeps comes back where it is a buffer
                self.register_buffer(f"juice_{name.strip('_')}", tensor, persistent=False)
        self.companions = Companions(
            self.table,
            self.layers.window,
            self.tp_group.rank_in_group,
            of_some=may_gather(self.vllm_config, self.layers),
        )
        RowWriter.table = self.table
        layers, projections = {}, {}
        for arguments in self._arguments:
            name = arguments["prefix"].removeprefix(f"{prefix}." if prefix else "")
            module = self.get_submodule(name.removesuffix(f".{VLLM_ATTN_ATTR}"))
            module.companions, module.shadow = self.companions, None
            module.attention_arguments = arguments
            if module.layer_idx in self.layers.steered:
                projections[module.layer_idx] = _output_projection(module)
            if module.layer_idx not in self.layers.window:
                continue
            shadowed = maybe_prefix(prefix, name.removesuffix(VLLM_ATTN_ATTR)) + "shadow.attn"
            module.shadow = Shadow(Attention(**{**arguments, "prefix": shadowed}))
            layers[module.layer_idx] = self._layer_of(module)
        check_rank(layers, self.layers.window, self.pp_group.world_size)
        self.companions.install(layers, projections)

    def _layer_of(self, attention_module: nn.Module) -> nn.Module:
        """Return the decoder layer that holds an attention module."""
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == (
                self.text_config.num_hidden_layers
            ):
                for layer in module:
                    if any(part is attention_module for part in layer.modules()):
                        return layer
        raise UnsupportedModelError(f"{type(self.model).__name__} has no list of its layers")

    def get_model_state_cls(self) -> type[Any]:
        """Return the state that the V2 model runner keeps of the model."""
        if not self.is_prepared:
            return DefaultModelState
        capture_both()
        return SteeredState

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """Note which row each token belongs to, and run the model.

        `input_ids` and `positions` are int64 [tokens]; the hidden states are [tokens, width].
        """
        arguments = (input_ids, positions, intermediate_tensors, inputs_embeds)
        if not self.layers.steered or self.companions.dense is not None:
            return super().forward(*arguments, **kwargs)
        compilation, metadata = self.vllm_config.compilation_config, None
        if is_forward_context_available():
            context = get_forward_context()
            metadata = context.attn_metadata
            if self.layers.window:  # experts would look for as many tokens as the window runs
                context.is_padding = None
        if not metadata:
            self.table.clear()
            choose(torch.arange(max(1, len(positions) // 2)))  # some of them, and not all
            # A step of nobody is a dummy: it warms up all that may run.
            for n_runs in (1, 2) if self.has_twin else (2,):
                with self._running(n_runs):
                    output = super().forward(*arguments, **kwargs)
                self.compiled_in |= {compilation.local_cache_dir} - {"", None}
            return output
        if not self.vllm_config.use_v2_model_runner:
            starts = starts_of(metadata)
            self.table.place(starts, positions)
            self.rows = range(len(starts) - 1)
            # What is captured of whole steps runs for whoever is in a later one.
            is_replayed = compilation.cudagraph_mode.has_full_cudagraphs()
            runs = [2] if is_replayed else [self.table.n_runs[row] for row in self.rows]
            self.n_runs = max(runs, default=0)
        if self.n_runs > 1 and self.companions.of_some:
            in_two = [i for i, row in enumerate(self.rows) if self.table.n_runs[row] > 1]
            self._gathering.narrow(get_forward_context(), in_two)
        with self._running(self.n_runs):
            return super().forward(*arguments, **kwargs)

    @contextmanager
    def _running(self, n_runs: int) -> Iterator[None]:
        """Do within what a step's requests take: none is steered (0), in one run, or in two.

        What is compiled is the same in all steps, so the twin is for those without companions.
        """
        companions, decoder = self.companions, self.model
        companions.steering = self.is_compiled or n_runs > 0
        rests = n_runs < 2 and self.may_rest
        companions.doubled = bool(self.layers.window) and not rests
        if self.has_twin and rests:
            self._twin = self._twin or (twin_of(decoder, self.vllm_config),)
            self._modules["model"] = self._twin[0]
        try:
            yield
        finally:
            self._modules["model"] = decoder


class SteeredCausalLM(Steered, backend.TransformersForCausalLM):
    """A dense decoder."""


class SteeredMoECausalLM(Steered, backend.TransformersMoEForCausalLM):
    """A decoder with a mixture of experts."""


class NotSteered:
    """A mixin that refuses to steer a class of vLLM's transformers backend."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with told():
            if (layers := Layers.of(vllm_config)) is not None and layers.steered:
                raise UnsupportedModelError(
                    "the model takes images or sound, with which steering in vLLM was not checked: "
                    "serve its text model, or use juice's own engine"
                )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]


class MultiModalCausalLM(NotSteered, backend.TransformersMultiModalForCausalLM):
    """A decoder that takes more than text."""


class MultiModalMoECausalLM(NotSteered, backend.TransformersMultiModalMoEForCausalLM):
    """One with a mixture of experts."""


def check_rank(layers: Iterable[int], window: range, n_stages: int) -> None:
    """Raise UnsupportedModelError where the layers of the window lie in several pipeline stages.

    Between stages go the hidden states of the batch's tokens alone, not those of companions. A
    plain `vllm serve` is asked here, where each rank knows its layers.
    """
    here = sorted(layers)
    if n_stages > 1 and 0 < len(here) < len(window):
        raise UnsupportedModelError(
            f"the window is layers {window[0]} to {window[-1]}, but a pipeline stage has only "
            f"{here[0]} to {here[-1]} of them: choose head sets within one stage, other stages "
            "with VLLM_PP_LAYER_PARTITION, or tensor instead of pipeline parallelism"
        )


def share_scales(attn: nn.Module, shadow: nn.Module) -> None:
    """Give a shadow the scales of quantised keys and values that were loaded for its layer."""
    for name in ("q_scale", "k_scale", "v_scale", "prob_scale"):
        if isinstance(scale := getattr(attn, name, None), nn.Parameter):
            getattr(shadow, name).data.copy_(scale.data)


def starts_of(metadata: dict[str, Any]) -> torch.Tensor:
    """Return the start of each request's tokens in a step, int [requests + 1].

    Raises UnsupportedModelError where the attention of the layers does not tell.
    """
    of_one = next(iter(metadata.values()))
    starts: torch.Tensor | None = getattr(of_one, "query_start_loc", None)
    if starts is None:
        with told():
            raise UnsupportedModelError(
                f"under vLLM's V1 model runner, attention with {type(of_one).__name__} does not "
                "say where requests begin: choose another (--vllm-arg "
                "attention_backend=TRITON_ATTN), or V2 (VLLM_USE_V2_MODEL_RUNNER=1)"
            )
    return starts


def _output_projection(attention_module: nn.Module) -> nn.Module:
    for name in ("o_proj", "out_proj", "c_proj", "dense"):
        if (projection := getattr(attention_module, name, None)) is not None:
            return projection
    raise UnsupportedModelError(
        f"{type(attention_module).__name__} has no output projection that JuICE knows"
    )


def _module_name(weight_name: str) -> str:
    return weight_name.removesuffix(".weight").removeprefix("transformer.").removeprefix("model.")


def _replace_conv1d(model: nn.Module) -> frozenset[str]:
    """Put a Linear in place of every Conv1D, and return their names."""
    convolutions = {
        name: module for name, module in model.named_modules() if isinstance(module, Conv1D)
    }
    for name, module in convolutions.items():
        parent, _, child = name.rpartition(".")
        n_in, n_out = module.weight.shape
        linear = nn.Linear(n_in, n_out, dtype=module.weight.dtype, device="meta")
        setattr(model.get_submodule(parent), child, linear)
    return frozenset(convolutions)
