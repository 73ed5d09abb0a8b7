"""The dual run inside vLLM: the second engine of the contract, and steering in plain vLLM.

Only `launch`, `check`, `arguments` and `plugin` can be imported where vLLM is not installed.
"""
