"""vLLM's processes: they are started, watched and ended here.

A start fails where vLLM's configuration lacks anything that steering needs, whoever makes it. vLLM
says of a refused model only that it was refused, so the reason travels from its worker processes to
ours. `numeric` names the arguments that decide the numbers that a request gets alone.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from juice.errors import JuiceError, UnsupportedModelError, UsageError, first_line, first_problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

VARIABLE = "_JUICE_REFUSAL"


@contextmanager
def refusals() -> Iterator[Callable[[], str]]:
    """Let workers that start within say why they refuse a model; yields what returns the reason."""
    with TemporaryDirectory(prefix="juice-") as folder:
        file = Path(folder) / "reason"
        os.environ[VARIABLE] = str(file)
        try:
            yield lambda: file.read_text(encoding="utf-8") if file.exists() else ""
        finally:
            del os.environ[VARIABLE]


@contextmanager
def told() -> Iterator[None]:
    """Pass on the first line of what is raised within, if another process waits for it."""
    try:
        yield
    except Exception as error:
        if file := os.environ.get(VARIABLE):
            Path(file).write_text(str(error).partition("\n")[0], encoding="utf-8")
        raise


SHUTDOWN_S = 15.0  # before vLLM kills what is left of its processes
WATCH_S = 0.25  # between looks at whether they live


def start(arguments: AsyncEngineArgs, statistics: Callable[[Any, int], Any]) -> AsyncLLM:
    """Start vLLM, within the event loop that is to run it.

    Args:
        arguments: Its options.
        statistics: Makes the logger of its statistics.

    Raises:
        UsageError: It does not accept its options.
        UnsupportedModelError: The model cannot be steered in it.
        JuiceError: It does not start.
    """
    with refusals() as refused:
        try:
            return AsyncLLM.from_engine_args(arguments, stat_loggers=[statistics])
        except ValidationError as error:
            field, problem = first_problem(error)
            raise UsageError(
                f"vLLM does not accept {field or 'this model with its options'}: {problem}"
            ) from error
        except ValueError as error:
            raise UsageError(f"vLLM does not accept its options: {first_line(error)}") from error
        except Exception as error:
            if reason := refused():
                raise UnsupportedModelError(reason) from error
            raise JuiceError(
                f"vLLM did not start; its log, above, has the reason: {first_line(error)}"
            ) from error


async def watch(llm: AsyncLLM, lose: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call `lose` once a process has ended that should not have."""
    while not llm.errored:
        await asyncio.sleep(WATCH_S)
    if (told := lose()) is not None:
        told()


def stop(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    """End what waits for vLLM, its processes, and the loop."""
    with suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(1)
    llm.shutdown(timeout=SHUTDOWN_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1)
    if not thread.is_alive():
        loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


PROCESSOR = "juice.engine.vllm.state:RowWriter"
STRUCTURES = "juice.engine.vllm.state:StructureProcessor"
SCHEDULER = "juice.engine.vllm.patches.salting_scheduler"
# The names by which users of a plain `vllm serve` give the processor and the scheduler.
PUBLIC_PROCESSOR, PUBLIC_SCHEDULER = "juice_server.vllm:RowWriter", "juice_server.vllm.scheduler"


def check_config(config: VllmConfig) -> None:
    """Raise UnsupportedModelError for a configuration under which steering could be wrong."""
    if config.scheduler_config.scheduler_cls not in (SCHEDULER, PUBLIC_SCHEDULER):
        raise UnsupportedModelError(
            "prefix caching would share what is steered differently, and requests that cannot be "
            f"steered would not end alone: start vLLM with --scheduler-cls {PUBLIC_SCHEDULER}"
        )
    processors = config.model_config.logits_processors or []
    if not {PROCESSOR, PUBLIC_PROCESSOR} & set(map(str, processors)):
        raise UnsupportedModelError(
            f"no request would be steered: start vLLM with --logits-processors {PUBLIC_PROCESSOR}"
        )
    if config.parallel_config.data_parallel_size > 1 and config.model_config.is_moe:
        raise UnsupportedModelError(
            "replicas that share experts agree on the tokens of a step, and companions are more: "
            "leave out data parallelism, or start servers apart"
        )
    if config.aux_output_config.enable_return_routed_experts:
        raise UnsupportedModelError(
            "the experts of companions would be returned with those of rows: leave out "
            "--enable-return-routed-experts"
        )
    if config.kv_transfer_config is not None:
        raise UnsupportedModelError(
            "keys and values that are kept or sent by their tokens alone would be shared by what "
            "is steered differently: leave out the connector (--kv-transfer-config)"
        )
    if is_breakable_cudagraph_enabled() and not config.use_v2_model_runner:
        raise UnsupportedModelError(
            "vLLM's V1 model runner would replay breakable graphs of steps that are not steered: "
            "take V2 (VLLM_USE_V2_MODEL_RUNNER=1), or start with VLLM_USE_BREAKABLE_CUDAGRAPH=0"
        )
    if config.speculative_config is not None:
        raise UnsupportedModelError(
            "drafts would be checked with steering that they were not made with: leave out "
            "speculative decoding"
        )
    if config.lora_config is not None:
        raise UnsupportedModelError(
            "heads were found without adapters: leave out LoRA, or merge it into the weights"
        )


# Where the model lies, how much fits, and what is reported: no number depends on them.
OTHERS = frozenset(
    {
        "model",
        "revision",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_model_len",
        "max_logprobs",
        "disable_log_stats",
        "use_tqdm_on_load",
    }
)


def numeric(arguments: AsyncEngineArgs) -> dict[str, str]:
    """Return the arguments that are not at their defaults and may change numbers, as text."""
    given = {field.name: getattr(arguments, field.name) for field in fields(arguments)}
    defaults = AsyncEngineArgs(model=arguments.model)
    return {
        name: str(value)
        for name, value in given.items()
        if name not in OTHERS and value != getattr(defaults, name)
    }
