"""What a step of decoding takes, from when tokens came."""

from __future__ import annotations

from collections.abc import Sequence

# By request, when each of its tokens came, in seconds after some beginning.
Arrivals = Sequence[Sequence[float]]


def step_s(arrivals: Arrivals) -> float:
    """Return the seconds of a step that gives each request a token.

    It counts from the first token of the request whose prompt was the last to be done, so that no
    prompt is in it, and only the tokens that come after that step. Requests whose prompts were done
    earlier may end earlier: a step without them is the part of one that it gives tokens to.

    Args:
        arrivals: Of at least two tokens for each request.
    """
    last = max(arrivals, key=lambda own: own[0])
    second_step = (last[0] + last[1]) / 2
    times = [at for own in arrivals for at in own]
    begun = max(at for at in times if at <= second_step)
    n_later = sum(at > second_step for at in times)
    return (max(times) - begun) * len(arrivals) / n_later
