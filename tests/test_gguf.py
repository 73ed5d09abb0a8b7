"""GGUF files: the models in them, and refusals of what would be another model.

The oracle is the model that the file was written from, by `tests/support/gguf_files.py`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gguf import (
    GGMLQuantizationType,
    GGUFEndian,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    dequantize,
    quantize,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

import juice
from juice.errors import (
    HeadSetMismatchError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from juice.gguf import read_gguf
from tests.support.commands import invoke
from tests.support.commands import juice as juice_command
from tests.support.gguf_files import name_of, write_gguf
from tests.support.tiny import tiny_tokenizer, with_large_weights

SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-untied": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3_text", {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 24}),
}
PROMPT = torch.tensor(
    [[5, 17, 280, 33, 201, 9, 45, 77, 260, 12, 100, 3, 61, 150, 222, 8, 19, 4, 71]]
)


def model_of(case: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a case, in float32."""
    kind, options = CASES[case]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **options, **changes})
    return with_large_weights(AutoModelForCausalLM.from_config(config))


def first_rows(n_rows: int) -> list[int]:
    return list(range(min(n_rows, 8)))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_logits_of_the_model_that_it_was_written_from(
    case: str, tmp_path: Path
) -> None:
    model = model_of(case)
    path = write_gguf(tmp_path / "tiny.gguf", model, case.removesuffix("-untied"))
    read = read_gguf(path, first_rows, dtype=torch.float32)
    torch.testing.assert_close(logits(read.network), logits(model), rtol=1e-5, atol=1e-5)
    assert read.name == "tiny-model-1.0"
    assert read.tokenizer("Two Words").input_ids == tiny_tokenizer()("Two Words").input_ids
    assert read.network.generation_config.eos_token_id == [0]


def test_llama_3s_scaling_is_read_from_its_factors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = model_of("llama", rope_parameters=rope, head_dim=64)
    factors = plain_inverse_frequencies(64, 500_000.0) / model.model.rotary_emb.inv_freq
    assert factors.min() < 1.001
    assert factors.max() > 31.999  # so that the test has frequencies of each kind
    path = write_gguf(
        tmp_path / "tiny.gguf", model, "llama", tensors={"rope_freqs.weight": factors}
    )
    read = read_gguf(path, first_rows, dtype=torch.float32)
    torch.testing.assert_close(logits(read.network), logits(model), rtol=1e-5, atol=1e-5)
    wrong = write_gguf(
        tmp_path / "wrong.gguf", model, "llama", tensors={"rope_freqs.weight": factors + 0.5}
    )
    with pytest.raises(UnsupportedModelError, match=r"not Llama 3's; give the model's folder"):
        read_gguf(wrong, first_rows)


