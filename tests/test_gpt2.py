"""gpt2 from its files to HTTP: identification on four examples, generation and a real server.

On its real weights, from `JUICE_TEST_GPT2` (a folder), the hub's cache or the network, or else
skipped with the reason; and always on random weights in exactly its files.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, PreTrainedModel

import juice
from juice.data.example import ConflictExample
from juice.errors import HeadSetMismatchError
from juice.formula import Target
from juice.head_set.head_set import HeadSet
from juice.head_set.schema import Betas
from juice.identification.find import find
from juice.identification.options import IdentificationOptions
from juice.model.identity import identify_model
from juice.model.layout import resolve
from juice.steered_model import SteeredModel
from tests.support import gpt2_files, naive_scores, oracle
from tests.support.serving import serving

NAMES = ("openai-community/gpt2", "gpt2")
FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    "model.safetensors",
]
FACTS = [
    ("France", "Paris", "Rome"),
    ("Japan", "Tokyo", "Madrid"),
    ("Russia", "Moscow", "Berlin"),
    ("Italy", "Rome", "Tokyo"),
]
# Random weights need no grammar, and one conflict type is cheaper than two.
STATEMENTS = {"original": "The capital of {} is", "random": " {}"}
TYPES = {"original": ("clean", "substitution"), "random": ("substitution",)}
TARGETS: tuple[Target, ...] = ("context", "parametric")
BETA_PLUS, BETA_MINUS = 1.0, -1.0
N_TOKENS = 3
TOLERANCE = 1e-3  # fp32 log-probabilities over 50,257 tokens; twelve layers sum in another order


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A checkpoint as JuICE loads it and as transformers does, and the head sets found on it."""

    folder: Path
    model: SteeredModel
    plain: PreTrainedModel
    examples: list[ConflictExample]
    found: dict[Target, HeadSet]
    head_sets: Path

    @property
    def prompt(self) -> str:
        return self.examples[0].prompts["substitution"]

    def ids(self, prompt: str) -> list[int]:
        return list(self.model.loaded.tokenizer(prompt)["input_ids"])

    def heads(self, target: Target) -> dict[tuple[int, int], float]:
        """Return each head's beta; a head of both signs gets the sum."""
        betas: dict[tuple[int, int], float] = {}
        for heads, beta in (
            (self.found[target].heads.plus, BETA_PLUS),
            (self.found[target].heads.minus, BETA_MINUS),
        ):
            for head in heads:
                betas[tuple(head)] = betas.get(tuple(head), 0.0) + beta
        return betas


def examples(weights: str) -> list[ConflictExample]:
    statement, made = STATEMENTS[weights], []
    for s, a, c in FACTS:
        prompts = {
            "clean": statement.format(s),
            "substitution": f"{statement.format(s)} {c}. {statement.lstrip().format(s)}",
        }
        made.append(
            ConflictExample(
                subject=s,
                parametric_answer=a,
                context_answer=c,
                prompts={t: prompts[t] for t in TYPES[weights]},
            )
        )
    return made


def real_weights() -> Path:
    """Return gpt2's folder; skip where it cannot be had, without waiting for a missing network."""
    if given := os.environ.get("JUICE_TEST_GPT2"):
        assert (Path(given) / "config.json").exists(), (
            f"JUICE_TEST_GPT2 names {given}, which holds no model"
        )
        return Path(given)
    for name in NAMES:
        try:
            folder = Path(
                huggingface_hub.snapshot_download(name, allow_patterns=FILES, local_files_only=True)
            )
        except (OSError, ValueError):
            continue
        if (folder / "model.safetensors").exists():
            return folder
    if constants.is_offline_mode():
        pytest.skip(
            "gpt2 is not in the hub's cache, and the hub is off (HF_HUB_OFFLINE); name a folder"
            " with JUICE_TEST_GPT2"
        )
    try:
        # One quick request first: the hub's client would retry again and again.
        httpx.head(
            f"{constants.ENDPOINT}/{NAMES[0]}/resolve/main/config.json",
            timeout=5,
            follow_redirects=True,
        ).raise_for_status()
        return Path(huggingface_hub.snapshot_download(NAMES[0], allow_patterns=FILES))
    except Exception as error:
        pytest.skip(
            f"gpt2 is not in the hub's cache and cannot be downloaded ({error!r}); name a folder"
            " with JUICE_TEST_GPT2"
        )


