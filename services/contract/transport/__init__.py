"""Bytes from one service's memory to another's, behind one Protocol: `mapped`, `ucx`, `tcp` and `nixl`.

Knows frames, buffers and deadlines; nothing of pages, arenas, gRPC or the device.
"""
