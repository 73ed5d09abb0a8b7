"""Head sets: which heads steer which model toward what, on disk and in memory.

parts         what the parts of a set have in common
betas         the scales of the heads
gates         by which number a set tells whether it should steer
validation    what betas did on the examples that tuned them
schema        Head, and the content of a head set: pure data, validated
scores        the head scores that a set was chosen from, as safetensors
coefficients  betas and strength as the coefficients of every head's z
naming        how models are named in folders and on the hub
reading       the files of a folder, opened once
writing       a folder written in one step
storage       a head set's folder: load, verify and save
card          the README of a head set's repository
hub           that repository: pull and push
lens          a head set as hooks of TransformerLens
head_set      HeadSet: that content, and how to load, save and share it
lookup        where sets are looked for, and one found by its name
library       the head sets for a loaded model, by name
"""

from juice.head_set.betas import Betas, BetaTable
from juice.head_set.gates import Gate, GateRule
from juice.head_set.head_set import HeadSet
from juice.head_set.library import HeadSetLibrary
from juice.head_set.schema import (
    Head,
    HeadLists,
    Identification,
    ModelIdentity,
)
from juice.head_set.scores import HeadScores
from juice.head_set.validation import Validation

__all__ = [
    "BetaTable",
    "Betas",
    "Gate",
    "GateRule",
    "Head",
    "HeadLists",
    "HeadScores",
    "HeadSet",
    "HeadSetLibrary",
    "Identification",
    "ModelIdentity",
    "Validation",
]
