"""The flags of `hotset plan`; what is planned is in the files beside this one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from services.contract.byte_size import format_bytes, parse_bytes
from services.contract.errors import SetupError
from services.decoder.settings import DecoderSettings

_MEMINFO = Path("/proc/meminfo")
_DESCRIPTION = """What fits a GPU and its host in full and in tiered, counted by the engine's own memory
plan, and what a token will cost. Flags of the decoder (--budget-tokens, --quest-sharing, ...) may follow."""


def run(arguments: Sequence[str]) -> int:
    """Exit status: 0 something fits, 1 nothing does.

    Raises:
        SetupError: a config, a size or a flag is not what it should be.
    """
    parser = argparse.ArgumentParser(prog="hotset plan", description=_DESCRIPTION)
    parser.add_argument("model", help="directory of a checkpoint, a config.json, or a model type")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="of the config, instead"
    )
    parser.add_argument(
        "--gpu-memory", type=_size, default=None, help="of the card, 80GiB; default: this machine's"
    )
    parser.add_argument(
        "--host-memory", type=_size, default=None, help="for the arena; default: what is free here"
    )
    parser.add_argument("--cuda-memory", type=_size, default=2**30, help="that CUDA and kernels take (1GiB)")
    parser.add_argument(
        "--context", type=int, default=0, help="tokens of a row; default: the model's positions"
    )
    parser.add_argument("--rows", type=int, default=8, help="that run at once (default: %(default)s)")
    parser.add_argument("--miss-rate", type=float, default=None, help="share of choices that miss (0.07)")
    parser.add_argument(
        "--link-gbps", type=float, default=None, help="GB/s from the host (48 to 31, by size)"
    )
    parser.add_argument("--device-gbps", type=float, default=None, help="GB/s of the card's memory (4170)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked, flags = parser.parse_known_args(arguments)
    _check(asked)
    settings = DecoderSettings.from_command_line([*flags, "--model", asked.model], program="hotset plan")
    return _plan(asked, settings)


def _plan(asked: argparse.Namespace, settings: DecoderSettings) -> int:
    from services.command.plan.cost import (
        DEVICE_GB_S,
        Speeds,
        cost_of,
    )  # torch and transformers, from here on
    from services.command.plan.fit import MOST_ROWS, Machine, Mode, Planner
    from services.command.plan.model import planned_model, spec_of
    from services.command.plan.report import ModePlan, assumptions, table
    from services.decoder.engine.model_settings import settings_for

    if asked.rows > MOST_ROWS:
        raise SetupError(f"--rows {asked.rows}: an engine runs {MOST_ROWS} at most")
    spec = spec_of(asked.model, asked.set)
    settings = settings_for(settings, spec)
    context = asked.context or spec.max_positions
    model = planned_model(spec)
    machine = Machine(
        asked.gpu_memory or _gpu_memory(), asked.host_memory or _host_memory(), asked.cuda_memory
    )
    planner = Planner(settings, spec, model.weight_bytes, machine)
    speeds = Speeds(asked.device_gbps or DEVICE_GB_S, asked.link_gbps, asked.miss_rate)
    plans = []
    modes: tuple[Mode, Mode] = ("full", "tiered")
    for mode in modes:
        fit = planner.fit(mode, asked.rows, context)
        most = planner.most_rows(mode, context)
        shown = fit if fit.fits else planner.fit(mode, most, context) if most else None
        cost = cost_of(shown, model, settings, planner.shape, speeds) if shown else None
        plans.append(ModePlan(fit, most, planner.longest(mode, asked.rows), cost))
    if asked.json:
        told = {
            "model": asked.model,
            "rows": asked.rows,
            "context": context,
            "gpu_bytes": machine.gpu_bytes,
            "host_bytes": machine.host_bytes,
            "kv_bytes_per_token": planner.plan("full", 1, context).token_bytes,
            "modes": {plan.asked.mode: plan.as_json() for plan in plans},
        }
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        title = (
            f"{asked.model}: {asked.rows:,} rows of {context:,} tokens on a GPU of "
            f"{format_bytes(machine.gpu_bytes)}, {format_bytes(machine.host_bytes)} of host memory"
        )
        print(table(title, plans))
        print(assumptions(plans[-1].cost, settings.budget_tokens, asked.miss_rate))
    return 0 if any(plan.rows_that_fit for plan in plans) else 1


def _check(asked: argparse.Namespace) -> None:
    for name, least in (("context", 0), ("rows", 1)):
        if getattr(asked, name) < least:
            raise SetupError(f"--{name} {getattr(asked, name)} is less than {least}")
    if asked.miss_rate is not None and not 0 <= asked.miss_rate <= 1:
        raise SetupError(f"--miss-rate {asked.miss_rate} is no share; write 0.07 for 7%")
    for name in ("link_gbps", "device_gbps"):
        value = getattr(asked, name)
        if value is not None and not value > 0:
            raise SetupError(f"--{name.replace('_', '-')} {value} is no speed")


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _gpu_memory() -> int:
    """Of this machine's first card."""
    import torch

    if not torch.cuda.is_available():
        raise SetupError(
            "this machine has no GPU to plan for; say how much memory it has: --gpu-memory 80GiB"
        )
    return int(torch.cuda.mem_get_info(0)[1])


def _host_memory() -> int:
    """What programs could still take of this machine's memory."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SetupError(f"{_MEMINFO} does not say what is free; give --host-memory")
