"""A transformers model as steering needs it: its heads, hooks, masks, prompts and identity."""
