"""Evaluation: does steering beat its baselines on this model and data, and what does it break?

metrics         the numbers, from verdicts and probabilities alone
splits          which examples find heads, tune, and test
instructions    the prompt baseline
path_patching   PH3's head scores
methods         what each method does to a prompt
choices         what validation chooses for a method
remembered      answers that need not be asked for again
answers         asking in large batches, and the verdicts
side_effects    what else a method changes
tables          from answers to tables
analyses        head scores, reversals, one run against two, knock-outs, robustness, paraphrases,
                stability
checkpoints     context reliance over a series of checkpoints
frames          the results as tables for other programs
store           the report folder, which can be resumed
options         what is evaluated and how
head_sets       the head sets that are evaluated
identity        what the numbers depend on
run             one evaluation
spread          mean, interval and worst over seeds
repeats         the same evaluation with other seeds
sources         plain texts and templates
report          Markdown, HTML and pictures
evaluate        `juice.evaluate`
data            templates, plain text, the published numbers
"""
