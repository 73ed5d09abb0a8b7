"""The model under JuICE: where its heads are, how their z is steered, how it is loaded.

layout       finds the attention output projections; their input is z
routing      which rows go through which layer
steering     permanent hooks that compute z <- z + coefficient * z[source row]
output       keeps the vocabulary projection to the positions that are read
attention    which keys a query may see, layer by layer, as masks
fingerprint  the identity of a model's weights
prompts      how a prompt becomes tokens, as it is or through a chat template
placement    devices, dtypes, device maps and quantisations
linearity    finds quantised activations by what they do
uncompiled   runs what somebody compiled as it was written
loading      the only place that calls from_pretrained
sharding     one rank's part of a sharded model, and the heads that it has
ranks        the other ranks, which do what rank 0 does
wire         what goes to them and back
"""
