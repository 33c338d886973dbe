"""The engine: one device, one loop; scheduler, runner, sampler, and the session with kvstore.

Meets the front only through engine.proto. Knows tokens, never text.
"""
