"""What `juice.load` returns.

arguments  the options of one prompt or of many
served     a model behind an engine, and the form of its prompts
steerable  its head sets, and what they make of a wish to steer
requests   prompts and options in, requests for the engine out
model      SteeredModel: prompts in, steered text out
origins    whether the tokens of an answer come from the context
"""

from juice.steered_model.arguments import join_context
from juice.steered_model.model import SteeredModel
from juice.steered_model.origins import Origin, origin_requests, origins_of

__all__ = ["Origin", "SteeredModel", "join_context", "origin_requests", "origins_of"]
