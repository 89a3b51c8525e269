"""The checkpoint's own multi-token-prediction head: one decoder layer that drafts the token after the next.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2; tensor names as in the Qwen3.5 and Qwen3-Next
files: x = fc([pre_fc_norm_embedding(embed(token t + 1)), pre_fc_norm_hidden(h_t)]), with h_t the body's last hidden
state after the final norm; x goes through `layers.0` and `norm`; the body's own head then predicts token t + 2.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from ...memory.checkpoint import Checkpoint
from .errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MtpHead"]

_NEEDED = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")


class MtpHead(torch.nn.Module):
    """The head without embedding and output head, which are the body's."""

    def __init__(self, config: Any, layer_class: type[torch.nn.Module], norm_class: type[torch.nn.Module]) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding = norm_class(size, eps=eps)
        self.pre_fc_norm_hidden = norm_class(size, eps=eps)
        self.layers = torch.nn.ModuleList([layer_class(config, 0)])
        self.norm = norm_class(size, eps=eps)

    @staticmethod
    def is_in(checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has a head of the kind that `build` takes."""
        return not _absent(checkpoint) and not _has_second_layer(checkpoint)

    @classmethod
    def build(cls, model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> MtpHead:
        """Assemble the head from the body's own decoder-layer and norm classes, on the current default device.

        Raises:
            UnsupportedModelError: When the checkpoint has no such head, or one of more than one layer.
        """
        absent = _absent(checkpoint)
        if absent:
            raise UnsupportedModelError(
                checkpoint.path, f"it has no MTP head to speculate with ({', '.join(absent)} absent)"
            )
        if _has_second_layer(checkpoint):
            raise UnsupportedModelError(checkpoint.path, "its MTP head has more than one layer; one is supported")
        body: Any = model.get_decoder()  # type: ignore[no-untyped-call]
        config = copy.deepcopy(body.config)
        config.num_hidden_layers = 1
        config.layer_types = ["full_attention"]
        return cls(config, type(body.layers[-1]), type(body.norm)).to(dtype).eval()

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        cache: dict[str, object],
    ) -> torch.Tensor:
        """Return the head's hidden state after its norm: [batch, length, hidden].

        Args:
            embeddings: [batch, length, hidden], of the token after each position.
            hidden: [batch, length, hidden], the body's last hidden state at each position.
            position_embeddings: The body's rotary tables for these positions.
            position_ids: [batch, length].
            cache: The keyword that carries the KV cache, as this transformers version names it.
        """
        joined = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        out = self.layers[0](
            self.fc(joined),
            position_embeddings=position_embeddings,
            attention_mask=None,
            position_ids=position_ids,
            **cache,
        )
        return torch.as_tensor(self.norm(out[0] if isinstance(out, tuple) else out))


def _absent(checkpoint: Checkpoint) -> list[str]:
    return [name for name in _NEEDED if name not in checkpoint.tensors]


def _has_second_layer(checkpoint: Checkpoint) -> bool:
    return any(name.startswith("mtp.layers.1.") for name in checkpoint.tensors)
