"""What `juice doctor` does: measure on a loaded model that steering is exact, and say what it costs.

report  what was found
run     the checks on one model
lens    z against TransformerLens' own
"""

from juice.diagnosis.report import Check, Diagnosis, HeadSetCost
from juice.diagnosis.run import diagnose

__all__ = ["Check", "Diagnosis", "HeadSetCost", "diagnose"]
