"""The operations of a decode step on tensors and integers, as vectorised torch: the twins.

A twin is the definition of its operation; a GPU kernel must agree with it, slot for slot where slots
are concerned. Nothing here knows of rows' requests, of models, or of who owns a tensor.
"""
