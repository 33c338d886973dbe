"""A loaded checkpoint: token ids in, hidden states and logits out.

Knows transformers' model code and our attention's name; not rows, pages or samplers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from services.decoder.attention.latent_step import LatentStep
from services.decoder.attention.step import Step
from services.decoder.kernels.dense import DenseOps
from services.decoder.kernels.upload import upload
from services.decoder.models.block_attention import wire_indexers
from services.decoder.models.decode_layers import DecodeLayers, fusable
from services.decoder.models.latent_attention import wire
from services.decoder.models.spec import ModelSpec
from services.decoder.models.weights import load_weights


class CausalLM:
    """transformers' layers around hotset's attention; on a GPU, where it can be done, the fused ones."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        dense: DenseOps | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """Load the weights.

        Args:
            spec: the checkpoint.
            dtype: of the weights and of what is computed.
            device: of the weights.
            dense: computes decode's layers, where the model is `fusable`; None leaves them to transformers.
            model: built already in this dtype, see weights.py; None loads the checkpoint.

        Raises:
            SetupError: some weights are not there; transformers would make them up.
        """
        self._model = load_weights(spec, dtype) if model is None else model
        nn.Module.to(self._model, device)
        self._model.train(False).requires_grad_(False)
        if spec.latent is not None:
            wire(self._model, spec.config.model_type, spec.latent)
        if spec.blocks is not None and spec.blocks.selector == "block_index":
            wire_indexers(self._model)
        self._layers = self._model.get_submodule("model")
        self._head = self._model.get_submodule("lm_head")
        self._scale = 1.0 / float(getattr(spec.config, "logits_scaling", None) or 1.0)  # granite divides
        self._device = device
        self._fused = None
        if dense is not None and fusable(spec.config):
            self._fused = DecodeLayers(self._model, spec.config, dense)
        self.spec = spec
        self.dtype = dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones once."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._model.parameters())

    @property
    def fused(self) -> bool:
        """Whether decode runs the fused layers."""
        return self._fused is not None

    def hidden(self, tokens: list[int], positions: list[int], step: Step | LatentStep) -> Tensor:
        """Run the layers over a packed batch: `[tokens, hidden size]` after the last norm."""
        ids, places = upload([tokens, positions], self._device)
        return self.decode_hidden(ids, places, step)

    def walk(self, tokens: list[int], positions: list[int], step: Step) -> Iterator[Tensor]:
        """`hidden` in pieces: as many as it is launched in, the last of which is the result."""
        ids, places = upload([tokens, positions], self._device)
        if self._fused is None:
            yield self._walk(ids, places, step)
        else:
            yield from self._fused.walk(ids, places, step.attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden size]` -> `[n, vocab]` float32."""
        return self._scaled(self._head(hidden))

    def decode_hidden(self, tokens: Tensor, positions: Tensor, step: Step | LatentStep) -> Tensor:
        """`hidden` by device work alone, so that a CUDA graph can hold it.

        Args:
            tokens: [rows] int32 or int64 ids.
            positions: [rows] int32 or int64, each below the model's most positions.
            step: of these rows.

        Returns:
            [rows, hidden size] after the last norm.
        """
        if self._fused is not None:
            assert isinstance(step, Step), "no model with latent records is fusable"
            return self._fused.hidden(tokens, positions, step.attend)
        return self._walk(tokens, positions, step)

    def decode_logits(self, hidden: Tensor) -> Tensor:
        """`logits` of `decode_hidden`'s result, by device work alone."""
        return self.logits(hidden) if self._fused is None else self._scaled(self._fused.logits(hidden))

    def _walk(self, tokens: Tensor, positions: Tensor, step: Step | LatentStep) -> Tensor:
        """A packed batch through transformers' layers."""
        output = self._layers(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, step=step
        )
        states: Tensor = output.last_hidden_state
        return states.squeeze(0)

    def _scaled(self, scores: Tensor) -> Tensor:
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
