"""How the training signal on attention logits falls with distance: `g(τ) = E |∂L/∂e[t, t−τ]|`, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from routeguard.diagnostics.attention_call import AttentionCall
from routeguard.diagnostics.attention_rows import CHUNK_TOKENS, log_normalisers, logit_chunks
from routeguard.diagnostics.capture import captured_calls
from routeguard.diagnostics.chunked_loss import LOSS_TOKENS, SequenceLoss, chunked_loss, plain_loss
from routeguard.diagnostics.decay_fit import Array, DecayCurve, DecayFit, fit_decay
from routeguard.diagnostics.decoder import find_decoder
from routeguard.diagnostics.query_sample import sample_queries
from routeguard.diagnostics.running import (
    chosen_attention,
    over_tokens,
    quiet,
    require_seen,
)
from routeguard.diagnostics.sample_layouts import IGNORED
from routeguard.recall.model_config import refuse_beyond_positions
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False)
class GradientLocality:
    """Mean size of the loss gradient on attention logits by distance.

    Attributes:
        curves: one for each layer; groups are the sequences, lags go from 0.
        num_tokens, num_sequences, num_queries: of the measurement.
        loss: mean loss over the sequences, nats a token.
    """

    curves: Mapping[int, DecayCurve]
    num_tokens: int
    num_sequences: int
    num_queries: int
    loss: float

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.curves)

    @property
    def pooled(self) -> DecayCurve:
        """All layers together, as in the paper's E over t, ℓ and h."""
        curves = list(self.curves.values())
        sums, counts = (np.sum([getattr(curve, name) for curve in curves], axis=0) for name in ("sums", "counts"))
        return DecayCurve(curves[0].lags, sums, counts, curves[0].offset)

    def curve(self, layer: int | None = None) -> DecayCurve:
        """The curve of a layer; None: of all together."""
        if layer is None:
            return self.pooled
        if layer not in self.curves:
            raise ValueError(f"layer {layer} was not measured; measured: {list(self.curves)}")
        return self.curves[layer]

    def fit(self, layer: int | None = None) -> DecayFit:
        """Log-linear fit from lag 1 on; None: of all layers together."""
        return fit_decay(self.curve(layer))

    def to_dict(self) -> dict[str, Any]:
        from routeguard.diagnostics.autocorrelation import fit_or_reason

        return {
            "num_tokens": self.num_tokens,
            "num_sequences": self.num_sequences,
            "num_queries": self.num_queries,
            "loss": self.loss,
            "lags": self.pooled.lags.tolist(),
            "layers": {
                str(layer): {"values": curve.values.tolist(), "fit": fit_or_reason(curve)[1]}
                for layer, curve in self.curves.items()
            },
            "pooled": {"values": self.pooled.values.tolist(), "fit": fit_or_reason(self.pooled)[1]},
        }

    def __str__(self) -> str:
        from routeguard.diagnostics.autocorrelation import fit_or_reason

        lines = [
            f"loss gradient on attention logits by distance, {self.num_sequences} × {self.num_tokens} tokens, "
            f"{self.num_queries} queries each (loss {self.loss:.2f})"
        ]
        lines += [f"  layer {layer:>3}   {fit_or_reason(curve)[0]}" for layer, curve in self.curves.items()]
        return "\n".join([*lines, f"  all layers  {fit_or_reason(self.pooled)[0]}"])

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """One line a layer on a logarithmic scale, with the fit of all; written to `path` if given."""
        from routeguard.diagnostics.locality_plot import plot_gradient

        return plot_gradient(self, path)


def gradient_locality(
    model: nn.Module,
    input_ids: Tensor,
    *,
    labels: Tensor | None = None,
    layers: Iterable[int] | None = None,
    num_queries: int | None = 128,
    seed: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
    loss_tokens: int | None = LOSS_TOKENS,
    insist: bool = False,
) -> GradientLocality:
    """Measure `g(τ) = E_{t,h} |∂L/∂e[t, t−τ]|` for each full-attention layer, with the loss of next-token training.

    `e` is the scaled product of query and key, before soft cap and mask. The gradient of a row of logits follows from
    that of the attention output, `A·(∂L/∂A − Σ A·∂L/∂A)` with `∂L/∂A = ∂L/∂o · v`, so no T × T matrix is made. Needs
    the memory of one training step without optimizer and without its T × vocabulary logits; parameters get no gradients
    and nothing is left changed.

    Args:
        model: a causal language model.
        input_ids: [sequences, tokens], no padding; taken one by one. Sequences are what the errors come from: give 8 or
            more.
        labels: as input_ids, −100 where the loss does not count. Default: every token counts.
        layers: decoder layer indices. Default: every full-attention layer.
        num_queries: queries computed in each sequence, 8 or more, default 128; None: all.
        seed: which queries; each sequence draws its own.
        chunk_tokens: keys at a time.
        loss_tokens: positions whose logits are held at a time, default 128; None: all, for models that are refused
            otherwise.
        insist: measure beyond the positions that the model's configuration names.

    Raises:
        ValueError: no full-attention layer, a layer whose attention cannot be seen, padded input, labels of another
            shape, or none that counts in a sequence, more tokens than the model has positions, a model whose logits
            cannot be computed a few positions at a time.

    Source: paper, distance-conditioned gradient; the row formula is derived (as in backward passes of fused attention).
    """
    labels = input_ids if labels is None else labels
    if labels.shape != input_ids.shape or input_ids.dim() != 2:
        raise ValueError(
            f"input_ids {tuple(input_ids.shape)} and labels {tuple(labels.shape)} must both be [sequences, tokens]"
        )
    if not insist:
        refuse_beyond_positions(model, int(input_ids.shape[1]))
    attention = chosen_attention(model, layers)
    loss_of = _loss_function(model, input_ids, loss_tokens)
    sequences, tokens = (int(size) for size in input_ids.shape)
    wanted = sorted({geometry.layer for geometry in attention})
    sums = {layer: np.zeros((sequences, tokens)) for layer in wanted}
    counts = {layer: np.zeros((sequences, tokens)) for layer in wanted}
    losses = []
    for number in range(sequences):
        positions = sample_queries(tokens, num_queries, seed=seed + number).all_positions
        row = slice(number, number + 1)
        loss, calls = _loss_and_gradients(model, attention, input_ids[row], labels[row], loss_of)
        losses.append(loss)
        seen = np.searchsorted(np.array(positions), np.arange(tokens))
        reached = len(positions) - seen  # queries at or after position τ have a key τ tokens back
        for call, output, gradient in calls:
            sums[call.layer][number] += _by_distance(call, output, gradient, positions, chunk_tokens)
            counts[call.layer][number] += reached * call.num_heads
    lags = np.arange(tokens)
    zero = np.zeros(tokens)
    curves = {layer: DecayCurve(lags, sums[layer], counts[layer], zero) for layer in wanted}
    num = len(sample_queries(tokens, num_queries, seed=seed).all_positions)
    return GradientLocality(curves, tokens, sequences, num, sum(losses) / len(losses))


