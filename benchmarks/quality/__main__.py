"""The quality table: dense decode against Quest, by budget and sharing; perplexity and needle recall.

    python -m benchmarks.quality [--model DIR] [--dtype bfloat16] [--threads N] [--quick]

Writes benchmarks/results/quality.json and the table in docs/quality.md; --quick measures next to nothing and
writes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.quality import table
from benchmarks.quality.measure import FLOAT32_CHECK, QUICK, Measurement, Sizes, summary
from benchmarks.quality.needles import DEPTHS
from services.command.bench.prose import real_text
from services.decoder.models.bundled.directory import default_model


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="checkpoint; default: the bundled model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 = torch's choice")
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; writes nothing")
    wanted = parser.parse_args(arguments)
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    path: Path = wanted.model or default_model()
    sizes = QUICK if wanted.quick else Sizes()
    begun = time.monotonic()

    measurement = Measurement(path, getattr(torch, wanted.dtype))
    variants = summary(measurement.losses(sizes), measurement.recall(sizes))
    check = [] if wanted.quick else summary(Measurement(path, torch.float32).losses(FLOAT32_CHECK), {})
    result = {
        "python": platform.python_version(),
        "model": path.name,
        "dtype": wanted.dtype,
        "text_sha256": hashlib.sha256(real_text().encode()).hexdigest(),
        "tokens_per_context": sizes.segments * sizes.targets,
        "questions_per_length": sizes.seeds * len(DEPTHS),
        "seconds": round(time.monotonic() - begun),
        "variants": variants,
        "float32_check": check,
    }
    print(table.markdown(result))
    if not wanted.quick:
        report.write("quality", result)
        table.write(result)
        print(table.conclusion(result))
    for entry in variants[1:]:
        name = entry["name"].replace(" ", "_").replace(",", "")
        print(f"{name}_perplexity_over_dense={1 + table.percent(entry) / 100:.4f} ratio")
        print(f"{name}_needles={sum(entry['found'].values())} found")


if __name__ == "__main__":
    main()
