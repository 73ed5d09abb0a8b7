"""The contract of every engine: what goes in, what comes out, and a description of the model.

steer         how a request asks to be steered
steering      the coefficients that follow
report        what was applied
gate          what decides whether a request is steered, at the end of its prompt
structure     the form that an answer must have
request       what to generate
completion    what comes back
limits        how many requests, how long, and in how much memory
memory        how much of it keys and values may take where the limits leave that open
status        an engine's present state
description   facts about the model, without the model
capabilities  what not every engine can do
running       a submitted request
gating        gates at work, above the engines
engine        the contract itself
"""

from juice.engine.capabilities import Capability
from juice.engine.completion import Completion, FinishReason, ScoredToken, Sink, Timing, Update
from juice.engine.description import ModelDescription
from juice.engine.engine import Engine
from juice.engine.gate import RequestGate
from juice.engine.limits import Limits
from juice.engine.report import GateReport, SteeringReport
from juice.engine.request import Contrast, GenerationRequest
from juice.engine.running import Running
from juice.engine.status import Status
from juice.engine.steer import Steer
from juice.engine.steering import Steering
from juice.engine.structure import Structure
from juice.methods import SteerTarget
from juice.options import SamplingOptions

__all__ = [
    "Capability",
    "Completion",
    "Contrast",
    "Engine",
    "FinishReason",
    "GateReport",
    "GenerationRequest",
    "Limits",
    "ModelDescription",
    "RequestGate",
    "Running",
    "SamplingOptions",
    "ScoredToken",
    "Sink",
    "Status",
    "Steer",
    "SteerTarget",
    "Steering",
    "SteeringReport",
    "Structure",
    "Timing",
    "Update",
]
