"""`juice doctor`: its findings on models whose properties are known, and on broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import juice
from juice.checks.doctor import diagnose
from juice.checks.heads import lens_difference
from juice.engine.own.batch import Mode
from juice.model.layout import AttentionLayer
from tests.support import tiny
from tests.support.architectures import SWITCH, build
from tests.support.commands import juice as run


def test_the_bundled_model_is_steered_exactly_and_the_table_states_the_cost() -> None:
    done = run("doctor")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    assert lines["mini:"] == "steered exactly"
    assert lines["heads"] == "8 a layer, d_head 32, 2 a KV head"
    assert lines["KV"] == f"cache        {2 * 6 * 4 * 32 * 4:,} bytes a token"
    assert done.stdout.count("\nok ") == 3
    content = json.loads(Path("head_sets/mini/parametric/head_set.json").read_text())
    heads = content["methods"]["juice"]["heads"]
    layers = [layer for layer, _ in (*heads["plus"], *heads["minus"])]
    assert (
        f"layers {min(layers)}-{max(layers)}, {(max(layers) - min(layers) + 1) / 6:.0%} of a"
        " second row" in done.stdout
    )


def test_a_refused_model_is_reported_with_the_reason_and_exit_status_1(tmp_path: Path) -> None:
    tiny.save(tmp_path, build("Mamba"))
    done = run("doctor", "--model", str(tmp_path), "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["exact"] is False
    assert "no attention heads" in found["reason"]
    done = run("doctor", "--model", str(tmp_path))
    assert done.stdout.startswith(f"{tmp_path}: refused: MambaForCausalLM")


def test_a_model_that_does_not_exist_is_the_users_mistake() -> None:
    done = run("doctor", "--model", "./nowhere")
    assert done.returncode == 2
    assert "there is no such folder" in done.stderr


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "Mistral",
            {
                "sliding_window": 8,
                "n_kv_heads": 2,
                "kv_bytes_per_token": 4 * 2 * 2 * 8 * 4,
                "own_masks": False,
            },
        ),
        ("Falcon (RW, ALiBi)", {"own_masks": True, "n_kv_heads": 4, "rope_switch": None}),
        ("Phi-3 (longrope)", {"rope_switch": SWITCH, "sliding_window": None, "context": 128}),
        ("DeepSeek-V3", {"d_head": [6], "n_layers": 4, "n_heads": 4, "latent_cache": True}),
    ],
)
def test_the_facts_are_those_of_the_configuration(name: str, facts: dict) -> None:
    model = juice.load(build(name), tokenizer=tiny.tiny_tokenizer())
    found = diagnose(model.engine, model.head_sets)
    assert found.exact, found.reason
    assert {key: found.facts[key] for key in facts} == facts
    assert found.head_sets == ()
    assert all(check.passed and check.difference < 1e-5 for check in found.checks)


def test_heads_that_move_after_loading_are_detected() -> None:
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    layers = list(model.loaded.layout.layers)
    layers[3] = AttentionLayer(3, layers[3].layer, layers[3].attention, layers[3].projection, 2, 16)
    object.__setattr__(model.loaded.layout, "layers", tuple(layers))
    found = diagnose(model.engine, model.head_sets)
    assert not found.exact
    assert "expected [rows, 2 heads, tokens, ...]" in (found.reason or "")


def test_an_engine_that_is_not_exact_is_detected() -> None:
    """Its masks show the future, which only the comparison with the two runs can detect."""
    network = build("Falcon (RW, ALiBi)")
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    model.engine.mode = Mode(own_masks=True)
    assert diagnose(model.engine, model.head_sets).exact
    hook = network.transformer.h[1].register_forward_pre_hook(
        lambda _m, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    with torch.no_grad():
        found = diagnose(model.engine, model.head_sets)
    hook.remove()
    assert not found.exact


@pytest.mark.parametrize("name", ["GPT-2", "Gemma 2", "DeepSeek-V3", "Phi-3 (longrope)"])
def test_deep_finds_z_where_transformer_lens_does_and_looks_beyond_windows_and_switches(
    name: str,
) -> None:
    model = juice.load(build(name), tokenizer=tiny.tiny_tokenizer())
    found = diagnose(model.engine, model.head_sets, deep=True)
    assert found.exact
    lengths = (SWITCH - 4, 120) if "longrope" in name else (120,)
    names = [*(f"a prompt of {n} tokens and 8 new ones" for n in lengths), "z of every layer"]
    assert [check.name.split(":")[0] for check in found.checks][-len(names) :] == names
    assert all(check.passed and check.difference < 1e-5 for check in found.checks)


def test_deep_on_a_model_that_transformer_lens_cannot_run_warns_and_goes_on() -> None:
    model = juice.load(build("Falcon (40B style)"), tokenizer=tiny.tiny_tokenizer())
    with pytest.warns(UserWarning, match="TransformerLens cannot run FalconForCausalLM"):
        found = diagnose(model.engine, model.head_sets, deep=True)
    assert found.exact
    assert len(found.checks) == 4


def test_transformer_lens_detects_heads_that_are_not_where_the_layout_has_them() -> None:
    """The second opinion can differ: z of an arbitrary projection is not its hook_z."""
    model = juice.load(tiny.tiny_model("llama"), tokenizer=tiny.tiny_tokenizer())
    ids = torch.arange(1, 9)[None]
    layers = list(model.loaded.layout.layers)
    wrong = AttentionLayer(
        1, layers[1].layer, layers[1].attention, layers[1].attention.q_proj, tiny.N_HEADS, 8
    )
    object.__setattr__(model.loaded.layout, "layers", (layers[0], wrong, *layers[2:]))
    assert (lens_difference(model.loaded, ids) or 0) > 0.1
