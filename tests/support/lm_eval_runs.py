"""A program for an environment with lm-eval: several models on the tasks of a folder.

    python lm_eval_runs.py TASKS {"name": {"model": ..., "model_args": ...}, ...}

It prints one JSON document: by run and task, every response of every row; of a run that is refused,
the error's text.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

import juice.lm_eval  # noqa: F401 -- registers the model
from juice.errors import JuiceError


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
    folder, runs = sys.argv[1], json.loads(sys.argv[2])
    found = {name: responses(folder, run.pop("tasks"), run) for name, run in runs.items()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
