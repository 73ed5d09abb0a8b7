"""Half precision and quantised weights steer as the same model's naive two runs.

Quantised activations are found and refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

import juice
from juice.checks.at_load import checked_engine
from juice.checks.linearity import TOLERANCE, why_not_linear
from juice.engine.load_options import LoadOptions
from juice.errors import HeadSetMismatchError, JuiceError, UnsupportedModelError, UsageError
from juice.loading import load_model, prepare
from juice.model.layout import resolve
from juice.model.steering_hooks import ModelHooks, SteeringPlan
from tests.support import oracle, precise, tiny
from tests.support.architectures import build
from tests.support.marks import ONE_SHAPE
from tests.support.serving import serving

CPU = torch.device("cpu")
# Log-probabilities; measured are 3e-6, 0.06 and 0.007: half precision rounds the sum of two z and
# every layer after it.
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1, "float16": 0.02}
# On a CPU bitsandbytes multiplies in bfloat16, whatever the dtype; measured are 0.009, 0.054 and
# 0.03.
TOLERANCES_4BIT = {"float32": 0.02, "bfloat16": 0.1, "float16": 0.06}


def needs(quantization: str) -> None:
    """Skip the test, naming the package that is missing."""
    for package in ("accelerate", {"bnb": "bitsandbytes", "tor": "torchao"}[quantization[:3]]):
        pytest.importorskip(
            package, reason=f"{quantization} needs {package}, which is not installed"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "wide", precise.wide_model())


def doubled(
    network: PreTrainedModel, ids: list[int], heads: oracle.Heads, *, method: str
) -> torch.Tensor:
    return oracle.steered_logits(
        network, ids, {head: 2 * beta for head, beta in heads.items()}, method=method
    )


def neighbours(
    network: PreTrainedModel, ids: list[int], heads: oracle.Heads, *, method: str
) -> torch.Tensor:
    moved = {(layer, (head + 1) % tiny.N_HEADS): beta for (layer, head), beta in heads.items()}
    return oracle.steered_logits(network, ids, moved, method=method)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_half_precision_equals_its_own_naive_two_runs(shape: str, dtype: str) -> None:
    """Kills: beta doubled, a head off by one; either is ten tolerances away."""
    loaded = prepare(tiny.tiny_model(shape).to(getattr(torch, dtype)), tiny.tiny_tokenizer())
    assert precise.worst_difference(loaded) < TOLERANCES[dtype]
    for wrong in (doubled, neighbours):
        assert precise.worst_difference(loaded, forward=wrong) > 10 * TOLERANCES[dtype]


MISTAKES = {
    "beta doubled": lambda plan: SteeringPlan(
        plan.sources, {i: 2 * c for i, c in plan.coefficients.items()}
    ),
    "the next head": lambda plan: SteeringPlan(
        plan.sources, {i: c.roll(1, 1) for i, c in plan.coefficients.items()}
    ),
    "its own z": lambda plan: SteeringPlan(
        {i: torch.arange(len(c)) for i, c in plan.coefficients.items()}, plan.coefficients
    ),
    "nothing": lambda plan: SteeringPlan(
        plan.sources, {i: 0 * c for i, c in plan.coefficients.items()}
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ONE_SHAPE)
def test_an_engine_that_steers_wrongly_in_half_precision_is_refused_at_load(
    shape: str, dtype: torch.dtype, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound of 0.3 alone would let beta doubled and a row's own z pass in bfloat16."""
    loaded = prepare(tiny.tiny_model(shape).to(dtype), tiny.tiny_tokenizer())
    steer, change = ModelHooks.steer, MISTAKES[mistake]
    monkeypatch.setattr(ModelHooks, "steer", lambda given, plan: steer(given, change(plan)))
    with pytest.raises(UnsupportedModelError, match="not steered exactly"):
        checked_engine(loaded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["bnb-4bit", "torchao-int8"])
def test_quantised_weights_steer_as_the_same_models_naive_two_runs(
    folder: Path, quantization: str, dtype: str
) -> None:
    needs(quantization)
    model = juice.load(folder, device="cpu", quantization=quantization, dtype=dtype)
    model.engine.stop()
    assert model.loaded.exact
    assert (
        model.loaded.identity.fingerprint
        == load_model(folder, LoadOptions(device="cpu")).identity.fingerprint
    )
    tolerance = (TOLERANCES_4BIT if quantization == "bnb-4bit" else TOLERANCES)[dtype]
    assert precise.worst_difference(model.loaded) < tolerance
    assert precise.worst_difference(model.loaded, forward=doubled) > 10 * tolerance
    plain = load_model(folder, LoadOptions(device="cpu", dtype=dtype)).model
    ids = list(range(1, 20))
    assert (
        oracle.forward(model.loaded.model, ids)[0] - oracle.forward(plain, ids)[0]
    ).abs().max() > 0.05, "nothing was quantised"


