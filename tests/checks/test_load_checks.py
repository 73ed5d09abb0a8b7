"""Mistakes that would silently steer wrongly, each made on purpose: loading must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import juice
from juice.checks.at_load import exact_mode, verify
from juice.checks.heads import heads_to_check
from juice.engine.own.batch import Mode
from juice.engine.request import Request
from juice.errors import JuiceError, UnsupportedModelError, UsageError
from juice.loading import prepare
from juice.model import layout, masks
from juice.model import steering_hooks as hooks
from tests.support import oracle, tiny
from tests.support.architectures import build
from tests.support.mixed import TOLERANCE, steering
from tests.support.running import assert_completes

GROUPED = ("Llama", "Gemma 2", "Falcon (40B style)", "GPT-OSS")


def load(network: PreTrainedModel) -> juice.SteeredModel:
    return juice.load(network, tokenizer=tiny.tiny_tokenizer())


@pytest.mark.parametrize("name", ["GPT-2", "BLOOM", "Llama", "DeepSeek-V3", "Gemma 3 (multimodal)"])
def test_heads_in_the_wrong_dimension_are_detected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """z is taken as [d_head, n_heads]: a sum over heads would not notice."""

    def interleaved(
        z: torch.Tensor, source: torch.Tensor, coefficient: torch.Tensor
    ) -> torch.Tensor:
        by_head = source.unflatten(-1, (-1, coefficient.shape[-1]))
        return z + (coefficient.to(z.dtype)[..., None, :] * by_head).flatten(-2)

    monkeypatch.setattr(hooks, "add_scaled", interleaved)
    with pytest.raises(
        UnsupportedModelError,
        match="steering a head of layer 0 by 1 does not equal doubling it in the attention",
    ):
        load(build(name))


@pytest.mark.parametrize("name", ["GPT-2", "OPT", "BLOOM", "StarCoder2", "GPT-OSS"])
def test_a_scaled_bias_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The projection itself computes the contribution of a head, and so adds its bias once more."""
    network, scales, right = build(name), list[torch.Tensor](), hooks.add_scaled

    def noted(z: torch.Tensor, source: torch.Tensor, coefficient: torch.Tensor) -> torch.Tensor:
        scales.append(coefficient.sum(-1, keepdim=True))
        return right(z, source, coefficient)

    def add_biases(module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + scales.pop() * module.bias if scales else output

    for projection in oracle.projections(network):
        projection.register_forward_hook(add_biases)
    monkeypatch.setattr(hooks, "add_scaled", noted)
    with pytest.raises(UnsupportedModelError, match="does not equal doubling it in the attention"):
        load(network)


@pytest.mark.parametrize("name", GROUPED)
def test_kv_heads_counted_as_heads_are_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "count_heads", lambda *_: 2)
    with pytest.raises(UnsupportedModelError, match=r"has the shape .* expected \[rows, 2 heads"):
        load(build(name))


HEADS = {(0, 1): 2.0, (2, 3): -1.0}
IDS = (5, 6, 7, 8)


def assert_is_steered(model: juice.SteeredModel, network: PreTrainedModel) -> None:
    """Assert that an answer is that of the two runs, which differs from the unsteered one."""
    n, watch = 6, tuple(range(tiny.VOCAB_SIZE))
    request = Request.of(prompt_ids=IDS, max_tokens=n, ignore_eos=True, watch=watch)
    steered = replace(request, steering=steering(HEADS))
    expected = oracle.generate(network, list(IDS), HEADS, n)
    plain = oracle.forward(network, list(IDS))[0][-1]
    assert (expected[1][0] - plain).abs().max() > 100 * TOLERANCE
    assert_completes(model.engine.generate([steered])[0], expected, TOLERANCE)


Project = Callable[[nn.Linear, torch.Tensor], torch.Tensor]
PAST_ITS_HOOKS: dict[str, Project] = {
    "its forward": lambda projection, z: projection.forward(z),
    "its weights": lambda projection, z: nn.functional.linear(z, projection.weight),
}


def fuse(network: PreTrainedModel, project: Project) -> None:
    """Give the attention of layer 2 a forward that projects so, as `use_kernels=True` gives one."""
    attention = network.model.layers[2].self_attn
    projection, without = attention.o_proj, attention.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        attention.o_proj = nn.Identity()
        z, weights = without(*args, **kwargs)
        attention.o_proj = projection
        return project(projection, z), weights

    attention.forward = forward


@pytest.mark.parametrize("how", PAST_ITS_HOOKS)
def test_an_attention_that_projects_past_its_projections_hooks_is_refused(how: str) -> None:
    network = build("Llama")
    fuse(network, PAST_ITS_HOOKS[how])
    with pytest.raises(UnsupportedModelError, match=r"steering did not reach layers \[2\]"):
        load(network)


