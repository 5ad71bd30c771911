"""How far does a dataset reach, and how far does training on it reach? W of the data beside W of the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from routeguard.diagnostics.autocorrelation import Normalisation, TokenAutocorrelation, token_autocorrelation
from routeguard.diagnostics.decay_fit import DecayCurve, DecayFit, fit_decay
from routeguard.diagnostics.gradient import gradient_locality
from routeguard.diagnostics.running import refuse_beyond_positions
from routeguard.diagnostics.sample_layouts import IGNORED

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from routeguard.diagnostics.gradient import GradientLocality

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
THRESHOLD = 0.01
_NEAR_TOKENS = 32
_NEARBY = 0.1  # a curve is read at a length as its mean over lags within this share of it


@dataclass(frozen=True)
class Reach:
    """What is left of a curve at one length.

    Attributes:
        length: distance in tokens.
        share: of what is usual nearby (the median of the positive values at 1 to 32 tokens); from 0, may exceed 1; nan
            where neither measured nor fitted.
        measured: read off the curve; otherwise from the exponential fit, which is a guess beyond the measured lags.
    """

    length: int
    share: float
    measured: bool


@dataclass(frozen=True, eq=False)
class LocalityReport:
    """Locality of a dataset, and of the gradients that it gives a model.

    Attributes:
        data: autocorrelation of its tokens.
        gradient: of a model's loss on it, or None if no model was given.
        reaches: for each length what is left of the gradient (without a model: of the autocorrelation) there.
        threshold: shares below count as not reinforced.
        normalisation: of the autocorrelation that `W_data` is fitted to.
        unlabelled: packed sequences of the data left out of the gradient, for they have no label that counts.
    """

    data: TokenAutocorrelation
    gradient: GradientLocality | None
    reaches: tuple[Reach, ...]
    threshold: float = THRESHOLD
    normalisation: Normalisation = "covariance"
    unlabelled: int = 0

    @property
    def unreinforced(self) -> tuple[int, ...]:
        """The lengths at which training leaves attention (almost) without a signal."""
        return tuple(reach.length for reach in self.reaches if reach.share < self.threshold)

    @property
    def unknown(self) -> tuple[int, ...]:
        """The lengths of which nothing can be said: beyond what was measured, and without a fit that falls."""
        return tuple(reach.length for reach in self.reaches if math.isnan(reach.share))

    @property
    def data_width(self) -> DecayFit | None:
        """Fit of the data's autocorrelation, W_data; None where there is nothing to fit."""
        return _fit(self.data.curve(self.normalisation))

    @property
    def gradient_width(self) -> DecayFit | None:
        """Fit of the gradient of all layers, W_grad; None without a model or where there is nothing to fit."""
        return None if self.gradient is None else _fit(self.gradient.pooled)

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data.to_dict(),
            "gradient": None if self.gradient is None else self.gradient.to_dict(),
            "normalisation": self.normalisation,
            "W_data": None if self.data_width is None else vars(self.data_width),
            "W_grad": None if self.gradient_width is None else vars(self.gradient_width),
            "threshold": self.threshold,
            "reaches": [vars(reach) for reach in self.reaches],
            "unreinforced": list(self.unreinforced),
            "unknown": list(self.unknown),
            "unlabelled_sequences": self.unlabelled,
        }

    def __str__(self) -> str:
        source = "token autocorrelation (no model was given)" if self.gradient is None else "gradient on attention"
        lines = [str(self.data)]
        if self.gradient is not None:
            lines.append(str(self.gradient))
        if self.unlabelled:
            lines.append(f"left out of the gradient: {self.unlabelled} sequences of the data with no label that counts")
        lines.append(f"W_data  {self.data_width or 'no fit'}")
        if self.gradient is not None:
            lines.append(f"W_grad  {self.gradient_width or 'no fit'}")
        lines.append(f"{source} at a distance, as a share of what is usual at 1 to 32 tokens:")
        lines += [f"  {reach.length:>7} tokens  {self._verdict(reach)}" for reach in self.reaches]
        if self.unreinforced:
            lines.append(
                f"training on this data will hardly reinforce attention at {_listed(self.unreinforced)} tokens"
            )
        if self.unknown:
            lines.append(
                f"not known at {_listed(self.unknown)} tokens: neither measured there nor a fall that could be fitted; "
                "give more or longer data, or ask for shorter lengths"
            )
        if not self.unreinforced and not self.unknown:
            guessed = "" if all(reach.measured for reach in self.reaches) else ", some by the fit only"
            lines.append(f"every length asked about is reinforced{guessed}")
        return "\n".join(lines)

    def _verdict(self, reach: Reach) -> str:
        if math.isnan(reach.share):
            return "not known"
        how = "" if reach.measured else "  by the fit, beyond what was measured"
        below = f"  below {self.threshold:.0%}: not reinforced" if reach.share < self.threshold else ""
        return f"{reach.share:.2g}{how}{below}"

    def plot(self, path: str | Path | None = None) -> Figure:
        """Data and gradient beside each other; written to `path` if given. Needs `routeguard[plots]`."""
        from routeguard.diagnostics.locality_plot import plot_locality

        return plot_locality(self, path)