def test_a_model_that_the_user_quantised_is_steered(folder: Path) -> None:
    needs("bnb-4bit")
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype=torch.float32
    )
    network = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    model.engine.stop()
    assert model.loaded.identity.fingerprint is None
    assert precise.worst_difference(model.loaded) < TOLERANCES_4BIT["float32"]


@pytest.mark.parametrize("quantization", ["bnb-4bit", "torchao-int8"])
def test_a_folder_saved_quantised_has_no_fingerprint_and_head_sets_fit_it_only_on_trust(
    folder: Path, tmp_path: Path, quantization: str
) -> None:
    needs(quantization)
    model = juice.load(folder, device="cpu", quantization=quantization)
    saved_folder = tiny.save(tmp_path, model.loaded.model)
    again = juice.load(saved_folder, device="cpu", allow_unverified=True)
    assert again.loaded.quantization is not None
    head_set = juice.load(folder, device="cpu").make_head_set(
        name="own", target="context", plus=[(1, 2), (3, 0)], beta_plus=2.0
    )
    assert head_set.model.fingerprint
    assert again.loaded.identity.fingerprint is None
    options = {"steer": "context", "max_tokens": 6, "ignore_eos": True}
    with pytest.warns(UserWarning, match="no fingerprint"):
        saved = again.generate("abc", head_set=head_set, **options)[0]
    assert saved.token_ids == model.generate("abc", head_set=head_set, **options)[0].token_ids
    with pytest.raises(HeadSetMismatchError, match="allow_unverified"):
        juice.load(saved_folder, device="cpu").generate("abc", head_set=head_set, **options)
    with pytest.raises(UsageError, match="saved quantised"):
        juice.load(tmp_path, device="cpu", quantization=quantization)


def test_the_fingerprint_is_that_of_the_stored_weights_in_every_dtype(folder: Path) -> None:
    prints = {
        load_model(folder, LoadOptions(device="cpu", dtype=dtype)).identity.fingerprint
        for dtype in TOLERANCES
    }
    assert len(prints) == 1
    assert None not in prints


class Rounded(nn.Linear):
    """Activations on a grid of 8 bits, with one step for the batch, as dynamic int8, or a row."""

    a_row = False

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        step = (z.abs().amax(-1, keepdim=True) if self.a_row else z.abs().max()).clamp(
            min=1e-4
        ) / 127
        return super().forward((z / step).round() * step)


class RoundedARow(Rounded):
    a_row = True


class Float8(nn.Linear):
    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(z.to(torch.float8_e4m3fn).to(z.dtype))


class Int8DynamicLinear(nn.Linear):
    """Linear, whatever its name."""


