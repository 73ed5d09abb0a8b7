"""The engine: many requests, each steered its own way, through one forward pass a step.

steer      what a request asks of steering, and the coefficients that follow
request    what is asked, and what comes back
limits     how many requests, how long, and in how much memory
sampling   from logits to the next token
text       from tokens to text, piece by piece
sequence   a request while it waits and runs
inbox      where requests wait
rows       who occupies which row of the batch
slots      the KV cache: one slot a row
batch      what a forward feeds each row
scheduler  who joins, and whose prompt goes through next
runner     one forward
loop       step after step, failures kept where they arise
engine     the thread, and the way in and out
selfcheck  what must hold before a model is served
following  what the other ranks of a sharded model do
"""

from juice.engine.engine import Engine, Status
from juice.engine.limits import Limits
from juice.engine.request import Completion, Contrast, GenerationRequest, ScoredToken, Update
from juice.engine.sampling import Sampling
from juice.engine.steer import Steer, Steering, SteeringReport

__all__ = [
    "Completion",
    "Contrast",
    "Engine",
    "GenerationRequest",
    "Limits",
    "Sampling",
    "ScoredToken",
    "Status",
    "Steer",
    "Steering",
    "SteeringReport",
    "Update",
]
