"""Text to tokens and back: tokenizer, chat template, incremental detokenisation, stop strings.

Knows neither HTTP nor the engine, and imports neither torch nor transformers (2 s and a gigabyte);
what they would answer is what its tests compare it with.
"""