@pytest.mark.parametrize("how", PAST_ITS_HOOKS)
def test_a_model_that_is_fused_after_it_was_loaded_fails_and_is_not_unsteered(how: str) -> None:
    network = build("Llama")
    model = load(network)
    fuse(network, PAST_ITS_HOOKS[how])
    request = Request.of(prompt_ids=IDS, max_tokens=2, steering=steering(HEADS))
    with pytest.raises(JuiceError, match=r"steering did not reach layers \[2\]"):
        model.engine.generate([request])


def test_an_attention_with_another_forward_that_calls_its_projection_is_steered() -> None:
    """The other two fail for what they leave out, and not for being another's."""
    network = build("Llama")
    fuse(network, lambda projection, z: projection(z))
    assert_is_steered(load(network), network)


def test_a_kernel_in_place_of_a_projections_own_forward_is_steered() -> None:
    network = build("Llama")
    for projection in oracle.projections(network):
        projection.forward = MethodType(
            lambda self, z: nn.functional.linear(z, self.weight), projection
        )
    assert_is_steered(load(network), network)


class Lora(nn.Module):
    """An adapter around a projection, as PEFT's `lora.Linear` is one."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PeftsLora(Lora):
    """One that has the width of what it wraps, as PEFT's has."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base, rank)
        self.in_features, self.out_features = base.in_features, base.out_features


def adapted(kind: type[Lora]) -> PreTrainedModel:
    """Return a model with adapters around its output projections, that make a difference."""
    network = build("Llama")
    torch.manual_seed(1)
    for layer in network.model.layers:
        # A rank that splits into heads, so that nothing is refused for its shape.
        layer.self_attn.o_proj = kind(layer.self_attn.o_proj, rank=tiny.N_HEADS)
    return network


def test_a_projection_within_an_adapter_is_steered_and_has_no_fingerprint() -> None:
    """Its base's head sets were made for other weights, and are not taken for its own."""
    network = adapted(PeftsLora)
    model = load(network)
    assert_is_steered(model, network)
    assert model.loaded.identity.fingerprint is None


def test_an_adapter_of_unknown_width_is_refused() -> None:
    """Kills: steering the low-rank part, which has as many columns as heads."""
    with pytest.raises(UnsupportedModelError, match="does not equal doubling it"):
        load(adapted(Lora))


def test_a_module_around_a_model_is_refused_with_what_to_give_instead() -> None:
    """Kills: a model that is taken for the name of one, which no file system takes."""
    with pytest.raises(
        UsageError, match=r"a Sequential is not a transformers model.*get_base_model"
    ):
        juice.load(nn.Sequential(build("Llama")), tokenizer=tiny.tiny_tokenizer())


class Unhooked(nn.Linear):
    """A projection that is called past its hooks, as fused kernels do."""

    def __call__(self, z: torch.Tensor) -> torch.Tensor:
        return self.forward(z)


def test_a_projection_that_bypasses_its_hook_is_detected() -> None:
    network = build("Llama")
    network.model.layers[2].self_attn.o_proj.__class__ = Unhooked
    with pytest.raises(UnsupportedModelError, match=r"steering did not reach layers \[2\]"):
        load(network)


def test_a_projection_that_runs_twice_is_detected() -> None:
    network = build("Llama")
    projection = network.model.layers[1].self_attn.o_proj
    twice = projection.forward
    projection.forward = lambda z: (
        twice(z) + 0 * projection.__class__.__call__(projection, z) if again() else twice(z)
    )
    left = [False]

    def again() -> bool:
        left[0] = not left[0]
        return left[0]

    with pytest.raises(UnsupportedModelError, match="ran 4 times in two forwards"):
        load(network)


def test_a_model_that_float16_cannot_hold_says_what_can() -> None:
    network = build("Qwen2").to(torch.float16)
    for projection in (
        network.model.layers[1].self_attn.q_proj,
        network.model.layers[1].self_attn.k_proj,
    ):
        projection.bias.data.fill_(300)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 is not finite in float16.*bfloat16"):
        load(network)


class Mixing(torch.nn.Module):
    """A layer's MLP that lets the rows of a batch see each other."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x.mean(0, keepdim=True)


def test_a_model_that_disagrees_with_the_engine_is_refused_at_load() -> None:
    mixing = tiny.tiny_model("llama")
    mixing.model.layers[1].mlp = Mixing(mixing.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match="not steered exactly"):
        juice.load(mixing, tokenizer=tiny.tiny_tokenizer())


@pytest.mark.parametrize("name", ["Mistral", "Gemma 2", "Cohere 2", "GPT-OSS"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_wrong_sliding_window_is_detected_however_long_it_is(
    name: str, change: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check gives the model a short window: no prompt is as long as those of real models."""
    network = build(name)
    network.config.sliding_window = 4096
    loaded = prepare(network, tiny.tiny_tokenizer())
    assert verify(loaded, Mode()).share < 1e-4
    assert network.config.sliding_window == 4096
    right = masks.AttentionPattern.masks

    def wrong(self: masks.AttentionPattern, *args: Any) -> Any:
        windows = {
            kind: w and (None if change is None else w + change)
            for kind, w in self.sliding_windows.items()
        }
        return right(masks.AttentionPattern(windows, self.by_name), *args)

    monkeypatch.setattr(masks.AttentionPattern, "masks", wrong)
    with pytest.raises(UnsupportedModelError, match="log-probabilities differ"):
        verify(loaded, Mode())
    with pytest.warns(UserWarning, match="exact only with rows of one length"):
        assert exact_mode(loaded) == Mode(own_masks=True)


