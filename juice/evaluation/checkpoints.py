"""Context reliance over checkpoints: does it rise and fall (the context-parametric inversion)?

Every checkpoint is asked the same facts, unsteered. `clean_accuracy` is that of the clean prompts,
the rest are means over conflict prompts: `counterfactual_accuracy` of the context answer,
`parametric_accuracy` of the other, `context_reliance`, and the last token's attention, over heads
and layers, on the context and on the subject where the question names it.

Source: Goyal et al., "Context-Parametric Inversion" (2024), figures 2 and 3b.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from juice.data.example import ConflictExample, conflict_types, context_end, examples_sha256
from juice.errors import ExampleError, ModelNotFoundError, UnsupportedModelError
from juice.evaluation.answers import Answer, accuracy_of, ask, mean
from juice.evaluation.methods import Treatment
from juice.evaluation.options import require_extra
from juice.evaluation.report.sections import write
from juice.evaluation.results import Store
from juice.evaluation.splits import domain_of, limited
from juice.formula import ConflictType, Target
from juice.loading import load
from juice.model.loaded import LoadedModel
from juice.progress import Progress, silent
from juice.steered_model import SteeredModel

N_ATTENDED = 60
N_HASHED_BYTES = 2**20


def find_checkpoints(given: Sequence[Path]) -> list[Path]:
    """Return the checkpoints in some folders, each a checkpoint or a folder of them.

    Those within a folder are in the order of the numbers in their names. Raises ModelNotFoundError
    for a folder that holds none.
    """
    found: list[Path] = []
    for folder in given:
        is_one = (folder / "config.json").exists()
        within = (path.parent for path in folder.glob("*/config.json"))
        inside = [folder] if is_one else sorted(within, key=_in_order)
        if not inside:
            raise ModelNotFoundError(
                f"{folder} holds no checkpoint; expected config.json in it or in the folders within"
            )
        found += inside
    return found


def measure_checkpoints(
    checkpoints: Sequence[Path],
    examples: Sequence[ConflictExample],
    out: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Measure every checkpoint that the folder `out` does not hold yet, and write its report.

    Args:
        checkpoints: The folders of the checkpoints, in order.
        examples: The examples that every checkpoint is asked, with conflict prompts.
        out: The folder of the report.
        device: Where the model runs, as in `juice.load`; so is `dtype`.
        dtype: The precision to run in.
        overwrite: Start anew, whatever the folder holds.
        progress: Reports how many checkpoints are measured.

    Raises:
        ExampleError: No example has a conflict prompt.
        ModelNotFoundError: A checkpoint cannot be loaded.
        OutputError: The folder cannot be written, or holds another evaluation.
        UsageError: The extra `eval` is not installed.
    """
    require_extra()
    names = [path.name for path in checkpoints]
    if len(set(names)) < len(names):
        names = [str(path) for path in checkpoints]
    if not any(t != "clean" for e in examples for t in e.prompts):
        raise ExampleError("no example has a conflict prompt; give substitution or coherent ones")
    weights = {name: _weights_sha256(path) for name, path in zip(names, checkpoints, strict=True)}
    identity = {"data_sha256": examples_sha256(examples), "checkpoints": weights, "dtype": dtype}
    store = Store.open(out, identity, overwrite=overwrite)
    with progress("checkpoints", len(names)) as advance:
        for name, path in zip(names, checkpoints, strict=True):
            store.unit("measured", name, make=partial(_measure, path, device, dtype, examples))
            advance(1)
    measured = store.results["measured"]
    store.results["checkpoints"] = [{"name": name, **measured[name]} for name in names]
    store.results["is_complete"] = True
    store.save()
    write(store)
    return store


def attention_mass(
    loaded: LoadedModel, prompt: str, spans: Sequence[tuple[int, int]]
) -> list[float]:
    """Return the last token's attention to each span of characters, mean over layers and heads.

    A token belongs to a span when it is within it, a leading space aside.
    Raises UnsupportedModelError for a model that does not run eager attention.
    """
    encoded = loaded.tokenizer(prompt, return_offsets_mapping=True)
    ids = torch.tensor([encoded["input_ids"]], device=loaded.device)
    with torch.inference_mode(), loaded.turn:
        layers = loaded.run(input_ids=ids, use_cache=False, output_attentions=True).attentions
    if not layers or layers[0] is None:
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} does not return its attention; "
            "load it with --attn-implementation eager"
        )
    last = torch.stack([layer[0, :, -1].float().mean(0) for layer in layers]).mean(0)  # [position]
    within = []
    for start, end in encoded["offset_mapping"]:
        text = prompt[start:end]
        within.append((start + len(text) - len(text.lstrip()), end))
    weighed = list(zip(last.tolist(), within, strict=True))
    return [float(sum(w for w, (a, b) in weighed if start <= a < b <= end)) for start, end in spans]


def _measure(
    path: Path, device: str, dtype: str, examples: Sequence[ConflictExample]
) -> dict[str, Any]:
    conflicts = tuple(t for t in conflict_types(examples, any) if t != "clean")
    with load(str(path), device=device, dtype=dtype, attn_implementation="eager") as model:
        answers = _answers(model, examples, conflicts, "context")
        known = _answers(model, examples, conflicts, "parametric")
        clean = _answers(model, examples, ("clean",), "parametric")
        context, subject = _attention(model.loaded, examples, conflicts)
    reliances = [r for answer in answers if (r := answer.context_reliance) is not None]
    return {
        "n": len(answers),
        "clean_accuracy": accuracy_of(clean),
        "counterfactual_accuracy": accuracy_of(answers),
        "parametric_accuracy": accuracy_of(known),
        "context_reliance": mean(reliances),
        "attention_context": context,
        "attention_subject": subject,
    }


def _answers(
    model: SteeredModel,
    examples: Sequence[ConflictExample],
    types: Sequence[ConflictType],
    judged_by: Target,
) -> list[Answer]:
    treatments = {domain_of(e): Treatment(target=judged_by) for e in examples}
    answers = ask(model, examples, types, treatments, judged_by)
    return [answer for given in answers.values() for answer in given if answer is not None]


def _attention(
    loaded: LoadedModel, examples: Sequence[ConflictExample], types: Sequence[ConflictType]
) -> tuple[float, float]:
    on_context, on_subject = [], []
    for example in limited(examples, N_ATTENDED, 0):
        for conflict_type in (t for t in types if t in example.prompts):
            prompt = example.prompts[conflict_type]
            boundary = context_end(example, conflict_type)
            if boundary is None:
                continue
            question, subject = prompt[boundary:], re.escape(example.subject)
            named = [
                (boundary + at.start(), boundary + at.end())
                for at in re.finditer(subject, question)
            ]
            text = f"{prompt} {example.opening}" if example.opening else prompt
            of_context, *of_subject = attention_mass(loaded, text, [(0, boundary), *named])
            on_context.append(of_context)
            on_subject += [sum(of_subject)] if named else []
    return mean(on_context), mean(on_subject)


def _weights_sha256(path: Path) -> str:
    """Hash the names, sizes and both ends of a checkpoint's weight files: quick at any size."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as content:
            digest.update(f"{file.name} {size} ".encode() + content.read(N_HASHED_BYTES))
            content.seek(max(0, size - N_HASHED_BYTES))
            digest.update(content.read(N_HASHED_BYTES))
    return "sha256:" + digest.hexdigest()


def _in_order(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts step-9 before step-10."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
