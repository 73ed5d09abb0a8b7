"""Is a model steered exactly? What every load checks, and what `juice doctor` measures.

head_check       the heads are where the resolver found them
linearity_check  the projections are linear, a row at a time
engine_check     the engine gives what the two runs of the definition give
lens_check       z equals what TransformerLens finds
report           the results as plain data
doctor           all checks, thoroughly, on one model
"""

from juice.exactness.doctor import diagnose
from juice.exactness.report import Check, Diagnosis, HeadSetCost

__all__ = ["Check", "Diagnosis", "HeadSetCost", "diagnose"]
