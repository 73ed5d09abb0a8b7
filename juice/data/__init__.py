"""Knowledge conflicts as data: examples, judging answers, reading data sets, making examples of a user's own.

example    a fact with two answers and the prompts that pit them against each other
judging    is this output the answer?
readers    our own files, ParaConflict, MemoTrap and NQ-Swap, from disk or from the hub
asking     what making examples asks of a model
fields     values by our names, whatever the user's columns are called
kinds      what kind of answer an answer is, by its looks
passage    where answers stand in a passage, the passage with another answer, its sentences
conflicts  questions with passages, turned into conflict examples
critical   fine-tuning rows, marked by whether their context is needed
"""
