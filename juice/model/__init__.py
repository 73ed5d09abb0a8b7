"""What a loaded model is: where its heads are, how their z is steered, who it is.

layout          finds the attention output projections; their input is z
description     the model in the terms of the engines' contract
hooks           hooks that are there for a while
row_routing     which rows go through which layer
steering_hooks  permanent hooks that compute z <- z + coefficient * z[source row]
logits          keeps the vocabulary projection to the positions that are needed
masks           which keys a query may see, layer by layer
positions       rotary positions that change with the length
prompts         how a prompt becomes tokens, plain or through a chat template
fingerprint     the identity of a model's weights
loaded          LoadedModel: all of these for one model
uncompiled      runs a compiled model as it was written
two_runs        the definition of steering, which everything faster is checked against
knock_out       a layer's attention or MLP, removed for a while
"""
