"""A loaded checkpoint: token ids in, hidden states and logits out.

Knows transformers' model code and our attention's name; not rows, pages or samplers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from services.contract.errors import SetupError
from services.decoder.attention.step import Step
from services.decoder.models.attention_hook import ATTENTION_NAME, register
from services.decoder.models.spec import ModelSpec


class CausalLM:
    """transformers' layers around hotset's attention."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        """Load the weights.

        Raises:
            SetupError: some are not there; transformers would make them up.
        """
        register()
        loaded: object = AutoModelForCausalLM.from_pretrained(
            spec.path,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            output_loading_info=True,
        )
        assert isinstance(loaded, tuple), "asked for with output_loading_info"
        model, found = loaded
        missing = sorted(found["missing_keys"])
        if missing:
            raise SetupError(
                f"the checkpoint {spec.path} lacks {len(missing)} weights, {missing[0]} among them; "
                "copy or convert it anew"
            )
        assert isinstance(model, nn.Module)
        nn.Module.to(model, device)
        self._model = model.train(False)
        self._layers = model.get_submodule("model")
        self._head = model.get_submodule("lm_head")
        self._scale = 1.0 / float(getattr(spec.config, "logits_scaling", None) or 1.0)  # granite divides
        self._device = device
        self.dtype = dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    def hidden(self, tokens: list[int], positions: list[int], step: Step) -> Tensor:
        """Run the layers over a packed batch: `[tokens, hidden size]` after the last norm."""
        output = self._layers(
            input_ids=torch.tensor([tokens], device=self._device),
            position_ids=torch.tensor([positions], device=self._device),
            use_cache=False,
            step=step,
        )
        states: Tensor = output.last_hidden_state
        return states.squeeze(0)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden size]` -> `[n, vocab]` float32."""
        scores: Tensor = self._head(hidden)
        return scores.float() * self._scale if self._scale != 1.0 else scores.float()


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a setting means on a device; `auto` takes bfloat16 where it is computed natively."""
    if name != "auto":
        found = getattr(torch, name)
        assert isinstance(found, torch.dtype)
        return found
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def resolve_device(name: str) -> torch.device:
    """The device that a setting means; `auto` takes the first GPU, else the CPU."""
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
