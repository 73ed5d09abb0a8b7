"""Is a model steered exactly? What every load checks, and what `juice doctor` measures.

head_check       the heads are where the resolver found them
linearity_check  the projections are linear, a row at a time
engine_check     the engine gives what the two runs of the definition give
lens_check       z equals what TransformerLens finds
report           the results as plain data
costs            what head sets cost in an engine
doctor           all checks, thoroughly, on one model
served           another engine, against transformers' model beside it
"""

from juice.exactness.doctor import diagnose
from juice.exactness.report import Check, Diagnosis, HeadSetCost
from juice.exactness.served import diagnose_served

__all__ = ["Check", "Diagnosis", "HeadSetCost", "diagnose", "diagnose_served"]