def with_one(network: PreTrainedModel, name: str, kind: type[nn.Linear]) -> PreTrainedModel:
    module = network.get_submodule(name)
    new = kind(module.in_features, module.out_features, bias=False, dtype=module.weight.dtype)
    new.weight = module.weight
    network.set_submodule(name, new)
    return network


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Rounded, RoundedARow, Float8])
@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj", "model.layers.3.mlp.down_proj", "lm_head"]
)
def test_one_projection_with_quantised_activations_is_found(
    name: str, kind: type[nn.Linear], dtype: torch.dtype
) -> None:
    network = with_one(precise.wide_model().to(dtype), name, kind)
    assert why_not_linear(network, resolve(network), CPU).startswith(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_projections_pass_by_a_wide_margin_whatever_their_class_is_called(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("juice.checks.linearity.TOLERANCE", TOLERANCE / 2)
    for network in (precise.wide_model(), *map(tiny.tiny_model, tiny.SHAPES)):
        assert why_not_linear(network.to(dtype), resolve(network), CPU) is None
    renamed = with_one(
        precise.wide_model().to(dtype), "model.layers.1.self_attn.o_proj", Int8DynamicLinear
    )
    assert why_not_linear(renamed, resolve(renamed), CPU) is None


def quantized_dynamically() -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch deprecates it
        return torch.ao.quantization.quantize_dynamic(
            precise.wide_model(), {nn.Linear}, dtype=torch.qint8
        )


def int8_activations() -> PreTrainedModel:
    needs("torchao-int8")
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    network = precise.wide_model()
    quantize_(network, Int8DynamicActivationInt8WeightConfig())
    return network


@pytest.mark.filterwarnings("ignore:head set")
@pytest.mark.parametrize("make", [quantized_dynamically, int8_activations])
def test_quantised_activations_are_refused_unless_approximate_steering_is_allowed(
    make: Callable[[], PreTrainedModel],
) -> None:
    network = make()
    with pytest.raises(UnsupportedModelError, match="allow_approximate"):
        juice.load(network, tokenizer=tiny.tiny_tokenizer())
    with pytest.warns(UserWarning, match="cannot be steered exactly"):
        model = juice.load(
            network,
            tokenizer=tiny.tiny_tokenizer(),
            allow_approximate=True,
        )
    head_set = model.make_head_set(
        name="own", target="context", plus=[(1, 2), (3, 0)], beta_plus=2.0
    )
    for options in (
        {},
        {"steer": "context", "head_set": head_set},
        {"steer": juice.Steer(target="context", method="cad"), "context": "c"},
    ):
        completion = model.generate("abc", max_tokens=3, **options)[0]
        assert completion.steering.exact is False
        assert completion.to_dict()["steering"]["exact"] is False
        assert completion.steering.applied == bool(options)


def test_an_exact_model_reports_exact_steering() -> None:
    model = juice.load(
        tiny.tiny_model("gpt2"), tokenizer=tiny.tiny_tokenizer(), allow_approximate=True
    )
    assert model.generate("abc", max_tokens=1)[0].steering.exact is True


def test_bitsandbytes_8bit_is_served_only_when_allowed_and_every_route_reports_it_inexact(
    folder: Path,
) -> None:
    needs("bnb-8bit")
    with pytest.raises(UnsupportedModelError, match="quantised"):
        juice.load(folder, device="cpu", quantization="bnb-8bit")
    environment = {"JUICE_QUANTIZATION": "bnb-8bit", "JUICE_ALLOW_APPROXIMATE": "1"}
    with (
        serving("--model", str(folder), "--device", "cpu", environment=environment) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert "cannot be steered exactly" in server.errors()
        info = client.get("/info").json()
        assert info["steering"]["exact"] is False
        assert info["model"]["quantization"] == "bitsandbytes-8bit"
        body = {"prompt": "abc", "max_tokens": 2}
        assert client.post("/generate", json=body).json()["steering"]["exact"] is False
        assert (
            client.post("/v1/completions", json={"model": str(folder), **body}).json()["steering"][
                "exact"
            ]
            is False
        )
        assert '"exact":false' in client.post(
            "/generate", json={**body, "stream": True}
        ).text.replace(" ", "")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"quantization": "int3"}, "expected bnb-4bit"),
        ({"offload_folder": "x"}, "no device_map"),
        ({"device_map": "auto", "device": "cpu"}, "drop one"),
        ({"device_map": "sideways"}, "expected auto"),
        ({"device_map": "{"}, "not JSON"),
    ],
)
def test_options_that_cannot_be_followed_are_a_clear_error(options: dict, named: str) -> None:
    for package in ("accelerate", "torchao"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with pytest.raises(UsageError, match=named):
        juice.load("mini", **options)


def test_a_quantisation_that_finds_nothing_to_quantise_is_refused(tmp_path: Path) -> None:
    """GPT-2's projections are `Conv1D`, not `nn.Linear`."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    model = tiny.save(tmp_path, tiny.tiny_model("gpt2"))
    with pytest.raises(UsageError, match="quantises nothing"):
        juice.load(str(model), quantization="torchao-int8")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("juice.placement.find_spec", lambda _name: None)
    for options in ({"quantization": "bnb-4bit"}, {"device_map": "auto"}):
        with pytest.raises(UsageError, match=r"pip install 'juice-steering\[quant\]'"):
            juice.load("mini", **options)


def test_a_model_object_takes_no_placement() -> None:
    with pytest.raises(UsageError, match="from_pretrained"):
        juice.load(
            tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer(), quantization="bnb-4bit"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
def test_large_biases_are_not_taken_for_quantised_activations(
    dtype: torch.dtype, size: float
) -> None:
    """Qwen's keys have biases far larger than their products: rounding of the sum is expected."""
    network = build("Qwen2")
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.k_proj.bias.normal_(0, size)
    before = network.model.layers[0].self_attn.k_proj.bias.detach().to(dtype).clone()
    model = juice.load(network.to(dtype), tokenizer=tiny.tiny_tokenizer())
    assert model.loaded.exact
    assert torch.equal(network.model.layers[0].self_attn.k_proj.bias, before)


def test_a_model_that_could_not_be_checked_is_not_called_exact() -> None:
    network = tiny.tiny_model("llama")
    left = [1]

    def without_memory(_module: object, _args: object) -> None:
        if left and left.pop():
            raise torch.OutOfMemoryError("no memory is left")

    network.model.layers[0].register_forward_pre_hook(without_memory)
    with pytest.raises(JuiceError, match="not enough memory"):
        juice.load(network, tokenizer=tiny.tiny_tokenizer())


@pytest.mark.parametrize(
    "option",
    [
        {"device": "cpu"},
        {"dtype": "float16"},
        {"revision": "main"},
        {"attn_implementation": "eager"},
    ],
)
def test_options_that_a_model_object_cannot_follow_are_refused(option: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="a model object stays on its device, unchanged"):
        juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer(), **option)
