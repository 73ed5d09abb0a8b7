"""Readers of knowledge conflicts: JuICE's own files, ParaConflict, MemoTrap and NQ-Swap.

No data set is copied here: files are read from the user's disk, data sets through `datasets`.
"""

from juice.data.readers.source import read_examples

__all__ = ["read_examples"]