@pytest.fixture(scope="module", params=["random", "original"])
def subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    pool = examples(request.param)
    made = tmp_path_factory.mktemp("gpt2")
    if request.param == "random":
        words = [
            word
            for e in pool
            for word in (*e.prompts["substitution"].replace(".", " ").split(), *e.parametric_answer)
        ]
        folder = gpt2_files.write(made, words)
    else:
        folder = real_weights()
    model = juice.load(folder, head_sets=made)
    options = IdentificationOptions(
        method="probe",
        n_examples=len(pool),
        top_k=3,
        alphas_plus=(1.0,),
        alphas_minus=(-1.0,),
        tune=False,
    )
    found = {
        t: s.with_betas("juice", Betas(plus=BETA_PLUS, minus=BETA_MINUS))
        for t, s in find(model, pool, options).head_sets.items()
    }
    head_sets = made / "head_sets"
    for target, head_set in found.items():
        head_set.save(head_sets / "gpt2" / target)
    plain = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    yield Subject(
        folder=folder, model=model, plain=plain, examples=pool, found=found, head_sets=head_sets
    )
    model.engine.close()
    shutil.rmtree(made)  # half a gigabyte


def test_the_files_are_those_of_gpt2(subject: Subject) -> None:
    config = json.loads((subject.folder / "config.json").read_text())
    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
    assert {name: config[name] for name in sizes} == sizes
    assert sum(p.numel() for p in subject.plain.parameters()) == 124_439_808
    tokenizer = subject.model.loaded.tokenizer
    assert type(tokenizer).__name__.startswith("GPT2Tokenizer")
    assert len(tokenizer) == 50257
    assert tokenizer.eos_token_id == 50256
    text = "Ça va? 東京\n\n  the  capital of Zürich…"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert subject.model.description.max_positions == 1024


def test_the_heads_are_found_and_scored_as_the_naive_loop_scores_them(subject: Subject) -> None:
    for target, head_set in subject.found.items():
        assert head_set.model.fingerprint is not None
        assert head_set.identification.n_examples == len(FACTS)
        for sign, heads, alpha in (
            ("plus", head_set.heads.plus, 1.0),
            ("minus", head_set.heads.minus, -1.0),
        ):
            if not heads:
                continue  # of one sign there may be none
            best, at = tuple(heads[0]), head_set.scores.conflict_types.index("substitution")
            naive = naive_scores.mean_changes(
                subject.plain,
                [subject.ids(e.prompts["substitution"]) for e in subject.examples],
                [subject.ids(f" {e.answer(target)}")[0] for e in subject.examples],
                [alpha],
                heads=[best],
            )[best]
            score = getattr(head_set.scores, sign)[at][best]
            torch.testing.assert_close(score, naive, rtol=0.02, atol=1e-9)
            assert score > 0


def test_unsteered_it_generates_the_tokens_of_transformers_own_generate(subject: Subject) -> None:
    ids = subject.ids(subject.prompt)
    whole = subject.plain.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        do_sample=False,
        max_new_tokens=8,
        pad_token_id=50256,
    )
    completion = subject.model.generate(subject.prompt, max_tokens=8)[0]
    assert list(completion.token_ids) == whole[0, len(ids) :].tolist()
    assert completion.steering.applied is False


@pytest.fixture(scope="module")
def expected(subject: Subject) -> dict[str, tuple[list[int], list[float]]]:
    """Return the tokens and log-probabilities of the naive two runs, by target."""
    runs = {}
    for target in ("none", *TARGETS):
        heads = {} if target == "none" else subject.heads(target)
        tokens, logits = oracle.generate(
            subject.plain, subject.ids(subject.prompt), heads, N_TOKENS
        )
        runs[target] = tokens, logits.log_softmax(-1)[range(N_TOKENS), tokens].tolist()
    return runs


