"""How a model is loaded: from the hub, a folder or memory, onto its devices, with its hooks.

placement   devices, dtypes, device maps and quantisations
pretrained  the only place that calls from_pretrained
prepared    the heads found, the hooks installed, both checked
described   a stored model in the terms of the contract, without its weights
on_vllm     a model that vLLM runs
plain_vllm  a model that vLLM serves by its own command
vllm_plugin what vLLM calls in each of its processes
load        `juice.load`
"""
