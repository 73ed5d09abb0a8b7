"""Requests of all lengths share the engine: counted in steps, tokens and bytes, not in seconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from threading import Event

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import juice
from juice.engine.answer import Update
from juice.engine.load_options import Limits
from juice.engine.own import scheduler as costs
from juice.engine.own.batch import ForwardBatch
from juice.engine.own.cache import SlotLayer
from juice.engine.own.sequence import Sequence
from juice.engine.own.thread import BatchingEngine
from juice.engine.request import Request
from juice.engine.text import TextStream, Transcript
from tests.support import tiny
from tests.support.mixed import TOLERANCE, steering
from tests.support.running import Collector, n_slot_bytes, random_request

LONG = 2048


@pytest.fixture(scope="module")
def model() -> juice.SteeredModel:
    """A model with a context long enough for long and short to differ."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": tiny.N_HEADS, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=tiny.VOCAB_SIZE,
        max_position_embeddings=2 * LONG,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **sizes,
        **heads,
    )
    return juice.load(LlamaForCausalLM(config).eval(), tokenizer=tiny.tiny_tokenizer())


def request(n_prompt: int, n_new: int) -> Request:
    return Request.of(
        prompt_ids=tuple(7 * i % 280 + 1 for i in range(n_prompt)),
        max_tokens=n_new,
        ignore_eos=True,
    )


class Watched:
    """An engine that records its steps: the forwards of each, and when each token comes."""

    def __init__(self, model: juice.SteeredModel, limits: Limits) -> None:
        self.engine = BatchingEngine(model.loaded, limits)
        self.steps: list[list[ForwardBatch]] = []
        self.first_steps: dict[str, int] = {}
        self.may_step = Event()
        self.may_step.set()
        step, forward = self.engine.loop.step, self.engine.loop.runner.forward

        def recorded_step() -> None:
            self.may_step.wait()
            self.steps.append([])
            step()

        def recorded(batch: ForwardBatch) -> torch.Tensor:
            self.steps[-1].append(batch)
            return forward(batch)

        self.engine.loop.step = recorded_step  # type: ignore[method-assign]
        self.engine.loop.runner.forward = recorded  # type: ignore[method-assign]

    def submit(self, name: str, asked: list[Request]) -> Collector:
        """Submit requests and record the step in which each has its first token."""
        collector, start = Collector(), len(self.steps)

        def sink(update: Update) -> None:
            index = update.index
            self.first_steps.setdefault(f"{name} {index}", len(self.steps) - start)
            collector(update)

        self.engine.submit(asked, sink)
        return collector


@pytest.fixture
def engine(model: juice.SteeredModel) -> Iterator[Watched]:
    watched = Watched(model, Limits(max_batch=64, max_prefill_tokens=256))
    yield watched
    watched.engine.stop()


def test_short_prompts_beside_a_long_one_have_their_first_token_within_three_steps(
    engine: Watched,
) -> None:
    """The prompt is that of 16,000 tokens under the default budget, an eighth of both."""
    long = engine.submit("long", [request(2000, 2)])
    while len(engine.steps) < 2:
        time.sleep(0.001)
    short = engine.submit("short", [request(30, 4)] * 8)
    short.wait(8)
    assert long.n_last == 0, "the long prompt was over too soon to compete"
    assert max(engine.first_steps[f"short {i}"] for i in range(8)) <= 3
    long.wait(1)


def test_the_prompts_of_a_step_cost_no_more_than_its_budget(engine: Watched) -> None:
    """Kills: keys left out of the cost, a share given twice."""
    rng = Random(0)
    asked = [request(rng.choice([5, 40, 300, 1500]), rng.choice([2, 30])) for _ in range(40)]
    engine.submit("all", asked).wait(40)
    costs_of_model = engine.engine.loop.scheduler.costs
    n_weights = sum(p.numel() for p in engine.engine.loaded.model.parameters())
    assert costs_of_model.keys_per_token == n_weights / (2 * 2 * tiny.N_HEADS * 8)
    prefills = 0
    for batches in engine.steps:
        cost = 0.0
        for batch in batches:
            for sequence, n in zip(batch.rows.sequences, batch.n_tokens, strict=True):
                first = int(batch.positions[batch.rows.sequences.index(sequence), 0])
                if n > 1 or first < len(sequence.request.prompt_ids):
                    # Each token attends to all before it.
                    cost += sum(1 + (first + i) / costs_of_model.keys_per_token for i in range(n))
                    prefills += 1
        assert cost <= 256 + 1
    assert prefills > 60


