"""Head sets: which heads steer which model towards what, on disk and in memory.

schema        Head, HeadSet and its parts: what a head set says, validated
scores        the head scores a set was chosen from, as safetensors
coefficients  betas and strength, as what every head's z is scaled by
storage       a head set's folder: load and atomic save
lookup        the head sets that serve a loaded model, by name
hub           a head set's repository on the hub: pull and push
card          that repository's README
lens          a head set as hooks of TransformerLens
"""

from juice.head_set.lookup import HeadSetLibrary
from juice.head_set.schema import Betas, BetaTable, Head, HeadLists, HeadSet, Identification, ModelIdentity, Validation
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
