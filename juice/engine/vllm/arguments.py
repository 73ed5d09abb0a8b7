"""The arguments of a request that travel through vLLM: its coefficients, as JSON in `extra_args`.

vLLM passes on whatever `extra_args` its clients send, and its workers trust them. So a process that
takes requests accepts coefficients only once JuICE itself writes them there.

Which layers are prepared for steering is fixed when vLLM starts: here they are chosen, and requests
are held against them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from juice.engine.steer import Steering
from juice.errors import HeadSetMismatchError, RequestError
from juice.formula import Method
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
        is_single: Whether each head scales its own z instead of the clean run's: in one run, and
            where both are the same.
        first_position: The first token that is steered.
        last_position: The token before which that ends; None: at none.
        schedule: The factors of the coefficients, as `Steering` has them.
        n_prompt: The tokens of the prompt; 0 without a schedule, which alone counts from there.
    """

    heads: tuple[tuple[int, int, float], ...]
    is_single: bool = False
    first_position: int = 0
    last_position: int | None = None
    schedule: tuple[float, ...] = ()
    n_prompt: int = 0

    @classmethod
    def of(cls, steering: Steering, n_prompt: int) -> Coefficients | None:
        """Return the coefficients of a steering of a prompt of so many tokens, None without any."""
        heads = tuple(
            (layer, head, float(value))
            for layer, values in sorted(steering.coefficients.items())
            for head, value in enumerate(values.tolist())
            if value
        )
        if not heads:
            return None
        return cls(
            heads,
            not steering.window,
            steering.first_position,
            steering.last_position,
            steering.schedule,
            n_prompt if steering.schedule else 0,
        )

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
        return cls(heads, schedule=tuple(data.pop("schedule")), **data)

    def to_json(self) -> str:
        """Return them as text, the same for equal ones."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def factor(self, position: int) -> float:
        """Return what the coefficients are multiplied by at a token; 0 where nothing is added."""
        if position < self.first_position:
            return 0.0
        if self.last_position is not None and position >= self.last_position:
            return 0.0
        if not self.schedule:
            return 1.0
        n_generated = max(0, position - self.n_prompt + 1)
        return self.schedule[min(n_generated, len(self.schedule) - 1)]

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


LAYERS_KEY = "juice_layers"


@dataclass(frozen=True)
class Layers:
    """The layers that a start of vLLM prepares for steering.

    Args:
        window: Those in which requests have companions, which two runs need.
        steered: All whose heads can be scaled; one run needs no more.
        twin: Whether what is compiled is compiled without companions, too.
    """

    window: range = range(0)
    steered: range = range(0)
    twin: bool = True

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Layers | None:
        """Return the layers that a start prepares; None where JuICE is installed, and not used."""
        given = vllm_config.additional_config.get(LAYERS_KEY)
        if given is None:
            return None
        return cls(range(*given["window"]), range(*given["steered"]), given["twin"])

    def to_config(self) -> dict[str, Any]:
        """Return them as `additional_config`, which is part of the keys of vLLM's caches."""
        window, steered = ([part.start, part.stop] for part in (self.window, self.steered))
        return {LAYERS_KEY: {"window": window, "steered": steered, "twin": self.twin}}

    def for_method(self, method: Method) -> range:
        """Return the layers in which a method can scale heads."""
        return self.window if method == "juice" else self.steered

    def check_coefficients(self, coefficients: Coefficients, n_heads: int) -> None:
        """Raise RequestError for coefficients of heads that these layers do not have."""
        layers = self.steered if coefficients.is_single else self.window
        for layer, head, _ in coefficients.heads:
            if layer not in layers or head not in range(n_heads):
                raise RequestError(
                    f"head L{layer}H{head} cannot be steered: vLLM was started for "
                    f"{described(layers)}, with {n_heads} heads each; start it again, with the "
                    "head sets that are there now"
                )

    def check(self, steering: Steering) -> None:
        """Raise HeadSetMismatchError for a steering of heads outside the layers."""
        needed = steering.window or span(steering.coefficients)
        here, runs = (self.window, "two runs") if steering.window else (self.steered, "one run")
        if needed and not {needed[0], needed[-1]} <= {*here}:
            whole = span([*needed, *self.window])
            raise HeadSetMismatchError(
                f"steering layers {needed[0]} to {needed[-1]} in {runs}; this engine steers "
                f"{described(here)} so: start it with --window {whole[0]}-{whole[-1]} or --window "
                "all" + (", or choose the method june" if steering.window else "")
            )


def span(layers: Iterable[int]) -> range:
    """Return the range from the first of some layers to the last."""
    given = [*layers]
    return range(min(given), max(given) + 1) if given else range(0)


def described(layers: range) -> str:
    """Return layers in words."""
    return f"layers {layers[0]} to {layers[-1]}" if layers else "no layer"


def choose_layers(
    window: str, head_sets: Iterable[HeadSet], n_layers: int, *, twin: bool = True
) -> Layers:
    """Return the layers to prepare: the window, and those of all sets.

    Args:
        window: `auto` for the layers of the head sets whose method is two runs, `none`, `all`, or
            the first and last, such as `3-9`.
        head_sets: The head sets that may be asked for.
        n_layers: The layers of the model.
        twin: See `Layers`.

    Raises:
        RequestError: `window` is none of these, or names a layer that the model does not have.
    """
    sets = [*head_sets]
    if window == "auto":
        inside = _companions_of(sets)
    elif window in ("all", "none"):
        inside = range(n_layers if window == "all" else 0)
    else:
        bounds = re.fullmatch(r"(\d+)-(\d+)", window)
        if bounds is None or not int(bounds[1]) <= int(bounds[2]) < n_layers:
            raise RequestError(
                f"window is {window!r}; expected auto, none, all, or the first and the last layer "
                f"that can be steered in two runs, such as 0-{n_layers - 1}",
                param="window",
            )
        inside = range(int(bounds[1]), int(bounds[2]) + 1)
    heads = (head.layer for head_set in sets for head in head_set.all_heads)
    return Layers(inside, span([*inside, *heads]), twin)


def _companions_of(sets: Iterable[HeadSet]) -> range:
    """Return the layers of the sets that steer in two runs; one layer needs no companions."""
    layers = [{head.layer for head in one.heads.all} for one in sets if one.method == "juice"]
    return span(layer for of_one in layers if len(of_one) > 1 for layer in of_one)
