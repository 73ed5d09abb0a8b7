"""Identification: which heads steer a model, and how strongly (docs/method.md).

options        how heads are looked for
scored_prompt  what p_y looks at
drawing        the examples that heads are found on
probe          one head scaled, sharing everything below that head with the clean run
probing        the mean change of p_y for every head and sign
selection      the consistency filter and the top K
run            from examples to a head set
trials         ways of steering tried on examples
validation     the examples that betas are tuned on
tuning         the betas
"""

from juice.identification.options import IdentificationOptions
from juice.identification.run import identify, identify_targets
from juice.identification.selection import select_heads
from juice.identification.tuning import tune

__all__ = ["IdentificationOptions", "identify", "identify_targets", "select_heads", "tune"]
