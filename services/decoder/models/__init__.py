"""How a checkpoint is loaded and wired to our attention.

Nothing is imported here, so that `services.decoder.models.bundled` starts without torch.
"""