def test_prompts_share_a_forward_where_each_is_launched_for_long(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kills: a GPU that waits for Python, since prompts of other lengths go apart."""
    monkeypatch.setattr(costs.LoadedModel, "device", torch.device("cuda"))
    of_gpu = costs.Costs.of(model.loaded, 64)
    monkeypatch.undo()

    def n_prefills() -> int:
        watched = Watched(model, Limits(max_batch=64, max_prefill_tokens=1 << 20))
        watched.may_step.clear()  # until all are there
        asked = watched.submit("all", [request(n, 1) for n in range(190, 320, 8)])
        watched.may_step.set()
        asked.wait(17)
        watched.engine.stop()
        return sum(batch.input_ids.shape[1] > 1 for step in watched.steps for batch in step)

    on_cpu = n_prefills()
    monkeypatch.setattr(costs.Costs, "of", classmethod(lambda *_: of_gpu))
    assert on_cpu > n_prefills() == 1


@pytest.mark.parametrize("n", [10, 64, 65, 1000, 4096])
def test_rows_are_parted_by_length_in_a_time_that_grows_with_their_number(
    model: juice.SteeredModel, n: int
) -> None:
    """Kills: a second for each row that joins or leaves, in a batch as large as a GPU takes."""
    counted = Counter[str]()

    class Counting(costs.Costs):
        def of_rows(self, sequence: Sequence) -> float:
            counted["rows"] += 1
            return super().of_rows(sequence)

    of_few = Counting(keys_per_token=1e3, keys_per_forward=1e4, n_layers=2, tokens_per_forward=64.0)
    rows = sequences(model, n)
    for i, row in enumerate(rows):
        row.n_cached = 10 if i % 10 else 10_000
    parts = of_few.decodes([(row, 1) for row in rows])
    assert counted["rows"] <= 3 * n
    assert {row for part in parts for row, _ in part} == {*rows}
    assert sum(map(len, parts)) == n
    assert len(parts) >= 2
    assert all(len({row.n_cached for row, _ in part}) == 1 for part in parts)


@pytest.mark.parametrize(
    "lengths",
    [[8] * 128 + [1000], [8] + [1000] * 128, list(range(10, 1010)), [10] * 70 + [11] * 70],
    ids=["a long one", "a short one", "every length", "two lengths"],
)
def test_many_prompts_of_other_lengths_are_hardly_padded(
    model: juice.SteeredModel, lengths: list[int]
) -> None:
    """Kills: runs of as many rows each, or of rows without a gap between them."""
    few = costs.Costs(keys_per_token=1e3, keys_per_forward=1e4, n_layers=2, tokens_per_forward=64.0)
    rows = sequences(model, len(lengths))
    parts = few.prefills(list(zip(rows, lengths, strict=True)))
    assert sorted(n for part in parts for _, n in part) == lengths
    padded = sum(len(part) * max(n for _, n in part) for part in parts)
    assert padded <= 1.1 * sum(lengths)


def sequences(model: juice.SteeredModel, n: int) -> list[Sequence]:
    """Return so many requests that wait."""
    asked = Request.of(prompt_ids=(1,), max_tokens=1)
    nothing = TextStream(model.loaded.tokenizer, ())
    transcript = Transcript(asked, nothing, frozenset(), lambda _update: None)
    return [Sequence(i, asked, range(0), transcript) for i in range(n)]


def bytes_for(engine: Watched, long: int) -> int:
    """Run 31 short requests, and again beside one of `long` tokens; return what that one adds."""
    short = [request(20, 30)] * 31
    engine.submit("short", short).wait(31)
    without = n_slot_bytes(engine.engine)
    running = engine.submit("long", [request(20, long)])
    while not running.updates:
        time.sleep(0.001)
    engine.submit("again", short).wait(31)
    with_long = n_slot_bytes(engine.engine)
    for row in engine.engine.loop.shelves.rows:
        row.cancel()
    running.wait(1)
    return with_long - without


def test_a_row_that_may_grow_long_leaves_the_slots_and_reads_of_the_others_alone(
    engine: Watched,
) -> None:
    added = bytes_for(engine, LONG)
    # Its own slot, rounded up to a power of two, and one position for padding.
    assert added <= engine.engine.n_kv_bytes_per_token * (2 * LONG + 1)
    for batches in engine.steps:
        for batch in batches:
            if len(batch.rows.sequences) > 1:
                assert batch.spans[0].n_keys <= 64


def test_few_short_rows_join_one_of_three_times_their_length_and_most_do_not(
    engine: Watched,
) -> None:
    """Half of the positions are needed, by rows of 128 and more: of three rows, in four slots."""
    assert bytes_for(engine, 380) <= engine.engine.n_kv_bytes_per_token * 4 * (512 + 1)


def test_rows_of_like_length_decode_in_one_forward(engine: Watched) -> None:
    """Kills: bounds between lengths that part neighbours, whose steps read the weights twice."""
    lengths = (200, 230, 260, 300, 500)
    engine.submit("like", [request(n, 30) for n in lengths]).wait(len(lengths))
    decoding = [[b for b in step if b.input_ids.shape[1] == 1] for step in engine.steps]
    assert max(len(b.rows.sequences) for step in decoding for b in step) == len(lengths)
    assert max(map(len, decoding)) == 1


def test_a_long_row_decodes_apart_from_short_ones_of_its_own_shelf(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All may grow equally long, but one is: the others do not read as many keys."""
    monkeypatch.setattr(costs, "TOKENS_PER_FORWARD", 1)
    watched = Watched(model, Limits(max_batch=64))
    asked = [request(8, 1100)] * 6 + [request(2000, 40)]
    expected = [c.token_ids for c in model.engine.generate([request(8, 40)] * 6)]
    collector = watched.submit("all", asked)
    while not any(len(update) > 30 for update in list(collector.updates.values())):
        time.sleep(0.001)
    while 6 not in collector.updates or len(collector.updates[6]) < 40:
        time.sleep(0.001)
    for running in watched.engine.loop.shelves.rows:
        running.cancel()
    collector.wait(7)
    watched.engine.stop()
    decoding = [
        batch
        for batches in watched.steps
        for batch in batches
        if batch.input_ids.shape[1] == 1 and len(batch.rows.sequences) > 1
    ]
    assert decoding
    assert all(batch.spans[0].n_keys < 1200 for batch in decoding)
    for i in range(6):
        got = [token.id for update in collector.updates[i] for token in update.tokens]
        assert tuple(got[:40]) == expected[i]


def test_near_the_end_of_the_memory_rows_that_join_do_not_each_move_the_others(
    model: juice.SteeredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for 40 requests; 200 pass through it."""
    short = request(20, 20)
    limits = Limits(max_batch=64, kv_memory_bytes=40 * model.engine.n_kv_bytes(short))
    moved, copied = [0], SlotLayer.reshaped

    def counted(layer: SlotLayer, *arguments: object) -> torch.Tensor:
        moved[0] += 1
        return copied(layer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SlotLayer, "reshaped", counted)
    watched = Watched(model, limits)
    collector = Collector()
    watched.engine.submit([short] * 200, collector)
    collector.wait(200)
    watched.engine.stop()
    per_resize = 2 * 2  # keys and values of two layers
    assert moved[0] / per_resize <= 12


def test_a_shelf_that_shrinks_for_another_request_keeps_its_rows_apart(
    model: juice.SteeredModel,
) -> None:
    """A row decodes alone, beside steered prompts, when a long request takes the slots to spare.

    Kills: slots of before, kept while no row joins or leaves: those of a neighbour's companion.
    """
    steered = replace(request(190, 2), steering=steering({(0, 1): 2.0, (1, 2): -2.0}))
    asked, long = [request(12, 180), request(12, 2), steered, steered], request(900, 2)
    n_bytes = sum(map(model.engine.n_kv_bytes, (asked[0], steered, steered, long)))
    limits = Limits(kv_memory_bytes=n_bytes + n_bytes // 50, max_prefill_tokens=4)
    alone = [model.engine.generate([each])[0] for each in asked]
    watched, collector, beside = Watched(model, limits), Collector(), Collector()

    def sink(update: Update) -> None:
        collector(update)
        if update.index == 0 and len(collector.updates[0]) == 20:
            watched.engine.submit([long], beside)

    watched.engine.submit(asked, sink)
    collector.wait(4)
    beside.wait(1)
    watched.engine.stop()
    for i, expected in enumerate(alone):
        assert collector.completion(i).token_ids == expected.token_ids
        assert collector.completion(i).logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)


def test_an_idle_engine_gives_its_memory_back_and_goes_on(model: juice.SteeredModel) -> None:
    engine = BatchingEngine(model.loaded, Limits())
    rng = Random(1)
    asked = [random_request(rng) for _ in range(3)]
    asked = [each for each in asked if not each.steering.coefficients] or [request(5, 5)]
    first = [c.token_ids for c in engine.generate(asked)]
    assert n_slot_bytes(engine) > 0
    deadline = time.monotonic() + 20
    while n_slot_bytes(engine) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert n_slot_bytes(engine) == 0
    assert [c.token_ids for c in engine.generate(asked)] == first
    engine.stop()
