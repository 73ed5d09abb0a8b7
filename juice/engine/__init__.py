"""The engine: many requests, each steered its own way, through one forward pass a step.

steer      what a request asks of steering, and the coefficients that follow
request    a generation request, its running state and its result
sampling   from logits to the next token
text       from tokens to text, piece by piece
rows       who occupies which row of the batch, and what a forward feeds each row
slots      the KV cache: one slot a row
scheduler  which waiting requests join
runner     one forward
engine     the loop
selfcheck  what must hold before a model is served
"""

from juice.engine.engine import Engine
from juice.engine.request import Completion, GenerationRequest
from juice.engine.sampling import Sampling
from juice.engine.steer import Steer, Steering, SteeringReport

__all__ = ["Completion", "Engine", "GenerationRequest", "Sampling", "Steer", "Steering", "SteeringReport"]
