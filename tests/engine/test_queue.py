"""The fair queue against a slow oracle, and its promises one by one."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from juice.engine import queue as fair_queue
from juice.engine.queue import MAX_OVERTAKEN, FairQueue, Work, with_room


def queue_of(n: int, *, max_bytes: int = 0, max_waiting: int = 1000) -> FairQueue:
    """Return a queue in which one client may hold n rows."""
    return FairQueue(n_rows=with_room(n), max_bytes=max_bytes, max_waiting=with_room(max_waiting))


def work(client: str, cost: float = 1, **options: int) -> Work:
    return Work(client=client, cost=cost, **options)


def finish(queue: FairQueue, given: Work, unused: float = 0) -> None:
    queue.free(given, n_rows=given.n_rows, n_bytes=given.n_bytes, unused=unused)


def served(queue: FairQueue, n: int) -> list[Work]:
    """Run n pieces of work one after the other, and return them in order."""
    done = []
    for _ in range(n):
        taken = queue.take()
        assert taken is not None
        finish(queue, taken)
        done.append(taken)
    return done


def started(queue: FairQueue) -> list[Work]:
    """Return all that may start now."""
    return list(iter(queue.take, None))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 32, 64])
def test_one_client_alone_has_all_rows_and_each_newcomer_finds_one(n: int) -> None:
    queue = queue_of(n)
    queue.put([work("a") for _ in range(500)])
    assert len(started(queue)) == n
    queue.put([work("b")])
    assert [each.client for each in started(queue)] == ["b"]
    for i in range(10):
        queue.put([work(f"c{i}")])
    assert len(started(queue)) == with_room(n) - n - 1
    assert queue.n_running == with_room(n)


def test_clients_that_always_wait_get_the_same_by_what_it_costs() -> None:
    queue = queue_of(1)
    queue.put([work("dear", 30) for _ in range(1000)])
    queue.put([work("cheap", 10) for _ in range(1000)])
    counts = Counter(each.client for each in served(queue, 400))
    assert counts == {"dear": 100, "cheap": 300}


def test_what_was_not_used_is_not_counted() -> None:
    """Many ask for far more tokens than they get."""
    queue = queue_of(1)
    for client in ("asks", "takes"):
        queue.put([work(client, 100) for _ in range(1000)])
    counts = Counter[object]()
    for _ in range(300):
        taken = queue.take()
        assert taken is not None
        finish(queue, taken, unused=50 if taken.client == "asks" else 0)
        counts[taken.client] += 1
    assert abs(counts["asks"] - 200) <= 1


def test_who_comes_later_owes_nothing_and_has_saved_nothing() -> None:
    queue = queue_of(1)
    queue.put([work("a") for _ in range(500)])
    queue.put([work("b")])
    served(queue, 200)
    queue.put([work("b") for _ in range(500)])
    counts = Counter(each.client for each in served(queue, 100))
    assert abs(counts["a"] - counts["b"]) <= 1


def test_a_lower_priority_goes_first_until_others_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(fair_queue.time, "monotonic", lambda: now)
    queue = queue_of(1)
    queue.put([work("slow", priority=1)])
    queue.put([work("fast", priority=0) for _ in range(3)])
    assert [each.client for each in served(queue, 2)] == ["fast", "fast"]
    now += 25
    queue.put([work("fast", priority=0)])
    queue.put([work("fast", priority=-1)])
    order = [(each.client, each.priority) for each in served(queue, 4)]
    assert order.index(("slow", 1)) < 3, "nothing waits for ever"


def test_age_lets_nobody_of_the_same_priority_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills: a backlog whose age puts it before every later client."""
    now = 1000.0
    monkeypatch.setattr(fair_queue.time, "monotonic", lambda: now)
    queue = queue_of(1)
    queue.put([work("a") for _ in range(100)])
    served(queue, 10)
    now += 100
    queue.put([work("b") for _ in range(100)])
    counts = Counter(each.client for each in served(queue, 20))
    assert abs(counts["a"] - counts["b"]) <= 1


def test_work_of_several_rows_is_not_passed_for_ever() -> None:
    """Kills: choices that start together never starting beside another client's backlog."""
    queue = queue_of(32)
    queue.put([work("a") for _ in range(1000)])
    running = started(queue)
    together = work("b", n_rows=8, size=8)
    queue.put([together, work("b")])
    n_passed = 0
    while together not in running:
        finish(queue, running.pop(0))
        running += started(queue)
        n_passed += 1
        assert n_passed < 2 * MAX_OVERTAKEN


def test_what_a_client_holds_itself_stops_no_one_else() -> None:
    queue = queue_of(64, max_bytes=100)
    queue.put([work("a", n_bytes=60)])
    assert len(started(queue)) == 1
    queue.put([work("a", n_bytes=35)])
    for _ in range(3 * MAX_OVERTAKEN):
        queue.put([work("b", n_bytes=1)])
        (chosen,) = started(queue)
        finish(queue, chosen)
    assert queue.n_running == 1


