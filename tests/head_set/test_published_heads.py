"""The heads that the paper's authors published for gemma-2-2b, on a random model of that shape.

The set has no betas and no fingerprint. A request without betas is asked to give or tune them, one
with betas is steered by these heads, and `juice tune` sets them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import juice
from juice.errors import RequestError
from juice.head_set.head_set import HeadSet
from tests.support import oracle, tiny
from tests.support.commands import invoke
from tests.support.serving import serving

FOLDER = Path("head_sets/google--gemma-2-2b/parametric")
# As in the authors' files: (layer, head), both from 0, as they index `model.model.layers` and
# slices of d_head.
PLUS = [(12, 5), (14, 3), (12, 6), (10, 0), (8, 7)]
MINUS = [(10, 1), (7, 7), (13, 1), (16, 6), (12, 4)]
PROMPT = "The capital of Peru is"
FACTS = [
    {
        "subject": subject,
        "parametric_answer": answer,
        "context_answer": "Oslo",
        "prompts": {
            "substitution": f"{subject} has Oslo. {subject} has",
            "coherent": f"Oslo is known in {subject}. {subject} has",
        },
    }
    for subject, answer in (("Peru", "Lima"), ("Mali", "Bamako"))
]
UNSURE = "architecture and shape alone"


def gemma_shaped() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=4,
        max_position_embeddings=128,
        sliding_window=8,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("gemma-shaped"), gemma_shaped())


def run(*arguments: str | Path) -> tuple[int, str, str]:
    """Run a command, which must warn as every one does that finds the set."""
    with pytest.warns(UserWarning, match=f"{UNSURE}|tune the betas") as warned:
        done = invoke(*map(str, arguments))
    assert any(UNSURE in str(warning.message) for warning in warned)
    return done


def test_the_set_is_what_the_authors_published() -> None:
    head_set = HeadSet.load(FOLDER)
    assert (head_set.heads.plus, head_set.heads.minus) == (tuple(PLUS), tuple(MINUS))
    assert head_set.source is not None
    assert "github.com/GaotangLi/JUICE" in head_set.source
    assert (
        head_set.betas("juice")
        is head_set.betas("june")
        is head_set.identification
        is head_set.scores
        is head_set.model.fingerprint
        is None
    )


def test_the_library_asks_for_betas_and_steers_by_these_heads_when_it_has_them() -> None:
    model = juice.load(gemma_shaped(), tokenizer=tiny.tiny_tokenizer())
    for missing, given in (("beta_plus", {}), ("beta_minus", {"beta_plus": 1.0})):
        with (
            pytest.warns(UserWarning, match=UNSURE),
            pytest.raises(RequestError, match=r"has no betas.*juice tune") as raised,
        ):
            model.generate(
                PROMPT,
                steer=juice.Steer(target="parametric", **given),
                head_set=HeadSet.load(FOLDER),
            )
        assert raised.value.param == f"steer.{missing}"
    every = tuple(range(tiny.VOCAB_SIZE))
    asked = juice.Steer(target="parametric", beta_plus=2.0, beta_minus=-1.0)
    with pytest.warns(UserWarning, match=UNSURE):
        completion = model.engine.generate(
            [model.request(PROMPT, steer=asked, max_tokens=1, watch=every)]
        )[0]
    heads = {**dict.fromkeys(PLUS, 2.0), **dict.fromkeys(MINUS, -1.0)}
    ids = tiny.tiny_tokenizer()(PROMPT)["input_ids"]
    plain, steered = (
        oracle.forward(gemma_shaped(), ids)[0][-1],
        oracle.steered_logits(gemma_shaped(), ids, heads)[-1],
    )
    torch.testing.assert_close(
        torch.tensor(completion.watched), steered.log_softmax(-1), atol=1e-4, rtol=0
    )
    assert (steered.log_softmax(-1) - plain.log_softmax(-1)).abs().max() > 0.05
    assert completion.steering.n_heads == 10


@pytest.mark.long
def test_the_commands_ask_for_betas_and_tune_sets_them(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "sets" / "gemma" / "parametric"
    shutil.copytree(FOLDER, copied)
    facts = tmp_path / "facts.jsonl"
    facts.write_text("\n".join(map(json.dumps, FACTS)))
    asked = (
        "generate",
        PROMPT,
        "--model",
        folder,
        "--head-sets",
        tmp_path / "sets",
        "--max-tokens",
        "2",
        "--json",
    )
    code, _, errors = run(*asked, "--steer", "parametric")
    assert code == 2
    assert (
        "has no betas for method 'juice'; give beta_plus and beta_minus (--beta-plus, --beta-minus)"
        in errors
    )
    code, output, _ = run(*asked, "--steer", "parametric", "--beta-plus", "1", "--beta-minus", "-1")
    assert (code, json.loads(output)["steering"]["applied"]) == (0, True)
    code, _, errors = run(*asked, "--compare")
    assert code == 2
    assert "and has betas; see" in errors
    code, output, errors = run("tune", copied, "--model", folder, "--validation", facts, "--json")
    assert code == 0, errors
    tuned = HeadSet.load(copied)
    assert tuned.betas().model_dump() == json.loads(output)["beta"]
    assert tuned.heads == HeadSet.load(FOLDER).heads
    # Tuned on these weights, the set has their fingerprint from now on.
    assert tuned.model.fingerprint == juice.load(folder).loaded.identity.fingerprint
    code, output, errors = invoke(*map(str, (*asked, "--steer", "parametric")))
    assert code == 0, errors
    assert json.loads(output)["steering"]["beta_minus"] == tuned.betas().minus


def test_the_server_asks_for_betas_and_offers_nothing_that_it_would_refuse(folder: Path) -> None:
    with (
        serving("--model", str(folder), "--served-model-name", "gemma") as running,
        httpx.Client(base_url=running.url) as client,
    ):
        assert UNSURE in running.errors()
        example = next(line for line in running.errors().splitlines() if line.startswith("curl"))
        listed = client.get("/v1/head_sets").json()
        assert [(each["name"], each["beta"], each["window"]) for each in listed["data"]] == [
            ("parametric", None, None)
        ]
        sets = [each for each in FOLDER.parents[1].glob("*/*/") if each != FOLDER]
        unfit = {f"{each.parent.name}/{each.name}" for each in sets}
        assert len(unfit) > 3
        assert {entry["path"] for entry in listed["unfit"]} == unfit
        assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == ["gemma"]
        refused = client.post("/generate", json={"prompt": PROMPT, "steer": "parametric"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "steer.beta_plus")
        assert "juice tune" in refused.json()["error"]["message"]
        nothing = client.post("/compare", json={"prompt": PROMPT})
        assert (nothing.status_code, "juice tune" in nothing.json()["error"]["message"]) == (
            404,
            True,
        )
        shown = client.post("/generate", json=json.loads(example.split("-d '")[1].rstrip("'")))
        assert shown.status_code == 200, shown.text
        assert shown.json()["steering"]["n_heads"] == 10