def locality(
    documents: Sequence[Sequence[int]],
    *,
    model: nn.Module | None = None,
    labels: Sequence[Sequence[int]] | None = None,
    lengths: Sequence[int] = LENGTHS,
    threshold: float = THRESHOLD,
    normalisation: Normalisation = "covariance",
    max_lag: int = 512,
    sequence_tokens: int = 1024,
    num_sequences: int = 8,
    seed: int = 0,
    insist: bool = False,
) -> LocalityReport:
    """Ask before training: how local is this data, and which distances will training on it not reinforce?

    Args:
        documents: token ids of each sample.
        model: the model to be trained. With it, the gradient on its attention logits is measured on the data (samples
            packed end to end; sequences without a label that counts are left out); without, the data's own
            autocorrelation stands in for it, which is a guess.
        labels: like documents, −100 where the loss does not count (prompts, tool output). Default: every token counts.
        lengths: distances in tokens to report on.
        threshold: share of the usual nearby signal below which a distance counts as not reinforced, default 0.01.
        normalisation: of the autocorrelation that W_data is fitted to, default "covariance".
        max_lag: of the autocorrelation, default 512.
        sequence_tokens: length of the packed sequences, default 1024.
        num_sequences: how many are taken from the data, default 8.
        seed: of all draws.
        insist: take sequences beyond the positions that the model's configuration names.

    Raises:
        ValueError: too little data, or what `token_autocorrelation` and `gradient_locality` refuse.

    Source: paper, W of data and of gradients; the threshold and the reading of single lengths are ours.
    """
    if not lengths or min(lengths) < 1 or not 0 < threshold < 1:
        raise ValueError(
            f"lengths={list(lengths)}, threshold={threshold}: give lengths of 1 or more, a threshold in (0, 1)"
        )
    if model is not None and (sequence_tokens < 2 or num_sequences < 1):
        raise ValueError(f"{num_sequences} × {sequence_tokens} tokens asked for; give at least one sequence of 2")
    if model is not None and not insist:
        refuse_beyond_positions(model, sequence_tokens)
    autocorrelation = token_autocorrelation(documents, max_lag=max_lag, seed=seed)
    gradient, unlabelled = None, 0
    if model is not None:
        if labels is not None and [len(row) for row in labels] != [len(row) for row in documents]:
            raise ValueError("labels must have a label for each token of each document")
        rows, targets, unlabelled = packed(documents, sequence_tokens, num_sequences, labels=labels)
        gradient = gradient_locality(model, rows, labels=targets, seed=seed, insist=insist)
    curve = autocorrelation.curve(normalisation) if gradient is None else gradient.pooled
    reaches = tuple(_reach(curve, length) for length in sorted(lengths))
    return LocalityReport(autocorrelation, gradient, reaches, threshold, normalisation, unlabelled)


def packed(
    documents: Sequence[Sequence[int]],
    num_tokens: int,
    num_sequences: int,
    *,
    labels: Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor, int]:
    """Tokens and labels of sequences of documents end to end, both [num_sequences, num_tokens], spread over the data.

    The number is that of the data's sequences in which no label counts; those are left out. Raises ValueError for less
    data than one sequence, and where none is left.
    """
    import torch

    stream, targets = (torch.tensor([one for row in rows for one in row]) for rows in (documents, labels or documents))
    have = len(stream) // num_tokens
    if have < 1:
        raise ValueError(f"the data has {len(stream)} tokens, one sequence takes {num_tokens}; ask for shorter ones")
    stream, targets = (flat[: have * num_tokens].view(have, num_tokens) for flat in (stream, targets))
    usable = torch.nonzero((targets[:, 1:] != IGNORED).any(1)).flatten()  # the first token is predicted from nothing
    if not len(usable):
        raise ValueError(
            f"no label of a sequence counts: all {have} sequences of {num_tokens} tokens are prompts only (-100); ask "
            "for longer sequences, or check the labels"
        )
    taken = min(num_sequences, len(usable))
    chosen = usable[[number * len(usable) // taken for number in range(taken)]]
    return stream[chosen], targets[chosen], have - len(usable)


def _reach(curve: DecayCurve, length: int) -> Reach:
    values = curve.values
    # Not the value at one token, nor the largest: a text may never repeat a token at once, and single lags stand out.
    nearby = values[(curve.lags >= 1) & (curve.lags <= _NEAR_TOKENS) & (curve.counts.sum(0) > 0)]
    usual = float(np.median(nearby[nearby > 0])) if (nearby > 0).any() else math.nan
    near = (curve.lags >= length * (1 - _NEARBY)) & (curve.lags <= length * (1 + _NEARBY)) & (curve.counts.sum(0) > 0)
    if length <= curve.lags[-1] and near.any():
        return Reach(length, max(float(values[near].mean()) / usual, 0.0), True)
    fit = _fit(curve)
    known = fit is not None and math.isfinite(fit.width_tokens)  # where no fall was seen, none can be carried on
    return Reach(length, fit.at(length) / usual if fit is not None and known else math.nan, False)


def _fit(curve: DecayCurve) -> DecayFit | None:
    try:
        return fit_decay(curve)
    except ValueError:
        return None


def _listed(lengths: Sequence[int]) -> str:
    return f"{lengths[0]}" if len(lengths) == 1 else f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"