def test_clients_that_came_once_are_forgotten() -> None:
    queue = queue_of(1)
    for i in range(5 * fair_queue.MAX_REMEMBERED):
        queue.put([work(str(i))])
        served(queue, 1)
    assert queue.n_clients <= fair_queue.MAX_REMEMBERED + 1


def test_within_a_client_the_lower_priority_goes_first_then_the_older() -> None:
    queue = queue_of(1)
    given = [work("a", priority=p) for p in (1, 0, 1, 0)]
    queue.put(given)
    assert served(queue, 4) == [given[1], given[3], given[0], given[2]]


def test_work_that_does_not_fit_lets_others_pass_but_not_for_ever() -> None:
    queue = queue_of(8, max_bytes=100)
    running = work("a", n_bytes=60)
    queue.put([running])
    assert queue.take() is running
    large = work("b", n_bytes=50)
    queue.put([large])
    queue.put([work("c", n_bytes=1) for _ in range(1000)])
    n_passed = 0
    while (found := queue.take()) is not None:
        assert found.client == "c"
        finish(queue, found)
        n_passed += 1
    assert n_passed == MAX_OVERTAKEN
    finish(queue, running)
    assert queue.take() is large


def test_a_client_leaves_bytes_for_others_and_what_is_alone_always_fits() -> None:
    queue = queue_of(64, max_bytes=90)
    queue.put([work("a", n_bytes=10) for _ in range(20)])
    assert len(started(queue)) == 8
    queue.put([work("b", n_bytes=10)])
    assert [each.client for each in started(queue)] == ["b"]
    other = queue_of(4, max_bytes=10)
    other.put([work("a", n_bytes=1000)])
    assert other.take() is not None


def test_a_client_may_be_bounded() -> None:
    queue = queue_of(8)
    queue.put([work("a", max_running=2) for _ in range(9)])
    queue.put([work("b") for _ in range(3)])
    assert Counter(each.client for each in started(queue)) == {"a": 2, "b": 3}


def test_one_client_cannot_fill_what_waits() -> None:
    queue = queue_of(1, max_waiting=40)
    queue.put([work("a") for _ in range(10)])
    assert not queue.excess("a", 30)
    queue.put([work("a") for _ in range(30)])
    assert queue.excess("a", 1) == 1
    assert not queue.excess("b", 5)
    assert queue.excess("b", 6)
    assert queue.excess("b", 3, most=None) == 0


def test_a_bound_on_what_waits_of_a_client_holds_beside_what_starts_at_once() -> None:
    """Kills: the first request of a client that is larger than its bound."""
    queue = queue_of(8)
    assert not queue.excess("a", 10, most=2)
    assert queue.excess("a", 11, most=2) == 1
    assert queue.excess("a", 11, most=2, max_running=3) == 6
    queue.put([work("a") for _ in range(10)])
    started(queue)
    assert queue.excess("a", 1, most=2) == 1
    assert not queue.excess("b", 10, most=2)


def test_what_was_let_in_while_nothing_waited_takes_no_others_place() -> None:
    queue = queue_of(1, max_waiting=8)
    assert not queue.excess("a", 1000)
    queue.put([work("a") for _ in range(1000)])
    assert queue.excess("a", 1)
    assert not queue.excess("b", 1)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_and_nothing_is_lost_whatever_comes(seed: int) -> None:
    """Random clients put, drop and finish work; rows and bytes are counted beside the queue."""
    rng = Random(seed)
    queue = queue_of(rng.choice([1, 3, 8, 16]), max_bytes=100)
    waiting, running = set[Work](), set[Work]()
    n_done = n_put = 0
    for _ in range(2000):
        match rng.randrange(4):
            case 0 if len(waiting) < 200:
                client = rng.choice("abcde")
                new = [
                    work(client, rng.randint(1, 9), n_bytes=rng.randint(0, 60),
                         n_rows=rng.choice([1, 1, 1, 2]), priority=rng.choice([0, 0, 1]))
                    for _ in range(rng.randint(1, 5))
                ]  # fmt: skip
                queue.put(new)
                waiting |= {*new}
                n_put += len(new)
            case 1 if waiting and rng.random() < 0.2:
                chosen = rng.choice(sorted(waiting))
                assert queue.drop(chosen)
                assert not queue.drop(chosen)
                waiting.remove(chosen)
                n_done += 1
            case 2 if running:
                chosen = rng.choice(sorted(running))
                finish(queue, chosen, rng.random() * chosen.cost)
                running.remove(chosen)
                n_done += 1
            case _:
                if (taken := queue.take()) is not None:
                    waiting.remove(taken)
                    running.add(taken)
        n_rows = sum(each.n_rows for each in running)
        assert (queue.n_running, queue.n_waiting) == (n_rows, len(waiting))
        assert n_rows <= max(queue.n_rows, 2)
        assert sum(each.n_bytes for each in running) <= 100 or len(running) == 1
    while waiting or running:
        while (taken := queue.take()) is not None:
            waiting.remove(taken)
            running.add(taken)
        assert running, "something waits, and nothing that runs could make room"
        chosen = min(running)
        finish(queue, chosen)
        running.remove(chosen)
        n_done += 1
    assert n_done == n_put
