"""Options that Python, the command line and the server share.

Each is defined once, with its type, range and meaning.

base      what all of them have in common
engine    which engine runs a model
loading   how a model is loaded
sampling  how a request chooses its tokens
"""

from juice.options.base import Options, first_problem
from juice.options.engine import EngineName, EngineOptions
from juice.options.loading import DeviceMap, LoadOptions
from juice.options.sampling import MAX_BIASES, SamplingOptions

__all__ = [
    "MAX_BIASES",
    "DeviceMap",
    "EngineName",
    "EngineOptions",
    "LoadOptions",
    "Options",
    "SamplingOptions",
    "first_problem",
]
