"""The default model: fetched once, converted once to an ordinary Hugging Face checkpoint, then found at once.

Knows neither torch nor transformers, and nothing of serving. `python -m services.decoder.models.bundled`
prints the checkpoint's directory; `directory.default_model` is the same for Python. Why this model and
these choices: docs/decisions/0003-default-model.md.
"""
