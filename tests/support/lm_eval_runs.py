"""A program for an environment with lm-eval: several models on the tasks of a folder.

    TASKS {"name": {"model": ..., "model_args": ...}, ...}

It prints one JSON document: by run and task, every response of every row; of a run that is refused,
the error's text. A model that several runs name alike is loaded once.
"""

from __future__ import annotations

import json
import logging
import sys
from functools import cache
from typing import Any

import lm_eval
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from juice.errors import JuiceError
from juice.lm_eval import model


def responses(folder: str, tasks: list[str], run: dict[str, Any]) -> dict[str, Any]:
    """Return the responses to every row, by task, or what refuses them."""
    manager = TaskManager(include_path=folder, include_defaults=False)
    try:
        done = lm_eval.simple_evaluate(
            tasks=tasks, task_manager=manager, bootstrap_iters=0, device="cpu", **run
        )
    except JuiceError as error:
        return {"error": str(error)}
    return {task: [row["resps"] for row in done["samples"][task]] for task in tasks}


def main() -> None:
    """Do every run, with the tasks that it names."""
    logging.disable(logging.WARNING)
    model.load = cache(model.load)
    evaluator.add_env_info = lambda _: None  # pip lists all that is installed, for each run
    folder, runs = sys.argv[1], json.loads(sys.argv[2])
    found = {name: responses(folder, run.pop("tasks"), run) for name, run in runs.items()}
    sys.stdout.write(json.dumps(found) + "\n")
