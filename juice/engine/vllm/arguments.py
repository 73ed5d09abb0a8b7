"""The arguments of a request that travel through vLLM: its coefficients, as JSON in `extra_args`.

vLLM passes on whatever `extra_args` its clients send, and its workers trust them. So a process that
takes requests accepts coefficients only once JuICE itself writes them there.

The window, the layers in which requests have companions, is fixed when vLLM starts: here it is
chosen, and requests are held against it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from juice.engine.steer import Steering
from juice.errors import HeadSetMismatchError, MissingCapabilityError, RequestError
from juice.head_set.head_set import HeadSet

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "juice"
FIRST = "juice_first"  # of an unsteered request that goes before all that wait
STRUCTURE = "juice_structure"  # the form of the answer
_writers: set[str] = set()


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of one request.

    Args:
        heads: (layer, head, coefficient), without zeros.
        is_single: Whether each head scales its own z (JuNe) instead of the clean run's (JuICE).
        first_position: The first token that is steered.
    """

    heads: tuple[tuple[int, int, float], ...]
    is_single: bool = False
    first_position: int = 0

    @classmethod
    def of(cls, steering: Steering) -> Coefficients | None:
        """Return the coefficients of a steering; None where it changes nothing."""
        heads = tuple(
            (layer, head, float(value))
            for layer, values in sorted(steering.coefficients.items())
            for head, value in enumerate(values.tolist())
            if value
        )
        is_single = steering.report.method == "june"
        return cls(heads, is_single, steering.first_position) if heads else None

    @classmethod
    def read(cls, extra_args: Mapping[str, Any] | None) -> Coefficients | None:
        """Read them from a request's `extra_args`; None where it is not steered."""
        text = (extra_args or {}).get(KEY)
        return cls.from_json(text) if text else None

    @classmethod
    def from_json(cls, text: str) -> Coefficients:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        heads = tuple((layer, head, value) for layer, head, value in data.pop("heads"))
        return cls(heads, **data)

    def to_json(self) -> str:
        """Return them as text, the same for equal ones."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def cache_key(self) -> str:
        """Return the key of cached keys and values beside their tokens."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def accept_from(writer: str) -> None:
    """Accept coefficients in this process: the writer has checked those that it writes."""
    _writers.add(writer)


def check_origin(extra_args: Mapping[str, Any] | None) -> None:
    """Raise ValueError for a request that steers where nothing of JuICE takes requests."""
    named = {KEY, FIRST, STRUCTURE, "steer"} & set(extra_args or ())
    if named and not _writers:
        raise ValueError(
            f"the request has {min(named)!r}, but vLLM runs without JuICE's middleware: start it "
            "with --middleware juice_server.vllm.Steering"
        )


WINDOW_KEY = "juice_window"
_chosen_by: list[Callable[[VllmConfig], range]] = []


def choose_window(asked: str, head_sets: Iterable[HeadSet], n_layers: int) -> range:
    """Return the layers that get companions.

    Args:
        asked: `auto` for the layers of the head sets, `all`, or the first and last, such as `3-9`.
        head_sets: The head sets that may be asked for.
        n_layers: The layers of the model.

    Raises:
        RequestError: `asked` is none of these, or names a layer that the model does not have.
    """
    if asked == "all":
        return range(n_layers)
    if asked == "auto":
        layers = [head.layer for head_set in head_sets for head in head_set.all_heads]
        return range(min(layers), max(layers) + 1) if layers else range(0)
    bounds = re.fullmatch(r"(\d+)-(\d+)", asked)
    if bounds is None or not int(bounds[1]) <= int(bounds[2]) < n_layers:
        raise RequestError(
            f"window is {asked!r}; expected auto, all, or the first and the last layer that can be "
            f"steered, such as 0-{n_layers - 1}",
            param="window",
        )
    return range(int(bounds[1]), int(bounds[2]) + 1)


def window_of(vllm_config: VllmConfig) -> range:
    """Return the window that vLLM was started with; empty where it was started without one."""
    given = vllm_config.additional_config.get(WINDOW_KEY)
    if given is None:
        return _chosen_by[-1](vllm_config) if _chosen_by else range(0)
    first, last = given
    return range(first, last + 1)


def set_default(window: Callable[[VllmConfig], range]) -> None:
    """Set what chooses the window where vLLM was started by its own command."""
    _chosen_by.append(window)


def check_layers(steering: Steering, window: range) -> None:
    """Raise an error for a steering that this engine cannot apply.

    Raises:
        HeadSetMismatchError: A head is outside the window.
        MissingCapabilityError: It ends at a position, or changes from token to token.
    """
    if steering.last_position is not None or steering.schedule:
        raise MissingCapabilityError(
            "the engine 'vllm' steers from a position on, by one strength; leave out the end or the"
            " schedule, or load the model with juice's own engine"
        )
    for layer in steering.coefficients:
        if layer not in window:
            steered = f"layers {window.start} to {window.stop - 1}" if window else "no layer"
            raise HeadSetMismatchError(
                f"a head of layer {layer} is to be steered; this engine steers {steered}: start it "
                "with a head set of that layer in its folder, or with --window all"
            )
