"""Our own engine: many requests, each steered its own way, through one forward pass a step.

memory      how much keys and values may take
sampling    from logits to the next token
text        from tokens to text, piece by piece
generation  a request while it waits and runs
inbox       where requests wait
rows        who occupies which row of the batch
slots       the KV cache: one slot a row
batch       what a forward feeds each row
scheduler   who joins, and whose prompt goes through next
runner      one forward
loop        step after step, failures kept where they arise
engine      the thread, and the way in and out
"""

from juice.batching.engine import BatchingEngine
from juice.batching.runner import Mode

__all__ = ["BatchingEngine", "Mode"]
