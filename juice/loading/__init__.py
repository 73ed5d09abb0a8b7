"""How a model is loaded: from the hub, a folder or memory, onto its devices, with its hooks.

placement   devices, dtypes, device maps and quantisations
pretrained  the only place that calls from_pretrained
prepared    the heads found, the hooks installed, both checked
following   what the other ranks of a sharded model run
load        `juice.load`
"""
