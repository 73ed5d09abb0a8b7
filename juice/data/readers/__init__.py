"""Reading data sets of knowledge conflicts: our own files, ParaConflict, MemoTrap and NQ-Swap, from disk or from the hub.

Nothing of theirs is copied here: files are read from where the user keeps them, data sets through
`datasets`.
"""

from juice.data.readers.source import read_examples

__all__ = ["read_examples"]
