"""The layout: the attention output projection of every decoder layer, found by structure.

z[l], the input of layer l's output projection, is [batch, pos, n_heads * d_head]: head h owns the
columns h * d_head ... (h + 1) * d_head. The resolver finds the decoder's ModuleList of
`num_hidden_layers` layers, the one attention module in each layer, and its last projection to the
model's width. It reads shapes from modules, never weights (which may be packed or offloaded). A
model it is not sure of is refused with UnsupportedModelError.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from juice.errors import UnsupportedModelError

PROJECTION_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "Wo")
# Attention whose heads are normalised together, paired or shared, so that a scaled z_h is not a
# scaled head output.
REFUSED_MODEL_TYPES = {
    "bitnet": "it normalises across heads before the output projection",
    "minimax": "its lightning attention normalises across heads before the output projection",
    "diffllama": "it subtracts paired heads",
    "rwkv": "it has no attention heads, whatever its modules are called",
    "zamba": "its layers share one attention",
    "zamba2": "its layers share one attention",
}


@dataclass(frozen=True)
class AttentionLayer:
    """One decoder layer: its attention, its output projection, and how z splits into heads."""

    index: int
    layer: nn.Module
    attention: nn.Module
    projection: nn.Module
    n_heads: int
    d_head: int


@dataclass(frozen=True)
class Layout:
    """The resolved model; `layers[l]` is decoder layer l, `output` the vocabulary projection."""

    layers: tuple[AttentionLayer, ...]
    output: nn.Module

    @property
    def n_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.layers)

    @property
    def n_heads(self) -> int:
        """The largest number of query heads in any layer."""
        return max(layer.n_heads for layer in self.layers)


def resolve(model: PreTrainedModel) -> Layout:
    """Find z in a causal language model; raises UnsupportedModelError with the reason."""
    config = text_config(model)
    name = type(model).__name__
    if reason := REFUSED_MODEL_TYPES.get(config.model_type):
        raise UnsupportedModelError(
            f"{name} cannot be steered exactly: {reason}; "
            "choose a model with ordinary attention heads"
        )
    output = model.get_output_embeddings()
    if output is None:
        raise UnsupportedModelError(
            f"{name} has no vocabulary projection; expected a causal language model"
        )
    decoder_layers = _decoder_layers(model, config)
    return Layout(
        tuple(_attention_layer(i, layer, config, name) for i, layer in enumerate(decoder_layers)),
        output,
    )


def text_config(model: PreTrainedModel) -> PretrainedConfig:
    """Return the configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def _decoder_layers(model: PreTrainedModel, config: PretrainedConfig) -> nn.ModuleList:
    n_layers = config.num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers]
    candidates = [m for m in lists if all(_attentions(layer) for layer in m)]
    # The tower of a model that sees or hears may have as many layers as its decoder.
    decoder = set(model.get_decoder().modules())
    candidates.sort(key=lambda m: m not in decoder)
    if not candidates:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {n_layers} layers with one attention module "
            "each: it has no attention heads in some layers (a state-space or hybrid model), "
            "or JuICE does not know its structure"
        )
    return candidates[0]


def _attentions(layer: nn.Module) -> list[nn.Module]:
    """Return the outermost attention modules of a layer."""
    attentions: list[nn.Module] = []
    for child in layer.children():
        is_attention = "attention" in type(child).__name__.lower() and _projections(child)
        attentions += [child] if is_attention else _attentions(child)
    return attentions


def _projections(attention: nn.Module) -> dict[str, nn.Module]:
    """Return the linear projections within an attention module, by name."""
    named = attention.named_modules()
    return {name.rsplit(".", 1)[-1]: m for name, m in named if name and features(m)}


def features(module: nn.Module) -> tuple[int, int] | None:
    """Return (in, out) of a linear projection without touching its weight; None for others."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        n_in, n_out = (getattr(module, name, None) for name in names)
        if isinstance(n_in, int) and isinstance(n_out, int):
            return n_in, n_out
    return None


def _attention_layer(
    index: int, layer: nn.Module, config: PretrainedConfig, name: str
) -> AttentionLayer:
    attentions = _attentions(layer)
    if len(attentions) != 1:
        raise UnsupportedModelError(
            f"{name} has {len(attentions)} attention modules in layer {index}; expected one"
        )
    attention = attentions[0]
    to_width = {
        n: m
        for n, m in _projections(attention).items()
        if (f := features(m)) and f[1] == config.hidden_size
    }
    named = [n for n in to_width if n in PROJECTION_NAMES]
    if not to_width:
        raise UnsupportedModelError(
            f"{name} has no projection to its width {config.hidden_size} in the attention of layer "
            f"{index}"
        )
    projection = to_width[named[-1] if named else list(to_width)[-1]]
    n_heads = count_heads(attention, config)
    n_in = (features(projection) or (0, 0))[0]
    if n_heads is None or n_in % n_heads:
        raise UnsupportedModelError(
            f"{name}: z of layer {index} has {n_in} features, "
            f"which do not split evenly into {n_heads} heads"
        )
    return AttentionLayer(index, layer, attention, projection, n_heads, n_in // n_heads)


def count_heads(attention: nn.Module, config: PretrainedConfig) -> int | None:
    """Return the number of query heads: the attention's own, else the configuration's."""
    for holder in (attention, config):
        for field in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            value = getattr(holder, field, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
