"""A small Llama on the engine that is tested here: vLLM where it is installed, else ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import juice
from juice.engine.contract import Engine
from tests.support import tiny
from tests.support.on_vllm import ON_CPU, ONE_PROCESS, SMALL, fork_vllms_processes, wide

ENGINE = "vllm" if find_spec("vllm") else "own"
LIMITS = SMALL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what starts no engine where it is vLLM's turn; `make test` runs it."""
    if ENGINE == "own":
        return
    kept, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_here = item.path.parent == Path(__file__).parent
        starts_one = "models" in getattr(item, "fixturenames", ())
        (left_out if is_here and not starts_one else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True, scope="session")
def forked() -> None:
    """Start vLLM's processes without their imports, which take 12 seconds each time."""
    if ENGINE == "vllm":
        fork_vllms_processes()


@pytest.fixture(scope="session")
def network() -> PreTrainedModel:
    return wide("Llama").build()


@pytest.fixture(scope="session")
def models(
    network: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], juice.SteeredModel]]:
    """Return what gives the model on an engine; each is started once, which vLLM takes long for."""
    folder = tiny.save(tmp_path_factory.mktemp("model"), network)
    started = {**ON_CPU, "distributed_executor_backend": ONE_PROCESS}
    vllm = {"engine": "vllm", "window": "all", "vllm_args": started}
    with ExitStack() as stack:

        @cache
        def on(engine: str) -> juice.SteeredModel:
            each: dict[str, Any] = vllm if engine == "vllm" else {}
            return stack.enter_context(juice.load(folder, dtype="float32", limits=LIMITS, **each))

        yield on


@pytest.fixture(params=[ENGINE])
def model(
    request: pytest.FixtureRequest, models: Callable[[str], juice.SteeredModel]
) -> juice.SteeredModel:
    return models(request.param)


@pytest.fixture
def engine(model: juice.SteeredModel) -> Engine:
    return model.engine
