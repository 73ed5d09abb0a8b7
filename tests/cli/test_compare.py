"""`juice compare`: the counts of plain generation, and a verdict that follows from the interval."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from subprocess import CompletedProcess

import pytest

import juice as library
from juice.data.example import fact_keys, to_json_line
from tests.support.commands import juice

N = 12


@pytest.fixture(scope="module")
def model() -> library.SteeredModel:
    return library.load("mini")


@pytest.fixture(scope="module")
def weak(model: library.SteeredModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a set that does little."""
    folder = tmp_path_factory.mktemp("sets") / "mini" / "weak"
    made = model.make_head_set(
        name="weak", target="parametric", plus=[(5, 7)], minus=[], beta_plus=0.125
    )
    made.save(folder)
    return folder


def test_it_counts_what_plain_generation_gives(
    model: library.SteeredModel, weak: Path, tmp_path: Path
) -> None:
    examples = library.read_examples("mini", split="test")[:N]
    data = tmp_path / "some.jsonl"
    data.write_text("".join(f"{e.model_dump_json(exclude_defaults=True)}\n" for e in examples))
    done = juice("compare", "parametric", str(weak), "--data", str(data), "--json")
    found = json.loads(done.stdout)
    assert (found["n_examples"], found["sets"]) == (N, {"a": "parametric", "b": "weak"})
    steers = {
        "unsteered": "none",
        "a": "parametric",
        "b": library.Steer(target="parametric", head_set=library.HeadSet.load(weak)),
    }
    right: dict[tuple[str, str], list[float]] = {}
    for name, steer in steers.items():
        for kind in ("clean", "substitution", "coherent"):
            prompts = [e.prompts[kind] for e in examples]
            answers = model.generate(prompts, steer=steer, max_tokens=15)
            heads = [" ".join(answer.text.split()[:5]).lower() for answer in answers]
            right[name, kind] = [
                float(any(one.lower() in head for one in e.parametric_answer))
                for head, e in zip(heads, examples, strict=True)
            ]
            assert found["accuracy"][name][kind] == pytest.approx(fmean(right[name, kind]))
    conflicts = ("substitution", "coherent")
    by_set = [fmean(fmean(right[name, kind]) for kind in conflicts) for name in ("a", "b")]
    assert found["difference"] == pytest.approx(by_set[0] - by_set[1])
    low, high = found["interval"]
    assert low < found["difference"] < high


def test_facts_that_one_of_the_sets_was_found_on_are_left_out(
    model: library.SteeredModel, tmp_path: Path
) -> None:
    examples = library.read_examples("mini", split="test")[:N]
    head_set = model.head_sets.get("parametric")
    keys = fact_keys(examples)

    def compared(n_seen: int) -> CompletedProcess[str]:
        found = head_set.identification.model_copy(update={"facts": tuple(keys[:n_seen])})
        told = head_set.model_copy(update={"name": "told", "identification": found})
        told.save(tmp_path / f"told-{n_seen}")
        data = tmp_path / "some.jsonl"
        data.write_text("".join(map(to_json_line, examples)))
        sets = ("parametric", str(tmp_path / f"told-{n_seen}"))
        return juice("compare", *sets, "--data", str(data), "--json")

    done = compared(3)
    some = json.loads(done.stdout)
    assert (some["n_examples"], some["n_left_out"]) == (N - 3, 3)
    assert f"3 of {N} examples found or tuned one of the sets: left out" in done.stderr
    assert "parametric does not say which facts found it" in done.stderr
    assert "told does not say" not in done.stderr
    none = compared(N)
    assert (none.returncode, "found or tuned on all examples" in none.stderr) == (2, True)


def test_examples_that_are_too_long_or_lack_a_prompt_are_left_out_and_counted(
    tmp_path: Path,
) -> None:
    examples = [e.model_dump(exclude_defaults=True) for e in library.read_examples("mini")[:N]]
    clean, substitution, coherent = ("clean", "substitution", "coherent")
    examples[0]["prompts"][coherent] *= 400
    del examples[1]["prompts"][clean]
    for example in examples[3:]:
        del example["prompts"][coherent]
    examples[4]["prompts"] = {coherent: examples[4]["prompts"][substitution]}
    data = tmp_path / "some.jsonl"

    def compared(rows: list[dict]) -> CompletedProcess[str]:
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return juice("compare", "parametric", "parametric", "--data", str(data), "--json")

    done = compared(examples)
    found = json.loads(done.stdout)
    assert (found["n_examples"], found["n_left_out"]) == (N - 3, 3)
    assert set(found["accuracy"]["a"]) == {clean, substitution}
    assert f"1 of {N} examples are left out: a prompt is too long" in done.stderr
    assert f"few of {N - 1} examples have a prompt that is coherent (3): it is left" in done.stderr
    assert f"2 of {N} examples are left out: they lack a prompt that others have" in done.stderr
    for example, kind in zip(examples, (clean, substitution) * N, strict=False):
        example["prompts"] = {kind: "Its capital is"}
    nothing = compared(examples)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert f"none of {N} examples can be compared on" in nothing.stderr
    assert "give examples with the same conflict types" in nothing.stderr


def test_the_verdict_names_the_better_one_or_neither(weak: Path) -> None:
    given = ("--data", "mini", "--limit", "40")
    better = juice("compare", str(weak), "parametric", *given).stdout.splitlines()[-1]
    assert better.startswith("parametric is better: it wins 0.")
    same = juice("compare", "parametric", "parametric", *given).stdout.splitlines()[-1]
    assert same.startswith("neither is certainly better")


def test_two_targets_and_unknown_sets_are_refused() -> None:
    given = ("--data", "mini", "--limit", "4")
    two = juice("compare", "parametric", "context", *given)
    assert (two.returncode, "name two of one target" in two.stderr) == (2, True)
    unknown = juice("compare", "parametric", "nothing", *given)
    assert (unknown.returncode, "nothing" in unknown.stderr) == (2, True)
