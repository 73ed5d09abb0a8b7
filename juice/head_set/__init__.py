"""Head sets: which heads steer which model toward what, on disk and in memory.

schema        Head, and what a head set says: pure data, validated
scores        the head scores that a set was chosen from, as safetensors
coefficients  betas and strength, as what every head's z is scaled by
naming        how models are named in folders and on the hub
storage       a head set's folder: load and atomic save
card          the README of a head set's repository
hub           that repository: pull and push
lens          a head set as hooks of TransformerLens
head_set      HeadSet: what it says, and the ways in and out
lookup        the head sets that serve a loaded model, by name
"""

from juice.head_set.head_set import HeadSet
from juice.head_set.lookup import HeadSetLibrary
from juice.head_set.schema import (
    Betas,
    BetaTable,
    Head,
    HeadLists,
    Identification,
    ModelIdentity,
    Validation,
)
from juice.head_set.scores import HeadScores

__all__ = [
    "BetaTable",
    "Betas",
    "Head",
    "HeadLists",
    "HeadScores",
    "HeadSet",
    "HeadSetLibrary",
    "Identification",
    "ModelIdentity",
    "Validation",
]
