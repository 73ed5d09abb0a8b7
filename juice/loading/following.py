"""What the other ranks of a sharded model run: load a part of it, then follow rank 0 to the end.

python -m juice.loading.following FILE_DESCRIPTOR RANK N_RANKS
"""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging

from juice.batching.runner import Runner
from juice.batching.slots import SlotsBrokenError
from juice.errors import JuiceError
from juice.loading.pretrained import load_model
from juice.model.loaded import LoadedModel
from juice.model.sharding import Shard, join_group, meeting_place, own_device
from juice.model.wire import Call, Failure, unpacked


class Runners:
    """The runners of this rank: one for each of rank 0's engines."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._by_number: dict[int, Runner] = {}

    def make(self, number: int, **options: Any) -> None:
        """Make a runner."""
        self._by_number[number] = Runner(self._loaded, **options)

    def drop(self, number: int) -> None:
        """Forget a runner and its cache."""
        del self._by_number[number]

    def do(self, call: Call) -> None:
        """Run a call from rank 0."""
        at = call.address
        target: Any = self if at.number is None else self._by_number[at.number]
        target = target if at.attribute is None else getattr(target, at.attribute)
        getattr(target, at.method)(*call.args, **call.kwargs)


def follow(link: Connection, shard: Shard) -> None:
    """Load a part of the model and follow rank 0 until it ends the work.

    Raises EOFError when rank 0 is gone, and any error of this rank's own.
    """
    port, job = unpacked(link.recv_bytes(), torch.device("cpu"))
    link.send("started")
    join_group(shard, meeting_place(shard, port), own_device("auto", shard))
    loaded = load_model(**job, shard=shard)
    link.send("loaded")
    runners = Runners(loaded)
    while (call := unpacked(link.recv_bytes(), loaded.device)) is not None:
        if not call.is_attempt:
            runners.do(call)
            continue
        reason = None
        try:
            runners.do(call)
        except SlotsBrokenError:
            raise
        except Exception as error:
            reason = repr(error)
        link.send(reason)
    dist.destroy_process_group()


def _end_with(link: Connection) -> None:
    """Exit when the other end of the pipe is gone, whatever this process is waiting for."""
    hung_up = select.poll()
    hung_up.register(link.fileno(), 0)
    hung_up.poll()
    os._exit(1)


def main() -> None:
    """Follow rank 0 and report a failure to it."""
    descriptor, rank, n_ranks = map(int, sys.argv[1:])
    link = Connection(descriptor)
    Thread(target=_end_with, args=(link,), daemon=True).start()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        follow(link, Shard(rank, n_ranks))
    except BaseException as error:
        with suppress(OSError):
            link.send(Failure(str(error) if isinstance(error, JuiceError) else repr(error)))
        os._exit(1)


if __name__ == "__main__":
    main()
