"""The contract of every engine: what goes in, what comes out, and a description of the model.

steering      how a request asks to be steered, and the coefficients that follow
request       what to generate
completion    what comes back
limits        how many requests, how long, and in how much memory
memory        how much of it keys and values may take where the limits leave that open
status        an engine's present state
description   facts about the model, without the model
capabilities  what not every engine can do
engine        the contract itself
"""

from juice.engine.capabilities import Capability
from juice.engine.completion import Completion, FinishReason, ScoredToken, Sink, Timing, Update
from juice.engine.description import ModelDescription
from juice.engine.engine import Engine, Running
from juice.engine.limits import Limits
from juice.engine.request import Contrast, GenerationRequest
from juice.engine.status import Status
from juice.engine.steering import Steer, Steering, SteeringReport
from juice.methods import SteerTarget
from juice.options import SamplingOptions

__all__ = [
    "Capability",
    "Completion",
    "Contrast",
    "Engine",
    "FinishReason",
    "GenerationRequest",
    "Limits",
    "ModelDescription",
    "Running",
    "SamplingOptions",
    "ScoredToken",
    "Sink",
    "Status",
    "Steer",
    "SteerTarget",
    "Steering",
    "SteeringReport",
    "Timing",
    "Update",
]
