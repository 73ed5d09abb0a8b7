"""Our own engine: many requests, each steered its own way, share every forward pass.

sampling    from logits to the next token
text        from tokens to text, piece by piece
generation  a request while it waits and runs
inbox       where requests wait
rows        who occupies which row of the batch
room        how much room the KV cache has
slot_layer  the keys and values of one layer, one slot a row
slots       the KV cache: one slot a row
batch       what each row gets in a forward
scheduler   who joins, and whose prompt is prefilled next
runner      one forward
loop        step after step; a failure ends only the request that caused it
engine      the thread that owns the model, and the public interface
"""

from juice.batching.engine import BatchingEngine
from juice.batching.runner import Mode

__all__ = ["BatchingEngine", "Mode"]
