"""What a model's modules and configuration say: its projections, heads and sliding window."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PretrainedConfig,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import juice
from juice.engine.request import Request
from juice.model.layout import resolve
from juice.model.masks import attention_pattern
from tests.support import oracle, tiny


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_resolver_finds_the_projections_and_their_heads(shape: str) -> None:
    network = tiny.tiny_model(shape)
    layout = resolve(network)
    assert [layer.projection for layer in layout.layers] == oracle.projections(network)
    assert {(layer.n_heads, layer.d_head) for layer in layout.layers} == {
        (tiny.N_HEADS, 12 if shape == "gemma2" else 8)
    }


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_the_partition_of_z_into_heads_is_the_attention_functions_own(shape: str) -> None:
    """A sum over heads proves nothing; the attention function's [rows, pos, head, d_head] does."""
    network = tiny.tiny_model(shape)
    layout = resolve(network)
    seen = []
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(*args, **kwargs):
        kwargs.pop("softcap", None)
        output = function(*args, **kwargs)
        seen.append(output[0])
        return output

    ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    network.config._attn_implementation = "spy"
    z = []
    for layer in layout.layers:
        layer.projection.register_forward_pre_hook(lambda _m, args: z.append(args[0]))
    network(torch.arange(1, 12)[None], attention_mask=torch.zeros(1, 1, 11, 11))
    for layer, each, ours in zip(layout.layers, seen, z, strict=True):
        assert each.shape == (1, 11, layer.n_heads, layer.d_head)
        assert torch.equal(ours.view(each.shape), each)


def test_a_sliding_window_that_the_models_code_ignores_is_not_applied() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=tiny.VOCAB_SIZE, sliding_window=4, **sizes)
    ).eval()
    ids = list(range(1, 30))
    expected = oracle.generate(network, ids, {}, 5)[0]
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    request = Request.of(prompt_ids=tuple(ids), max_tokens=5, ignore_eos=True)
    assert list(model.engine.generate([request])[0].token_ids) == expected


def seeing(text: PretrainedConfig, n_seeing_layers: int) -> LlavaForConditionalGeneration:
    """Return a tiny model that sees, with so many layers that do, and a text decoder."""
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=n_seeing_layers,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=16,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=299)
    return tiny.with_large_weights(LlavaForConditionalGeneration(config)).eval()


def test_the_decoder_of_a_model_that_sees_is_found_beside_as_many_layers_that_see() -> None:
    text = tiny.tiny_model("llama").config
    network = seeing(text, text.num_hidden_layers)
    layers = network.get_decoder().layers
    assert [one.layer for one in resolve(network).layers] == list(layers)


def test_the_sliding_window_of_a_decoder_within_another_model_is_its_own() -> None:
    """Kills: a look at the code of the outer model, which knows no windows."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    text = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=8)
    pattern = attention_pattern(seeing(text, 1))
    assert pattern is not None
    assert pattern.sliding_windows == {"sliding_attention": 8}
