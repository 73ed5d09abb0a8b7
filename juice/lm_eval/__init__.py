"""The model `juice` of EleutherAI's lm-evaluation-harness: any of its tasks, steered.

Importing this registers the model for `lm_eval.simple_evaluate(model="juice", ...)`. The harness
finds no models of other packages by itself, so `python -m juice.lm_eval` is its command line with
this model added.
"""

try:
    from juice.lm_eval.model import JuiceLM
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    raise ImportError(
        "juice.lm_eval needs the package lm-eval; "
        "install it with: pip install 'juice-steering[lm-eval]'"
    ) from error

__all__ = ["JuiceLM"]
