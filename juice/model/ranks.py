"""The ranks of a sharded model: rank 0 loads it, the others are its children and follow it.

Everything is decided on rank 0: which requests run, with which tokens, and what is sampled. Only
what touches a rank's own weights or keys and values must happen on all ranks, in the same order: a
method marked `everywhere` is first sent to the other ranks, through a pipe to each, and then called
here, so that their collectives meet. Batches travel, requests do not.

A rank that fails between two collectives leaves the others waiting, so nothing goes on after it:
when one ends, or a call fails on any of them, all end, and `RankLostError` gives the reason. Calls
without collectives that may fail on some ranks, for lack of memory, are put to a vote instead
(`attempt`).
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from itertools import count
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch.distributed as dist
from torch import nn

from juice.errors import RankLostError, UnsupportedModelError, UsageError
from juice.model.sharding import Shard, join_group, meeting_place, own_device
from juice.model.wire import Address, Call, Failure, packed

STDERR = 2  # what a rank prints is not part of rank 0's output
STOP_S = 10.0
# Time to learn why a call failed: most often another rank has ended.
SETTLE_S = 5.0
P = ParamSpec("P")
R = TypeVar("R")
Listener = Callable[[RankLostError], object]
_GONE = object()


class Ranks:
    """The other ranks, seen from rank 0.

    Args:
        n_ranks: The number of ranks, rank 0 included.
        program: The module that the other ranks run.
        job: What they are sent first, with the port where the ranks meet.
        device: `auto`, or the kind of device that every rank takes one of.

    Raises:
        UsageError: This process already belongs to a group, or the devices do not suffice.
        RankLostError: A rank ended before all had started.
    """

    def __init__(self, n_ranks: int, program: str, job: Any, *, device: str = "auto") -> None:
        if dist.is_torchelastic_launched() or dist.is_initialized():
            raise UsageError(
                "this process already belongs to a group: "
                "close the sharded model, or start the process without torchrun"
            )
        self.n_ranks = n_ranks
        self.lost: RankLostError | None = None
        self._is_closed = self._is_following = False
        self._turn, self._change = threading.RLock(), threading.Condition()
        self._listeners: list[Listener] = []
        self._numbers = count()
        self._caller: int | None = None  # the thread whose call runs on every rank now
        place = own_device(device, Shard(0, n_ranks))
        self._store = meeting_place(Shard(0, n_ranks))
        self._others = [_Other(Shard(rank, n_ranks), program) for rank in range(1, n_ranks)]
        atexit.register(self.close)
        try:
            for other in self._others:
                threading.Thread(
                    target=other.listen,
                    args=(self._lose,),
                    name=f"juice-rank-{other.shard.rank}",
                    daemon=True,
                ).start()
            self._send((self._store.port, job))
            self._gather()  # all have started: joining does not wait for one that never comes
            join_group(Shard(0, n_ranks), self._store, place)
        except BaseException:
            self.close()
            raise

    def wait_until_loaded(self) -> None:
        """Wait until every rank has its part of the model.

        Raises RankLostError, with the reason, when one cannot.
        """
        self._gather()
        self._is_following = True

    def call(self, address: Address, own: Callable[[], R], *args: Any, **kwargs: Any) -> R:
        """Call a method on the other ranks with these arguments, and `own` here.

        If it fails here, all ranks end. Raises RankLostError.
        """
        with self._turn:
            self._send(Call(address, args, kwargs))
            self._caller = threading.get_ident()
            try:
                return own()
            except Exception as error:
                raise self._reason(f"rank 0 failed: {error!r}") from error
            except BaseException:
                self._lose("rank 0 was interrupted")
                raise
            finally:
                self._caller = None

    def attempt(
        self, address: Address, own: Callable[[], None], *args: Any
    ) -> list[Exception | None]:
        """Do as `call`, for what has no collectives and may fail on some ranks only.

        Returns the failure of each rank, or None.
        """
        with self._turn:
            self._send(Call(address, args, {}, is_attempt=True))
            failure: Exception | None = None
            try:
                own()
            except Exception as error:
                failure = error
            return [
                failure,
                *(None if text is None else MemoryError(text) for text in self._gather()),
            ]

    def peers(self, **options: Any) -> Peers:
        """Make an object on every other rank, with these options; return a handle to it."""
        number = next(self._numbers)
        self.call(Address("make"), lambda: None, number, **options)
        return Peers(self, number)

    def guard(self, model: nn.Module) -> None:
        """Make a model refuse forwards that the other ranks do not run.

        Its collectives would wait for them for ever.
        """

        def refuse(_module: nn.Module, _args: Any) -> None:
            if self._caller != threading.get_ident():
                raise UnsupportedModelError(
                    f"the model is sharded over {self.n_ranks} ranks, so only its engine runs it: "
                    "it generates, but finding heads and other analyses need a model on one "
                    "device; load it without tp"
                )

        model.register_forward_pre_hook(refuse)

    def when_lost(self, listener: Listener) -> None:
        """Call a listener, in a thread of its own, when the ranks are lost."""
        with self._change:
            self._listeners.append(listener)
            if self.lost is not None:
                _tell(listener, self.lost)

    def close(self) -> None:
        """End the other ranks; kill them if they do not follow yet."""
        with self._change:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        # Whoever has the turn may be waiting for a rank that is gone.
        has_turn = self._is_following and self.lost is None and self._turn.acquire(timeout=STOP_S)
        for other in self._others:
            other.stop() if has_turn else other.process.kill()
        # NCCL would wait for a rank that is gone.
        if dist.is_initialized() and (has_turn or dist.get_backend() == "gloo"):
            dist.destroy_process_group()
        deadline = time.monotonic() + STOP_S
        for other in self._others:
            other.join(deadline)
        if has_turn:
            self._turn.release()

    def _gather(self) -> list[Any]:
        """Return the next answer of every other rank.

        Raises RankLostError when one ends before it answers.
        """
        answers = [other.answers.get() for other in self._others]
        if _GONE in answers:
            raise self._reason("a rank has ended")
        return answers

    def _send(self, message: Any) -> None:
        if self.lost is not None or self._is_closed:
            raise RankLostError(str(self.lost or "the model was closed"))
        content = packed(message)
        try:
            for other in self._others:
                other.link.send_bytes(content)
        except OSError as error:
            raise self._reason(f"a rank cannot be reached: {error}") from error

    def _reason(self, otherwise: str) -> RankLostError:
        """Return why nothing goes on: a rank that ended is the cause of any failure here."""
        with self._change:
            self._change.wait_for(lambda: self.lost is not None, SETTLE_S)
        self._lose(otherwise)
        return RankLostError(str(self.lost or "the model was closed"))

    def _lose(self, reason: str) -> None:
        with self._change:
            if self.lost is not None or self._is_closed:
                return
            self.lost = RankLostError(
                f"{reason}; a model over {self.n_ranks} ranks needs them all: start it again"
            )
            self._change.notify_all()
            for listener in self._listeners:
                _tell(listener, self.lost)
        for other in self._others:
            other.process.kill()


class _Other:
    """Another rank: its process, and the pipe to it."""

    def __init__(self, shard: Shard, program: str) -> None:
        self.shard = shard
        self.answers: SimpleQueue[Any] = SimpleQueue()
        ours, theirs = socket.socketpair()
        # Signals that a terminal or supervisor sends to every process are for rank 0: it then ends
        # the others.
        blocked = signal.pthread_sigmask(
            signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        )
        try:
            self.process = subprocess.Popen(  # noqa: S603 -- our own module
                [
                    sys.executable,
                    "-m",
                    program,
                    str(theirs.fileno()),
                    str(shard.rank),
                    str(shard.n_ranks),
                ],
                # PyTorch and transformers take the rank's device from this variable.
                env={**os.environ, "LOCAL_RANK": str(shard.rank)},
                stdin=subprocess.DEVNULL,
                stdout=STDERR,
                pass_fds=(theirs.fileno(),),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        theirs.close()
        self.link = Connection(ours.detach())

    def listen(self, lose: Callable[[str], None]) -> None:
        """Collect the rank's answers until it ends."""
        reason = None
        with suppress(EOFError, OSError):
            while True:
                answer = self.link.recv()
                if isinstance(answer, Failure):
                    reason = answer.text
                else:
                    self.answers.put(answer)
        status = self.process.wait()
        lose(
            f"rank {self.shard.rank} "
            + (f"ended with status {status}" if reason is None else f"failed: {reason}")
        )
        self.answers.put(_GONE)

    def stop(self) -> None:
        with suppress(OSError):
            self.link.send_bytes(packed(None))

    def join(self, deadline: float) -> None:
        """Wait for the process until `deadline` on the monotonic clock, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        self.process.kill()
        self.process.wait()


class Peers:
    """The same object on every other rank; `attribute` names a part of it."""

    def __init__(self, ranks: Ranks, number: int, attribute: str | None = None) -> None:
        self._ranks, self._number, self._attribute = ranks, number, attribute

    def part(self, attribute: str) -> Peers:
        """Return a handle to a part of the object."""
        return Peers(self._ranks, self._number, attribute)

    def call(self, method: str, own: Callable[[], R], *args: Any, **kwargs: Any) -> R:
        """Call a method on the other ranks, and `own` here."""
        return self._ranks.call(
            Address(method, self._number, self._attribute), own, *args, **kwargs
        )

    def attempt(self, method: str, own: Callable[[], None], *args: Any) -> list[Exception | None]:
        """Try a method on the other ranks, and `own` here; return each rank's failure, or None."""
        return self._ranks.attempt(Address(method, self._number, self._attribute), own, *args)

    def drop(self) -> None:
        """Make the other ranks, if any are left, forget the object."""
        with suppress(RankLostError):
            self._ranks.call(Address("drop"), lambda: None, self._number)


class Mirrored(Protocol):
    """An object that may have peers: on rank 0 of a sharded model it does."""

    peers: Peers | None


M = TypeVar("M", bound=Mirrored)


def everywhere(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Make a method also run on the peers of its object."""

    @wraps(method)
    def run(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        own = partial(method, self, *args, **kwargs)
        return (
            own() if self.peers is None else self.peers.call(method.__name__, own, *args, **kwargs)
        )

    return run


def _tell(listener: Listener, lost: RankLostError) -> None:
    threading.Thread(target=listener, args=(lost,), daemon=True).start()
