"""Preparation: from a user's own data to conflict examples, and to the rows worth fine-tuning on.

fields     values by our names, whatever the user's columns are called
kinds      what kind of answer an answer is, by its looks
passage    where answers stand in a passage, the passage with another answer, its sentences
conflicts  questions with passages, turned into conflict examples
critical   fine-tuning rows, marked by whether their context is needed
"""

from juice.preparation.conflicts import make_conflicts
from juice.preparation.critical import mark_critical

__all__ = ["make_conflicts", "mark_critical"]
