"""Is it steered exactly? What every load checks, and what `juice doctor` measures and reports.

heads         the heads are where the resolver says
linearity     the projections are linear, a row at a time
engine_check  the engine gives what the two runs of the definition give
lens          z against TransformerLens' own
report        what a diagnosis says
doctor        all of these, thoroughly, on one model
"""

from juice.exactness.doctor import diagnose
from juice.exactness.report import Check, Diagnosis, HeadSetCost

__all__ = ["Check", "Diagnosis", "HeadSetCost", "diagnose"]
