"""Every decoder that people run is steered exactly, or refused with the reason.

`docs/models.md` shows what these tests found. It must agree with them;
`pytest tests/checks/test_architectures.py --write-docs` writes it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import juice
from juice.engine.load_options import Limits
from juice.engine.own.batch import Mode
from juice.engine.own.thread import BatchingEngine
from juice.errors import UnsupportedModelError
from juice.identification.probes import CleanRun, Prober
from juice.model.layout import text_config
from juice.model.steering_hooks import knocked_out
from tests.support import oracle, tiny
from tests.support.architectures import ARCHITECTURES, REFUSED, SWITCH, WINDOW, Architecture
from tests.support.mixed import TOLERANCE, mixed_requests
from tests.support.running import assert_completes, with_many_forwards

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin: written by the tests -->", "<!-- end -->"
FOUND: dict[str, str] = {}


def by_name(architecture: Architecture) -> str:
    return architecture.name


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=by_name)
def test_an_architecture_is_steered_as_the_two_run_definition(
    architecture: Architecture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join and leave; prompts come in chunks.

    Sequences exceed the sliding window, and are on both sides of a switch of positions. Companions
    run in their windows and as full rows, with the engine's masks and the model's own, together and
    parted by length.
    """
    network, requests = architecture.build(), mixed_requests(seed=3, n=8)
    expected = [
        oracle.generate(network, list(r.prompt_ids), heads, r.options.max_tokens, method=m)
        for r, heads, m in requests
    ]
    plain = [oracle.forward(network, list(r.prompt_ids))[0][-1] for r, _, _ in requests]
    lengths = [len(r.prompt_ids) + r.options.max_tokens for r, _, _ in requests]
    assert sum(length > WINDOW for length in lengths) > 4
    assert any(
        len(r.prompt_ids) <= SWITCH < length
        for (r, _, _), length in zip(requests, lengths, strict=True)
    )
    moved = [
        float((logits[0] - p).abs().max())
        for (_, heads, _), (_, logits), p in zip(requests, expected, plain, strict=True)
        if heads
    ]
    assert min(moved) > 100 * TOLERANCE, "steering makes too little difference to be tested"

    loaded = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    found = loaded.engine.mode
    assert not found.full_rows
    caplog.clear()  # loading tries modes that fail
    few, chunks = (
        Limits(max_batch=3, max_prefill_tokens=60),
        Limits(max_batch=5, max_prefill_tokens=7),
    )
    runs = [(found, chunks), (replace(found, full_rows=True), few)]
    if loaded.loaded.rope_switch is None:
        runs.append((Mode(own_masks=True), chunks))
    for i, (mode, limits) in enumerate([*runs, (found, few)]):
        if i == len(runs):
            with_many_forwards(monkeypatch)
        completions = BatchingEngine(loaded.loaded, limits, mode).generate(
            [r for r, _, _ in requests]
        )
        for completion, each in zip(completions, expected, strict=True):
            assert_completes(completion, each, TOLERANCE)
    assert not caplog.records, "a batch failed, and its rows were run alone"
    _check_probes(loaded, network)
    FOUND[architecture.name] = _row(architecture, loaded)


def _check_probes(model: juice.SteeredModel, network: torch.nn.Module) -> None:
    """Compare identification's probes of a layer's heads with a forward each."""
    prompts = [tuple(range(1, 12)), tuple(range(20, 26))]
    prober = Prober(model.loaded, CleanRun(model.loaded, prompts))
    with torch.inference_mode():
        logits = prober.logits(1, 1 + 2 * torch.eye(tiny.N_HEADS))
    for head in range(tiny.N_HEADS):

        def scaled(z: torch.Tensor, head: int = head) -> torch.Tensor:
            d_head = z.shape[-1] // tiny.N_HEADS
            z[..., head * d_head : (head + 1) * d_head] *= 3
            return z

        for i, prompt in enumerate(prompts):
            expected = oracle.forward(network, list(prompt), {1: scaled})[0][-1]
            torch.testing.assert_close(logits[head, i], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=by_name)
def test_a_layer_without_its_attention_and_mlp_passes_its_input_on(
    architecture: Architecture,
) -> None:
    """The evaluation knocks out by structure; some architectures add the residual inside a part."""
    network = architecture.build()
    for name, parameter in network.named_parameters():
        if "norm" in name or "ln_" in name:
            parameter.data = (
                torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
            )
    model = juice.load(network, tokenizer=tiny.tiny_tokenizer())
    layer = model.loaded.layout.layers[1]
    seen: list[torch.Tensor] = []
    layer.layer.register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    layer.layer.register_forward_hook(
        lambda _m, _args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad(), knocked_out(layer, ["attention", "mlp"]):
        network(torch.arange(1, 9)[None])
    torch.testing.assert_close(seen[0], seen[1])
    with torch.no_grad():
        network(torch.arange(1, 9)[None])
    assert (seen[2] - seen[3]).abs().max() > 0.01


@pytest.mark.parametrize("architecture", REFUSED, ids=by_name)
def test_an_unsupported_architecture_is_refused_with_its_reason(architecture: Architecture) -> None:
    with pytest.raises(UnsupportedModelError, match=architecture.refusal) as refusal:
        juice.load(architecture.build(), tokenizer=tiny.tiny_tokenizer())
    reason = str(refusal.value).replace("|", "/")
    FOUND[architecture.name] = (
        f"| {architecture.name} | `{architecture.model_type}` | refused | | | {reason} |"
    )


def test_the_page_of_models_shows_what_was_found(request: pytest.FixtureRequest) -> None:
    if missing := [a.name for a in (*ARCHITECTURES, *REFUSED) if a.name not in FOUND]:
        pytest.skip(f"these have not run, or failed: {', '.join(missing)}")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    table = "\n".join(
        [
            "| architecture | model type | steered | rows of one batch | the clean run | notes |",
            "|---|---|---|---|---|---|",
            *(FOUND[a.name] for a in (*ARCHITECTURES, *REFUSED)),
        ]
    )
    written = f"{before}{BEGIN}\n{table}\n{END}{after}"
    if request.config.getoption("--write-docs"):
        PAGE.write_text(written, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == written, (
        "docs/models.md is out of date; run this file with --write-docs"
    )


def _row(architecture: Architecture, model: juice.SteeredModel) -> str:
    loaded, mode = model.loaded, model.engine.mode
    group = loaded.layout.n_heads // model.engine.n_kv_heads
    notes = [f"{group} query heads a KV head"] if group > 1 else []
    notes = ["one latent for all heads"] if "deepseek" in architecture.model_type else notes
    first, width = loaded.layout.layers[0], text_config(loaded.model).hidden_size
    notes += ["heads of another width"] if first.n_heads * first.d_head != width else []
    windows = [
        window
        for window in (loaded.mask_pattern.sliding_windows.values() if loaded.mask_pattern else ())
        if window
    ]
    notes += ["sliding window"] if windows else []
    notes += ["prefilled again where its positions change"] if loaded.rope_switch else []
    return "| {} | `{}` | exactly | {} | {} | {} |".format(
        architecture.name,
        architecture.model_type,
        "of one length" if mode.own_masks else "of any lengths",
        "a full row" if mode.full_rows else "between the steered layers",
        ", ".join(notes),
    )
