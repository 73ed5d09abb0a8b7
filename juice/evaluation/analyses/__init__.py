"""The analyses, one a file: each measures, and returns plain data in which every plotted value is found.

heads         the score of every head, by conflict type (heat maps)
reversals     heads that help under one conflict type and hurt under another (the paper's table 1)
running_once  one run against two, over the best 1 to 10 heads (table 2, figure 6)
knock_outs    MLP, attention or both removed, a layer at a time (figure 3)
robustness    accuracy over the number of examples, of heads, and the betas (figure 5)
paraphrases   accuracy under other templates (table 7)
stability     how much the head sets of resampled examples overlap
"""

from juice.evaluation.analyses.context import Context
from juice.evaluation.analyses.registry import ANALYSES, OF_THE_MODEL, run

__all__ = ["ANALYSES", "OF_THE_MODEL", "Context", "run"]
