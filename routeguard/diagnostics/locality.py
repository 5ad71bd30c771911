"""How far does a dataset reach, and how far does training on it reach? W of the data beside W of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from routeguard.diagnostics.autocorrelation import Normalisation, TokenAutocorrelation, token_autocorrelation
from routeguard.diagnostics.decay_fit import DecayFit
from routeguard.diagnostics.gradient import gradient_locality
from routeguard.diagnostics.reach import Reach, curve_fit, fit_weakness, listed, reach
from routeguard.diagnostics.sample_layouts import IGNORED
from routeguard.recall.model_config import refuse_beyond_positions
from routeguard.routes.wording import as_printed

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from routeguard.diagnostics.gradient import GradientLocality
    from routeguard.diagnostics.sample_draw import DataRead

SCHEMA_VERSION = 1
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
THRESHOLD = 0.01
Verdict = Literal["reinforced", "hardly reinforced", "unknown"]


@dataclass(frozen=True, eq=False)
class LocalityReport:
    """Locality of a dataset, and of the gradients that it gives a model.

    Attributes:
        data: autocorrelation of its tokens.
        gradient: of a model's loss on it, or None if no model was given.
        reaches: for each length what is left of the gradient (without a model: of the autocorrelation, which says how
            local the tokens are and not what training reinforces) there.
        threshold: shares of the gradient below count as hardly reinforced.
        normalisation: of the autocorrelation that `W_data` is fitted to.
        unlabelled: packed sequences of the data left out of the gradient, for they have no label that counts.
        read: how much of the dataset's file the documents are; None where documents were given.
    """

    data: TokenAutocorrelation
    gradient: GradientLocality | None
    reaches: tuple[Reach, ...]
    threshold: float = THRESHOLD
    normalisation: Normalisation = "covariance"
    unlabelled: int = 0
    read: DataRead | None = None

    def verdict(self, one: Reach) -> Verdict:
        """What training does at a length: unknown without a model, and where neither measured nor well fitted."""
        if self.gradient is None or not one.known:
            return "unknown"
        return "reinforced" if one.share >= self.threshold else "hardly reinforced"

    @property
    def reinforced(self) -> tuple[int, ...]:
        """The lengths at which training gives attention a signal."""
        return self._lengths("reinforced")

    @property
    def unreinforced(self) -> tuple[int, ...]:
        """The lengths at which training leaves attention (almost) without a signal."""
        return self._lengths("hardly reinforced")

    @property
    def unknown(self) -> tuple[int, ...]:
        """The lengths of which nothing can be said: all without a model; else those that no good fit reaches."""
        return self._lengths("unknown")

    def _lengths(self, verdict: Verdict) -> tuple[int, ...]:
        return tuple(one.length for one in self.reaches if self.verdict(one) == verdict)

    @property
    def data_width(self) -> DecayFit | None:
        """Fit of the data's autocorrelation, W_data; None where there is nothing to fit."""
        return curve_fit(self.data.curve(self.normalisation))

    @property
    def gradient_width(self) -> DecayFit | None:
        """Fit of the gradient of all layers, W_grad; None without a model or where there is nothing to fit."""
        return None if self.gradient is None else curve_fit(self.gradient.pooled)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "data": self.data.to_dict(),
            "gradient": None if self.gradient is None else self.gradient.to_dict(),
            "normalisation": self.normalisation,
            "W_data": None if self.data_width is None else vars(self.data_width),
            "W_grad": None if self.gradient_width is None else vars(self.gradient_width),
            "threshold": self.threshold,
            "reaches": [{**vars(one), "verdict": self.verdict(one)} for one in self.reaches],
            "reinforced": list(self.reinforced),
            "unreinforced": list(self.unreinforced),
            "unknown": list(self.unknown),
            "unlabelled_sequences": self.unlabelled,
            "read": None if self.read is None else vars(self.read),
        }

    def __str__(self) -> str:
        source = "token autocorrelation (no model was given)" if self.gradient is None else "gradient on attention"
        lines = [str(self.data)] if self.read is None else [str(self.read), str(self.data)]
        if self.gradient is not None:
            lines.append(str(self.gradient))
        if self.unlabelled:
            lines.append(f"left out of the gradient: {self.unlabelled} sequences of the data with no label that counts")
        lines.append(f"W_data  {self.data_width or 'no fit'}")
        if self.gradient is not None:
            lines.append(f"W_grad  {self.gradient_width or 'no fit'}")
        lines.append(f"{source} at a distance, as a share of what is usual at 1 to 32 tokens:")
        lines += [f"  {one.length:>7} tokens  {self._share(one)}" for one in self.reaches]
        return "\n".join([*lines, *self._verdicts()])

    _repr_pretty_ = as_printed

    def _share(self, one: Reach) -> str:
        if not one.known:
            return "not measured" if self.gradient is None else "unknown"
        how = "" if one.measured else "  by the fit, beyond what was measured"
        low = self.verdict(one) == "hardly reinforced"
        return f"{one.share:.2g}{how}" + (f"  below {self.threshold:.0%}: hardly reinforced" if low else "")

    def _verdicts(self) -> list[str]:
        if self.gradient is None:
            return [
                "this is how local the tokens are; it does not say which distances training reinforces: a verdict by "
                "length needs the model (model=, --model)"
            ]
        lines = []
        for verdict, words in (("reinforced", "reinforces"), ("hardly reinforced", "will hardly reinforce")):
            found = [one for one in self.reaches if self.verdict(one) == verdict]
            if found:
                lines.append(f"training on this data {words} attention {listed(found)}")
        if self.unknown:
            weakness = fit_weakness(self.gradient_width) or "no signal was seen at 1 to 32 tokens"
            lines.append(
                f"unknown at {', '.join(map(str, self.unknown))} tokens: beyond what was measured, and {weakness}"
            )
        return lines

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
            packed end to end; sequences without a label that counts are left out), and each length gets a verdict;
            without, only how local the tokens are is told.
        labels: like documents, −100 where the loss does not count (prompts, tool output). Default: every token counts.
        lengths: distances in tokens to report on.
        threshold: share of the usual nearby gradient below which a distance is hardly reinforced, default 0.01.
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
    reaches = tuple(reach(curve, length, extrapolate=gradient is not None) for length in sorted(lengths))
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