def plain_inverse_frequencies(size: int, theta: float) -> torch.Tensor:
    return torch.tensor([theta ** (-2 * i / size) for i in range(size // 2)])


def test_a_linear_scaling_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    model = model_of("qwen2", rope_parameters=rope)

    def scaled(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    read = read_gguf(write_gguf(tmp_path / "tiny.gguf", model, "qwen2", change=scaled), first_rows)
    torch.testing.assert_close(logits(read.network), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_weights_are_those_that_the_format_can_hold(kind: str, tmp_path: Path) -> None:
    quantization = GGMLQuantizationType[kind]
    model = model_of("qwen2")
    path = write_gguf(tmp_path / "tiny.gguf", model, "qwen2", quantization=quantization)
    read = read_gguf(path, first_rows, dtype=torch.bfloat16)
    assert read.network.dtype == torch.bfloat16
    weight = model.model.layers[3].mlp.down_proj.weight.detach()
    held = torch.from_numpy(dequantize(quantize(weight.numpy(), quantization), quantization))
    assert not torch.equal(held, weight)
    got = read.network.model.layers[3].mlp.down_proj.weight
    assert torch.equal(got, held.bfloat16())
    shape, rows = read.rows["model.layers.3.mlp.down_proj.weight"]
    assert shape == list(weight.shape)
    assert torch.equal(rows, held[:8])


def test_parts_are_read_together(tmp_path: Path) -> None:
    model = model_of("llama")
    names = {f"blk.{layer}.attn_q.weight" for layer in range(6)}
    everything = {
        name_of(parameter, gemma=False)
        for parameter in model.state_dict()
        if "lm_head" not in parameter
    }

    def part(number: int) -> Any:
        def change(writer: GGUFWriter) -> None:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", len(everything))

        return change

    for number, without in enumerate((frozenset(names), frozenset(everything - names)), start=1):
        path = tmp_path / f"tiny-{number:05}-of-00002.gguf"
        write_gguf(path, model, "llama", change=part(number - 1), without=without)
    read = read_gguf(tmp_path / "tiny-00001-of-00002.gguf", first_rows)
    torch.testing.assert_close(logits(read.network), logits(model), rtol=1e-5, atol=1e-5)
    path.unlink()
    with pytest.raises(ModelNotFoundError, match="has 00002 parts, and tiny-00002"):
        read_gguf(tmp_path / "tiny-00001-of-00002.gguf", first_rows)


def unknown_field(writer: GGUFWriter) -> None:
    writer.add_float32("llama.attention.scale", 0.5)


def yarn(writer: GGUFWriter) -> None:
    writer.add_rope_scaling_type(RopeScalingType.YARN)


def other_values(writer: GGUFWriter) -> None:
    writer.add_value_length(8)


def other_rotation(writer: GGUFWriter) -> None:
    writer.add_rope_dimension_count(4)


def window(writer: GGUFWriter) -> None:
    writer.add_sliding_window(4)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ({"change": unknown_field}, r"says llama\.attention\.scale = 0\.5, which would be ignored"),
        ({"change": window}, r"says llama\.attention\.sliding_window = 4, which would be ignored"),
        ({"change": yarn}, "scales its positions by 'yarn'; expected linear or none"),
        ({"change": other_values}, "has attention.value_length 8, and heads of size 16"),
        ({"change": other_rotation}, "has rope.dimension_count 4, and heads of size 16"),
        ({"tensors": {"blk.0.attn_q.bias": torch.zeros(64)}}, "has a tensor blk.0.attn_q.bias"),
        ({"tensors": {"mtp.weight": torch.zeros(4, 4)}}, "has a tensor mtp.weight, which Llama"),
        (
            {"without": frozenset({"blk.2.ffn_up.weight"})},
            "lacks model.layers.2.mlp.up_proj.weight",
        ),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    what: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), "llama", **what)
    with pytest.raises(UnsupportedModelError, match=expected):
        read_gguf(path, first_rows)


def test_other_architectures_are_refused_with_those_that_work(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), "mamba")
    with pytest.raises(
        UnsupportedModelError,
        match=r"architecture 'mamba'.*expected llama, qwen2, qwen3, gemma2, gemma3",
    ):
        read_gguf(path, first_rows)


def test_a_file_for_machines_with_another_order_of_bytes_is_refused(tmp_path: Path) -> None:
    """Kills: numbers of which the bytes are read backwards."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model_of("llama"), "llama", endianness=GGUFEndian.BIG)
    with pytest.raises(UnsupportedModelError, match="is big-endian, and this machine is not"):
        read_gguf(path, first_rows)


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_a_file_without_the_width_of_its_windows_has_the_usual_one_or_is_refused(
    case: str, tmp_path: Path
) -> None:
    """Kills: no width, with which no prompt is read."""

    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop(f"{case}.attention.sliding_window")

    path = write_gguf(tmp_path / "tiny.gguf", model_of(case), case, change=change)
    if case == "gemma2":
        assert read_gguf(path, first_rows).network.config.sliding_window == 4096
    else:
        with pytest.raises(UnsupportedModelError, match="not say how wide its sliding windows"):
            read_gguf(path, first_rows)


def test_a_model_whose_name_makes_no_slug_is_called_like_its_file(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("general.name")
        writer.add_name("\u6a21\u578b")

    path = write_gguf(tmp_path / "Tiny_1.gguf", model_of("llama"), "llama", change=change)
    assert read_gguf(path, first_rows).name == "tiny-1"


def test_other_ways_to_split_text_are_refused(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("klingon")

    path = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), "llama", change=change)
    with pytest.raises(UnsupportedModelError, match="splits text like 'klingon'"):
        read_gguf(path, first_rows)


def test_files_that_are_cut_or_foreign_are_refused_in_words(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), "llama").read_bytes()
    path = tmp_path / "bad.gguf"
    for content in (whole[: len(whole) // 2], whole[:100], whole[:-1], b"", b"PK" + whole):
        path.write_bytes(content)
        with pytest.raises(ModelNotFoundError, match=r"bad\.gguf is not a whole GGUF file"):
            read_gguf(path, first_rows)
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        read_gguf(tmp_path / "absent.gguf", first_rows)


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
def test_the_end_of_a_turn_stops_beside_the_end_of_text(end: str, tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
        types = writer.kv_data[0]["tokenizer.ggml.token_type"].value
        tokens[290], types[290] = end, TokenType.CONTROL
        writer.add_eot_token_id(291)

    path = write_gguf(tmp_path / "tiny.gguf", model_of("llama"), "llama", change=change)
    read = read_gguf(path, first_rows)
    assert read.network.generation_config.eos_token_id == [0, 290, 291]
    assert read.tokenizer(end).input_ids == [290]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of a llama whose matrices are stored as Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return write_gguf(path, model_of("llama"), "llama", quantization=GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def converted(quantised: Path) -> Path:
    """Return the folder that `juice convert` makes of the file."""
    folder = quantised.with_name("folder")
    done = juice_command("convert", str(quantised), str(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert "as other tokens" not in done.stderr
    assert json.loads(done.stdout) == {
        "path": str(folder),
        "name": "tiny-model-1.0",
        "dtype": "float32",
        "sha256": f"sha256:{hashlib.sha256(quantised.read_bytes()).hexdigest()}",
        "quantisation": "Q8_0",
    }
    return folder


def test_a_file_and_its_folder_are_one_model(quantised: Path, converted: Path) -> None:
    of_file, of_folder = juice.load(quantised, dtype="float32"), juice.load(converted)
    identity = of_file.loaded.identity
    assert identity.fingerprint == of_folder.loaded.identity.fingerprint
    assert identity.weights is not None
    assert identity.weights.quantisation == "Q8_0"
    assert identity.weights.fingerprint == identity.fingerprint
    assert of_file.id == "tiny-model-1.0"
    heads = of_file.make_head_set(
        name="own", target="context", plus=[(2, 1)], minus=[(3, 0)], beta_plus=2.0, beta_minus=-1.0
    )
    steer = juice.Steer(target="context", head_set=heads)
    for options in ({}, {"steer": steer}):
        texts = [
            model.generate("abc", max_tokens=8, ignore_eos=True, **options)[0].token_ids
            for model in (of_file, of_folder)
        ]
        assert texts[0] == texts[1]


def test_a_folder_that_is_read_as_other_tokens_is_told_of(tmp_path: Path) -> None:
    """Kills: transformers' class for Qwen, which composes accents that llama.cpp leaves apart."""
    path = write_gguf(tmp_path / "tiny.gguf", model_of("qwen2"), "qwen2")
    done = juice_command("convert", str(path), str(tmp_path / "folder"))
    assert done.returncode == 0, done.stderr
    assert "transformers reads 'cafe\\u0301" in done.stderr
    text = "cafe\u0301"
    folder = AutoTokenizer.from_pretrained(tmp_path / "folder")(text)["input_ids"]
    assert folder != read_gguf(path, first_rows).tokenizer(text)["input_ids"]


def test_a_half_precision_file_has_the_fingerprint_of_its_weights_as_stored(
    quantised: Path,
) -> None:
    whole, half = (juice.load(quantised, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert half.loaded.model.dtype == torch.bfloat16
    assert half.loaded.identity == whole.loaded.identity


def test_a_set_of_another_quantisation_says_so(quantised: Path, tmp_path: Path) -> None:
    coarser = write_gguf(
        tmp_path / "tiny.gguf", model_of("llama"), "llama", quantization=GGMLQuantizationType.Q4_0
    )
    made_on, model = (juice.load(path, dtype="float32") for path in (quantised, coarser))
    heads = made_on.make_head_set(name="own", target="context", plus=[(2, 1)], beta_plus=2.0)
    steer = juice.Steer(target="context", head_set=heads)
    words = "was made on tiny-model-1.0 as Q8_0, and the loaded file stores it as Q4_0"
    with pytest.raises(HeadSetMismatchError, match=f"{words}.*--allow-unverified"):
        model.generate("abc", steer=steer)
    trusting = juice.load(coarser, dtype="float32", allow_unverified=True)
    with pytest.warns(UserWarning, match=words):
        assert trusting.generate("abc", steer=steer)[0].steering.head_set == "own"


@pytest.mark.parametrize("is_there", [False, True])
def test_the_command_leaves_nothing_where_it_is_cut_off_and_else_a_whole_folder(
    quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    folder = tmp_path / "made" / "new"
    if is_there:
        folder.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for problem, code, said in (
        (KeyboardInterrupt(), 130, "nothing was written"),
        (OSError(28, "No space left on device"), 2, "No space left on device"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(PreTrainedTokenizerBase, "save_pretrained", Mock(side_effect=problem))
            done = invoke("convert", str(quantised), str(folder))
        assert (done[0], said in done[2]) == (code, True), done
        assert sorted(tmp_path.rglob("*")) == before
    assert invoke("convert", str(quantised), str(folder))[0] == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert [*folder.parent.iterdir()] == [folder]
    (tmp_path / "other").mkdir()
    assert folder.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_vllm_and_other_arguments_are_refused_with_what_to_do(quantised: Path) -> None:
    with pytest.raises(UsageError, match=r"`juice convert .*tiny\.gguf FOLDER`"):
        juice.load(quantised, engine="vllm")
    with pytest.raises(UsageError, match=r"quantization is not for a \.gguf file"):
        juice.load(quantised, quantization="torchao-int8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("absent.gguf", "new"), "there is no file absent.gguf"),
        (("tiny.gguf", "."), "is not an empty folder; give another"),
        (("tiny.gguf", "new", "--dtype", "int3"), "dtype 'int3' is unknown; expected float32"),
    ],
)
def test_the_command_refuses_in_words(
    quantised: Path, arguments: tuple[str, ...], expected: str
) -> None:
    done = juice_command("convert", *arguments, cwd=quantised.parent)
    assert done.returncode == 2
    assert expected in done.stderr
    assert not quantised.with_name("new").exists()