def test_a_model_that_masks_by_the_number_of_keys_keeps_its_own_masks() -> None:
    """GPT-Neo: the end of a long prompt beside a wider, fresh one sees keys of its future."""
    loaded = prepare(build("GPT-Neo (global)"), tiny.tiny_tokenizer())
    assert exact_mode(loaded) == Mode(own_masks=True)
    taking = replace(loaded, mask_pattern=masks.AttentionPattern({masks.FULL: None}, by_name=False))
    with pytest.raises(UnsupportedModelError, match="not steered exactly"):
        verify(taking, Mode())


def test_a_model_with_an_undeclared_sliding_window_keeps_its_own_masks() -> None:
    """A layer hides more than the configuration states: the engine's masks would show too much."""
    network = build("Llama")

    def local(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask, hidden = kwargs["attention_mask"], kwargs["hidden_states"]
        n = hidden.shape[1]
        cached = (
            kwargs["past_key_values"].get_seq_length()
            if kwargs.get("past_key_values") is not None
            else 0
        )
        distance = torch.arange(cached, cached + n)[:, None] - torch.arange(cached + n)
        banded = torch.zeros(1, 1, n, cached + n).masked_fill((distance < 0) | (distance > 1), -1e9)
        return args, {
            **kwargs,
            "attention_mask": banded if mask is None or mask.dtype == torch.bool else banded + mask,
        }

    network.model.layers[2].self_attn.register_forward_pre_hook(local, with_kwargs=True)
    with pytest.warns(UserWarning, match="exact only with rows of one length, which is slower"):
        model = load(network)
    assert model.engine.mode == Mode(own_masks=True)


def test_a_pruned_layer_is_accepted_and_a_model_without_any_effect_refused() -> None:
    network = build("Llama")
    with torch.no_grad():
        network.model.layers[1].self_attn.o_proj.weight.zero_()
    assert load(network).engine.mode == Mode()
    network = build("Llama")
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(UnsupportedModelError, match="no head of any layer makes a difference"):
        load(network)


def test_a_refused_model_is_unchanged_and_loads_once_it_is_mended() -> None:
    network = build("Llama")
    projection = network.model.layers[2].self_attn.o_proj
    projection.__class__ = Unhooked
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="steering did not reach"):
            load(network)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in network.modules())
    projection.__class__ = nn.Linear
    assert load(network).generate("abc", max_tokens=1)


def test_what_the_check_of_heads_changes_is_put_back() -> None:
    network = tiny.tiny_model("llama")
    ids = torch.arange(1, 20)[None]
    before, was = network(ids).logits, network.config._attn_implementation
    prepare(network, tiny.tiny_tokenizer())
    assert network.config._attn_implementation == was
    assert torch.equal(network(ids).logits, before)
    assert all(
        len(m._forward_pre_hooks) <= 1 and len(m._forward_hooks) <= 1 for m in network.modules()
    )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_heads_that_are_checked_are_of_the_layer_and_differ(n: int) -> None:
    for n_heads in (1, 2, 4, 32):
        if n <= n_heads:
            heads = heads_to_check(n_heads, n)
            assert len(set(heads)) == n
            assert set(heads) <= set(range(n_heads))
            assert n_heads - 1 in heads


def test_a_mode_in_which_requests_run_alone_at_best_is_not_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kills: forwards of several requests that fail at every step, each of which runs again alone.

    The last layer takes more than two rows only if they are those of the first.
    """
    network, n_rows = build("Llama"), [0]

    def note(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        n_rows[0] = args[0].shape[0]

    def refuse(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] not in (1, 2, n_rows[0]):
            raise ValueError("this layer has seen other rows")

    network.model.layers[0].register_forward_pre_hook(note)
    network.model.layers[-1].register_forward_pre_hook(refuse)
    with pytest.warns(UserWarning, match="exact only with clean runs in full rows, which is"):
        model = load(network)
    assert model.engine.mode == Mode(full_rows=True)
    several = Request.of(prompt_ids=IDS, max_tokens=3, steering=steering(HEADS))
    model.engine.generate([several] * 4)
    with pytest.raises(UnsupportedModelError, match=r"together.*this layer has seen other rows"):
        verify(model.loaded, Mode())
    assert not caplog.records
