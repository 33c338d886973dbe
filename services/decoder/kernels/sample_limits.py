"""How wide the sampler's tables are.

Knows no tensors, so that whoever only checks requests needs no torch.
"""

from __future__ import annotations

MOST_BIASED = 4096  # tokens with a logit bias, a row
MOST_BARRED = 512  # stop tokens, a row
