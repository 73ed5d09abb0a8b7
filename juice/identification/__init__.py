"""Identification: which heads steer a model, and how strongly (docs/method.md).

options        how heads are looked for
scored_prompt  what p_y looks at
drawing        the examples that heads are found on
gradients      an objective's derivatives by every head's coefficient
provenance     how heads were found, as their set records it
attribution    how fast the target's lead grows with every head
probe          one head scaled, sharing everything below that head with the clean run
learning       coefficients for all heads, by gradient descent
learned_sets   head sets whose heads have learned betas of their own
probing        the mean change of p_y for every head and sign
selection      the consistency filter and the top K
run            from examples to a head set
trials         ways of steering tried on examples: their answers
dual_run       the dual run of prompts outside the engine
first_tokens   what the first new token of prompts is under any steering
protection     prompts that steering should leave alone
validation     the examples that betas are tuned on
search         a pattern search over betas
candidates     the candidate and the betas under which most first tokens are right
grid           the paper's grid of betas
intervals      of shares and of paired differences
gates          when a tuned set should steer
tuning         the candidate and the betas that do best
unfinished     what an interrupted identification has computed
recipe         from drawn examples to tuned head sets
"""

from juice.identification.options import IdentificationOptions
from juice.identification.run import identify, identify_targets
from juice.identification.selection import select_heads
from juice.identification.tuning import tune

__all__ = ["IdentificationOptions", "identify", "identify_targets", "select_heads", "tune"]