def _loss_function(
    model: nn.Module, input_ids: Tensor, loss_tokens: int | None
) -> Callable[[nn.Module, Tensor, Tensor], SequenceLoss]:
    if loss_tokens is None:
        return plain_loss
    if loss_tokens < 1:
        raise ValueError(f"loss_tokens={loss_tokens}; give at least 1, or None for all positions at once")
    with quiet(model):
        decoder = find_decoder(model, input_ids)
    return partial(chunked_loss, decoder=decoder, loss_tokens=loss_tokens)


def _loss_and_gradients(
    model: nn.Module,
    attention: Iterable[Any],
    input_ids: Tensor,
    labels: Tensor,
    loss_of: Callable[[nn.Module, Tensor, Tensor], SequenceLoss],
) -> tuple[float, list[tuple[AttentionCall, Tensor, Tensor]]]:
    """The loss, and for each attention call its result and the gradient there, both [1, H, T, d_v]."""
    if not bool((labels[0, 1:] != IGNORED).any()):
        raise ValueError("no label of a sequence counts (all are -100 or the first token)")
    calls: list[tuple[AttentionCall, Tensor]] = []
    attention = list(attention)

    def visit(call: AttentionCall, result: Tensor | None) -> Tensor | None:
        if not over_tokens(call, int(input_ids.shape[1])):
            return None
        if result is None:
            raise ValueError(
                f"layer {call.layer} computes its softmax itself and shows no values; load the model with "
                'attn_implementation="sdpa"'
            )
        leaf = result if result.requires_grad else result.detach().requires_grad_(True)
        calls.append((call.detached(), leaf))
        return leaf

    with torch.inference_mode(False), torch.enable_grad(), quiet(model), captured_calls(model, attention, visit):
        loss = loss_of(model, input_ids.clone(), labels)
        require_seen((geometry.layer for geometry in attention), (call.layer for call, _ in calls))
        gradients = torch.autograd.grad(loss.end, [leaf for _, leaf in calls], loss.gradient)
    outputs = [leaf.detach() for _, leaf in calls]
    return loss.value, list(zip((call for call, _ in calls), outputs, gradients, strict=True))


@torch.no_grad()
def _by_distance(
    call: AttentionCall, output: Tensor, gradient: Tensor, positions: list[int], chunk_tokens: int
) -> Array:
    """`Σ_{t,h} |∂L/∂e[t, t−τ]|` over the queries at `positions`, for every τ from 0: [T]."""
    normalisers = log_normalisers(call, positions, chunk_tokens=chunk_tokens)
    pulled = gradient[:, :, positions].float()
    batch, heads, num, width = pulled.shape
    groups = call.value.shape[1]
    mean = (pulled * output[:, :, positions].float()).sum(-1)
    totals = torch.zeros(call.num_keys, dtype=torch.float64, device=pulled.device)
    where = torch.tensor(positions, device=pulled.device)
    for chunk in logit_chunks(call, positions, chunk_tokens=chunk_tokens):
        stop = chunk.start + chunk.logits.shape[-1]
        rows = pulled[:, :, chunk.first :].reshape(batch, groups, heads // groups * (num - chunk.first), width)
        values = call.value[:, :, chunk.start : stop].float()
        on_weights = (rows @ values.transpose(-1, -2)).view(chunk.logits.shape)
        weights = torch.exp(chunk.logits - normalisers[..., chunk.first :].unsqueeze(-1))
        on_logits = weights * (on_weights - mean[..., chunk.first :].unsqueeze(-1))
        if chunk.slope is not None:
            on_logits = on_logits * chunk.slope
        sizes = on_logits.abs().sum((0, 1))
        gaps = where[chunk.first :, None] - torch.arange(chunk.start, stop, device=where.device)
        behind = gaps >= 0
        totals.index_add_(0, gaps[behind], sizes[behind].double())
    result: Array = totals.cpu().numpy()
    return result
