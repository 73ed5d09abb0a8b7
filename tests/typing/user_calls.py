"""What a user writes. A type checker must refuse the lines that end in `# wrong`, and no other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import juice


def load() -> juice.SteeredModel:
    juice.load("mini", device="cpu", dtype="bfloat16", limits=juice.Limits(max_batch=8))
    juice.load("mini", device_map={"": "cpu"}, offload_folder="weights", quantization="bnb-4bit")
    juice.load("mini", devise="cpu")  # wrong
    juice.load("mini", tp="2")  # wrong
    return juice.load(Path("models/mine"), head_sets=Path("head_sets"))


def generate(model: juice.SteeredModel, head_set: juice.HeadSet) -> list[str]:
    done = model.generate("x", steer="context", strength=0.5, max_tokens=8, stop=("\n", "."))
    done += model.generate(["x", "y"], steer=["none", "parametric"], temperature=[0.0, 1.0], seed=1)
    done += model.generate("x", steer=juice.Steer(target="context", head_set=head_set, beta_plus=2))
    done += model.generate(["x", "y"], head_set=["context", head_set], stop=["a", ("b", "c")])
    model.generate("x", steer="contxt")  # wrong
    model.generate("x", steering="context")  # wrong
    model.generate("x", temperature="hot")  # wrong
    model.generate("x", max_tokens=1.5)  # wrong
    model.generate("x", logit_bias={"a": 1.0})  # wrong
    juice.Steer(target="memory")  # wrong
    by_sign = {"plus": [(1, 2)], "minus": [(2, 0)]}
    juice.Steer(target="context", heads=by_sign, beta_plus=2, beta_minus=-1)
    juice.Steer(coefficients=[(1, 2, 0.5)], positions=juice.FirstGenerated(first_n_generated=2))
    juice.Steer(coefficients=[(1, 2)])  # wrong
    juice.Steer(target="context", strength=(1.0, 0.5), positions="last")
    juice.Steer(target="context", positions="end")  # wrong
    juice.Steer(target="context", strength=("1",))  # wrong
    return [one.text for one in done]


def stream(model: juice.SteeredModel) -> list[str]:
    model.stream("x", steer="context", max_token=8)  # wrong
    model.stream(["x", "y"])  # wrong
    best: list[tuple[str, float]] = model.next_token("x", top=3, steer="parametric")
    model.next_token("x", temprature=1.0)  # wrong
    return [*model.stream("x", steer="context", max_tokens=8), *(token for token, _ in best)]


async def at_the_same_time(model: juice.SteeredModel) -> str:
    first, second = await asyncio.gather(
        model.agenerate("x", steer="context"),
        model.agenerate(["y", "z"], temperature=1.0, top_p=0.9),
    )
    await model.agenerate("x", temprature=1.0)  # wrong
    async for piece in model.astream("x", steer="parametric", max_tokens=4):
        print(piece)
    return first[0].text + second[1].text


def find(model: juice.SteeredModel) -> juice.HeadSet:
    examples = juice.read_examples("mini")
    found = juice.identify(model, examples, target="parametric", top_k=5, alphas_plus=(0.5, 1, 2))
    juice.identify(model, [{"subject": "Peru"}], target="context")
    juice.identify(model, "mini", target="context")
    juice.identify(model, [1, 2], target="context")  # wrong
    juice.identify(model, examples, target="memory")  # wrong
    juice.identify(model, examples, target="context", topk=5)  # wrong
    tuned = juice.tune(model, found, examples, method="june")
    by_hand = model.make_head_set(name="mine", target="context", plus=[(4, 7)], beta_plus=2.0)
    store = juice.evaluate(model, examples, "report", methods=("original", "juice"), limit=50)
    print(store.folder, by_hand)
    juice.evaluate(model, examples, "report", methods=("magic",))  # wrong
    return tuned


with juice.load("mini") as opened:
    report: juice.Completion = opened.generate("x", steer="parametric")[0]
    print(report.steering.applied, report.steering.beta_minus, report.token_ids, report.logprobs)
    print(report.tokns)  # wrong
