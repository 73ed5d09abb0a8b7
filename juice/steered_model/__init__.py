"""What `juice.load` returns.

options  the options of one prompt or of many
served   a model behind an engine, its prompts' form and its head sets
model    SteeredModel: prompts in, steered text out
"""

from juice.steered_model.model import SteeredModel
from juice.steered_model.options import join_context

__all__ = ["SteeredModel", "join_context"]
