"""Readers of knowledge conflicts: JuICE's own files and those of others.

source       where examples come from
formats      the known formats of rows, each recognised by its columns
rows, hub    rows of files, and of data sets
memory       examples and rows that are in memory
passages     what sets of questions with passages have in common
paraconflict, memotrap, nqswap, confiqa, faitheval    one format each

No data set is copied here: files are read from the user's disk, data sets through `datasets`.
"""

from juice.data.readers.memory import Examples
from juice.data.readers.source import read_examples

__all__ = ["Examples", "read_examples"]
