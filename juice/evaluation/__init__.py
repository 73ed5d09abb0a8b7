"""Evaluation: does steering work on this model and this data, better than its baselines, and what does it break?

metrics         the numbers, from verdicts and probabilities alone
splits          which examples find heads, tune, and test
controls        examples in which steering is not needed
instructions    the prompt baseline
path_patching   PH3's head scores
contexts        where the context of a prompt ends
methods         what each method does to a prompt
choices         what validation chooses for a method
answers         asking, in large batches, and the verdicts
side_effects    what a method does beside what is asked of it
tables          from answers to the tables
analyses        head scores, reversals, one run against two, knock-outs, robustness, paraphrases, stability
checkpoints     context reliance over a series of checkpoints
store           the report folder, which resumes
run             one evaluation
sources         texts and templates
report          Markdown, HTML and pictures
evaluate        `juice.evaluate`
data            templates, plain text, the published numbers
"""
