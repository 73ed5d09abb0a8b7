"""`juice convert`: a GGUF file becomes a folder that transformers, vLLM and everyone else loads."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from juice.cli import console, options

# transformers has its own tokenizer for some models, whatever the folder says.
ODD = ("cafe\u0301 \u1112\u1161\u11ab", "I'LL 1234 \n\n x\t ", "\u6f22\u5b57 \U0001f600 \u03a9")


def run(
    file: Annotated[
        Path, typer.Argument(help="The .gguf file, or the first of its parts.", metavar="FILE.gguf")
    ],
    folder: Annotated[Path, typer.Argument(help="The folder to write; new or empty.")],
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, which keeps the weights and the fingerprint of the file; bfloat16 or "
            "float16 take half the room and need head sets of their own."
        ),
    ] = "float32",
    json: options.Json = False,
) -> None:
    """Write a GGUF file as an ordinary model folder, its weights dequantised."""
    from safetensors import SafetensorError

    from juice.errors import OutputError, UsageError
    from juice.gguf import read_gguf
    from juice.model.identity import sampled_rows, stored_tokenizer
    from juice.placement import DTYPES

    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; expected {', '.join(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is not an empty folder; give another, or remove it")
    options.quiet_libraries()
    model = read_gguf(file, sampled_rows, dtype=DTYPES[dtype])
    place = folder.resolve()
    there = next(path for path in (place, *place.parents) if path.exists())
    try:
        with TemporaryDirectory(prefix=".juice-convert-", dir=there) as hidden:
            whole = Path(hidden, "model")
            model.network.save_pretrained(whole)
            model.tokenizer.save_pretrained(whole)
            read = stored_tokenizer(str(whole))
            for text in ODD:
                if read(text)["input_ids"] != model.tokenizer(text)["input_ids"]:
                    console.note(
                        f"transformers reads {text!a}, and its like, from {folder} as other tokens "
                        "than the file has for it"
                    )
            if there == place:  # which may be a volume, that nothing can be renamed to
                for path in whole.iterdir():
                    path.rename(place / path.name)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                whole.rename(place)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write to {folder}: {error}; give another folder") from error
    written = {"path": str(folder), "name": model.name, "dtype": dtype, **model.origin}
    console.answer_either(str(folder), written, as_json=json)
