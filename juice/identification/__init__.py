"""Identification: which heads steer a model, and how strongly (method.md, stage 1).

probe   the model run with one head scaled, sharing everything below that head with the clean run
scores  the mean change of p_y for every head and sign
select  the consistency filter and the top K
tune    the betas, on a validation set
run     from examples to a head set
"""

from juice.identification.run import Settings, identify, identify_targets
from juice.identification.select import select_heads
from juice.identification.tuning import tune

__all__ = ["Settings", "identify", "identify_targets", "select_heads", "tune"]
