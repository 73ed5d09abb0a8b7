"""The command line of the lm-evaluation-harness, with the model `juice`."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from juice import quiet_imports
from juice.errors import JuiceError


def main() -> None:
    """Run the harness; a mistake in `--model_args` ends in one line."""
    try:
        with quiet_imports():
            cli_evaluate()
    except JuiceError as error:
        sys.stderr.write(f"juice: error: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
