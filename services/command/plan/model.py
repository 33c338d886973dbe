"""The model that is planned for: a checkpoint's config, or a model type with sizes of one's own.

Knows configs; reads no weights. Their bytes are those of the model itself, built without memory (on torch's
meta device).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from services.contract.errors import SetupError
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import SUPPORTED, ModelSpec, raw_config, read_config
from services.decoder.models.weights import random_weights

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
"""Without these transformers would plan for some other model's sizes, and not say so."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Sizes, and what of the weights a step reads."""

    spec: ModelSpec
    weight_bytes: int
    expert_bytes: int  # of these, weights of which a token uses a part
    experts: int  # of a layer; 1 = no experts
    experts_of_a_token: int

    def read_bytes(self, rows: int) -> float:
        """Weights that a step of `rows` rows reads: all but the embedding's table, and the experts that some
        token goes to, if each goes anywhere with equal chance.
        """
        config = self.spec.config
        element = self.weight_bytes / max(1, self._elements)
        table = 0.0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * element
        untouched = (1 - self.experts_of_a_token / self.experts) ** rows if self.experts > 1 else 0.0
        return self.weight_bytes - table - self.expert_bytes * untouched

    @property
    def _elements(self) -> int:
        return self.weight_bytes // 2  # planned in bfloat16


def planned_model(spec: ModelSpec) -> PlannedModel:
    """Build the model of `spec` on the meta device, in bfloat16, and count it."""
    meta = torch.device("meta")
    module = random_weights(spec, torch.bfloat16, meta, seed=0)
    routed = sum(weight.numel() for name, weight in module.named_parameters() if ".experts." in name)
    built = CausalLM(spec, torch.bfloat16, meta, model=module)
    experts = max((int(getattr(spec.config, name, 0) or 0) for name in _EXPERTS), default=0)
    return PlannedModel(
        spec=spec,
        weight_bytes=built.weight_bytes,
        expert_bytes=routed * torch.bfloat16.itemsize,
        experts=experts if routed else 1,
        experts_of_a_token=int(getattr(spec.config, "num_experts_per_tok", 1) or 1),
    )


def spec_of(model: str, changes: Sequence[str]) -> ModelSpec:
    """The sizes of a checkpoint's directory, a config.json, or a model type.

    Args:
        model: a path, or a model type of those that are served.
        changes: `name=value` of the config's fields, values as JSON.

    Raises:
        SetupError: no such file, a config that lacks a size or has none that is served, an unknown field.
    """
    fields = dict(_field(change) for change in changes)
    path = Path(model)
    if model in SUPPORTED and not path.exists():
        return ModelSpec.of_config(_made(model, fields, model), path, (), bytes(32))
    try:
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise SetupError(
                f"{model} is no checkpoint's directory and no config.json; name one, or a model type with "
                f"its sizes: hotset plan llama --set num_hidden_layers=32 (types: {', '.join(SUPPORTED)})"
            )
    except OSError as error:
        raise SetupError(f"{model} cannot be read: {error.strerror}") from error
    found = raw_config(file)
    lacking = [name for name in _NEEDED if name not in found and name not in fields]
    if lacking:
        raise SetupError(f"{file} lacks {', '.join(lacking)}; add what is missing: --set {lacking[0]}=N")
    if not fields:
        config = read_config(file)
    else:
        config = _made(str(found.pop("model_type")), fields, str(file), found)
    return ModelSpec.of_config(config, path, (), bytes(32))


def _field(change: str) -> tuple[str, object]:
    name, equals, text = change.partition("=")
    if not equals or not name:
        raise SetupError(f"--set {change}: write it as --set num_hidden_layers=32")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _made(
    model_type: str, fields: Mapping[str, object], where: str, given: Mapping[str, object] | None = None
) -> PreTrainedConfig:
    """A config of the type with `fields` in place of what it has."""
    known = {*AutoConfig.for_model(model_type).to_dict(), *(given or {})}
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise SetupError(
                f"--set {name}: {where} has no such field" + (f"; did you mean {near[0]}?" if near else "")
            )
    try:
        config = AutoConfig.for_model(model_type, **{**(given or {}), **fields})
    except Exception as error:  # transformers checks fields with errors of many kinds
        raise SetupError(f"transformers refuses these sizes: {error}") from error
    assert isinstance(config, PreTrainedConfig)
    return config
