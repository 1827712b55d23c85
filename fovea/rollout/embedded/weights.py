"""The language model as the engine runs it: references to the tensors that the trainer holds, no copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fovea.models.activation_tape import LinearGroup, Tape, TapeColumn
from fovea.models.decoder import Decoder, DecoderLayer, DecoderShape, Linears, Norm
from fovea.models.kernels import rms_norm
from fovea.rollout.embedded.linear_int8 import Int8Linears
from fovea.rollout.embedded.linear_onednn import PackedLinears

TEXT = "model.language_model."
HEAD = "lm_head.weight"
NO_COLUMNS = (None,) * len(LinearGroup)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWeights:
    """The decoder stack, the embedding before it and the head after it."""

    embed: Tensor
    decoder: Decoder
    head: Linears

    def logits(self, hidden_BE: Tensor) -> Tensor:
        """Next-token logits [B, W] in float32."""
        (logits_BW,) = self.head(hidden_BE)
        return logits_BW.float()


class PlainLinears:
    """Linear layers on the same input, written side by side into one block: [N, sum of widths]."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor | None]], column: TapeColumn | None) -> None:
        """(weight, bias) of each; Qwen2 has biases on queries, keys and values, Qwen3 has none."""
        self._layers = layers
        self._widths = [len(weight) for weight, _ in layers]
        self._column = column

    def __call__(self, x_NE: Tensor) -> tuple[Tensor, ...]:
        width = sum(self._widths)
        kept = self._column.rows(len(x_NE)) if self._column is not None else None
        block = x_NE.new_empty(len(x_NE), width) if kept is None else kept
        outs: tuple[Tensor, ...] = block.split(self._widths, dim=1)
        for out, (weight, bias) in zip(outs, self._layers, strict=True):
            if bias is None:
                torch.mm(x_NE, weight.t(), out=out)
            else:
                torch.addmm(bias, x_NE, weight.t(), out=out)
        return outs


Named = Sequence[tuple[Tensor, Tensor | None]]
"""(weight, bias) of linear layers that share an input."""


def text_weights(named: Mapping[str, Tensor], shape: DecoderShape, tape: Tape | None = None) -> TextWeights:
    """The language model of a full set of weights, as it is; KeyError names what is missing."""

    def make(layers: Named, column: TapeColumn | None) -> Linears:
        return PlainLinears(layers, column)

    return _text_weights(named, shape, make, tape)


def packed_text_weights(named: Mapping[str, Tensor], shape: DecoderShape, tape: Tape | None = None) -> TextWeights:
    """The same, laid out for few rows."""

    def make(layers: Named, column: TapeColumn | None) -> Linears:
        return PackedLinears(layers, column)

    return _text_weights(named, shape, make, tape)


def int8_text_weights(named: Mapping[str, Tensor], shape: DecoderShape) -> TextWeights:
    """The same with its linear layers in 8 bits, the head included."""

    def make(layers: Named, _column: TapeColumn | None) -> Linears:
        return Int8Linears(layers)

    return _text_weights(named, shape, make, None)


Make = Callable[[Named, TapeColumn | None], Linears]


def _text_weights(named: Mapping[str, Tensor], shape: DecoderShape, make: Make, tape: Tape | None) -> TextWeights:
    embed = named[f"{TEXT}embed_tokens.weight"]
    layers = tuple(
        _layer(named, f"{TEXT}layers.{index}.", shape, make, NO_COLUMNS if tape is None else tape.layer(index))
        for index in range(shape.num_layers)
    )
    return TextWeights(
        embed=embed,
        decoder=Decoder(layers=layers, norm=_norm(named[f"{TEXT}norm.weight"], shape)),
        head=make([(named.get(HEAD, embed), None)], None),
    )


def _layer(
    named: Mapping[str, Tensor], prefix: str, shape: DecoderShape, make: Make, columns: Sequence[TapeColumn | None]
) -> DecoderLayer:
    def linears(*names: str, group: LinearGroup) -> Linears:
        paths = [f"{prefix}{name}" for name in names]
        return make([(named[f"{path}.weight"], named.get(f"{path}.bias")) for path in paths], columns[group])

    def head_norm(name: str) -> Norm | None:
        weight = named.get(f"{prefix}self_attn.{name}.weight")
        return None if weight is None else _norm(weight, shape)

    return DecoderLayer(
        input_norm=_norm(named[f"{prefix}input_layernorm.weight"], shape),
        query_key_value=linears("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", group=LinearGroup.QKV),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=linears("self_attn.o_proj", group=LinearGroup.OUTPUT),
        post_norm=_norm(named[f"{prefix}post_attention_layernorm.weight"], shape),
        gate_up=linears("mlp.gate_proj", "mlp.up_proj", group=LinearGroup.GATE_UP),
        down=linears("mlp.down_proj", group=LinearGroup.DOWN),
    )


def _norm(weight: Tensor, shape: DecoderShape) -> Norm:
    return partial(rms_norm, weight=weight, epsilon=shape.norm_eps)
