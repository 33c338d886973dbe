"""Bytes from one service's memory to another's, behind one Protocol; `mapped`, `ucx` and `tcp` implement it.

Knows frames, buffers and deadlines; nothing of pages, arenas, gRPC or the device.
"""