def test_steered_it_generates_the_tokens_of_the_naive_two_runs(
    subject: Subject, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    """All three ways in one batch."""
    steers = ["none", *TARGETS]
    sets = [None, *(subject.found[t] for t in TARGETS)]
    done = subject.model.generate(
        [subject.prompt] * 3, steer=steers, head_set=sets, max_tokens=N_TOKENS, ignore_eos=True
    )
    for steer, completion in zip(steers, done, strict=True):
        assert list(completion.token_ids) == expected[steer][0]
        assert completion.logprobs == pytest.approx(expected[steer][1], abs=TOLERANCE)
        assert completion.steering.applied is (steer != "none")
    for target in TARGETS:
        changed = max(
            abs(a - b) for a, b in zip(expected[target][1], expected["none"][1], strict=True)
        )
        assert changed > 20 * TOLERANCE, "steering makes no difference"


def test_a_real_server_steers_it_by_the_name_of_a_set(
    subject: Subject, expected: dict[str, tuple[list[int], list[float]]]
) -> None:
    arguments = (
        "--model",
        str(subject.folder),
        "--head-sets",
        str(subject.head_sets),
        "--served-model-name",
        "gpt2",
    )
    with serving(*arguments) as running, httpx.Client(base_url=running.url, timeout=120) as client:
        body = {"prompt": subject.prompt, "max_tokens": N_TOKENS, "ignore_eos": True, "logprobs": 0}
        for steer in ("none", *TARGETS):
            asked = "none" if steer == "none" else {"target": steer, "head_set": steer}
            answer = client.post("/generate", json={**body, "steer": asked}).json()
            tokens, logprobs = expected[steer]
            assert [score["id"] for score in answer["logprobs"]] == tokens
            assert [score["logprob"] for score in answer["logprobs"]] == pytest.approx(
                logprobs, abs=TOLERANCE
            )
            assert answer["text"] == subject.model.loaded.tokenizer.decode(
                tokens, skip_special_tokens=True
            )
            assert answer["model"] == "gpt2"
            steering = answer["steering"]
            assert steering["applied"] is (steer != "none")
            assert steering["head_set"] == (None if steer == "none" else steer)
            if steer != "none":
                assert (steering["beta_plus"], steering["beta_minus"]) == (BETA_PLUS, BETA_MINUS)
                assert steering["n_heads"] == sum(
                    beta != 0 for beta in subject.heads(steer).values()
                )
        assert [each["name"] for each in client.get("/v1/head_sets").json()["data"]] == [
            "context",
            "parametric",
        ]


def test_its_head_sets_refuse_another_model(subject: Subject) -> None:
    other = juice.load("mini", head_sets=subject.head_sets)
    with pytest.raises(HeadSetMismatchError, match="does not fit the loaded mini"):
        other.generate("x", steer="context", max_tokens=1)
    with pytest.raises(HeadSetMismatchError):
        other.generate("x", steer="context", head_set=subject.found["context"], max_tokens=1)

    def identity() -> juice.head_set.ModelIdentity:
        return identify_model(
            subject.plain, resolve(subject.plain), model_id="another", revision=None, folder=None
        )

    subject.found["context"].check_fits(identity())
    row = subject.plain.transformer.h[5].mlp.c_fc.weight.data[0]
    row.mul_(1.01)
    try:
        with pytest.raises(HeadSetMismatchError, match="fingerprint"):
            subject.found["context"].check_fits(identity())
    finally:
        row.div_(1.01)


def test_the_context_wins_more_under_context_steering_than_under_parametric(
    subject: Subject, request: pytest.FixtureRequest
) -> None:
    """The mean of log p(context answer) - log p(parametric answer) decides.

    It is taken over the conflict prompts on which the heads were found.
    """
    if "random" in request.node.name:
        pytest.skip("random weights know no capitals")
    model, preferences = subject.model, {}
    for target in TARGETS:
        requests = []
        for example in subject.examples:
            prompt = example.prompts["substitution"]
            watch = tuple(model.first_token(prompt, example.answer(t)) for t in TARGETS)
            requests.append(
                model.request(
                    prompt, steer=target, head_set=subject.found[target], max_tokens=1, watch=watch
                )
            )
        preferences[target] = [c.watched[0] - c.watched[1] for c in model.engine.generate(requests)]
    means = {
        target: sum(preference) / len(preference) for target, preference in preferences.items()
    }
    assert means["context"] > means["parametric"], preferences
