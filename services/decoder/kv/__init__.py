"""Where KV lies: the mapped arena, the hot buffer over it, pages on the device, tables of rows.

Knows blocks, slots and pages; not what attention computes with them, nor which request a row serves.
"""
