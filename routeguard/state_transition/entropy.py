"""Which words a model is unsure to begin a sentence with: where reasoning turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from routeguard.plots import COLOURS, finish, new_figure, tidy
from routeguard.recall.quiet import undisturbed
from routeguard.routes.wording import as_printed
from routeguard.state_transition.segment import normal, sentences, stands_alone

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class WordEntropy:
    """A word that begins sentences: how often, and the mean entropy in nats of the prediction made before it."""

    word: str
    count: int
    entropy: float


@dataclass(frozen=True)
class TransitionWords:
    """Words found, those of highest entropy first, with what they were chosen from.

    Attributes:
        chosen: the transition words.
        others: further sentence-initial words that are frequent enough.
        typical: mean entropy over all tokens of the traces, in nats.
        num_traces, num_sentences: what was read.
    """

    chosen: tuple[WordEntropy, ...]
    others: tuple[WordEntropy, ...]
    typical: float
    num_traces: int
    num_sentences: int

    @property
    def words(self) -> tuple[str, ...]:
        """For `segment_steps(words=…)`."""
        return tuple(found.word for found in self.chosen)

    def __str__(self) -> str:
        rows = "\n".join(f"  {w.word:<16} {w.count:>5} x  {w.entropy:.2f}" for w in self.chosen)
        return (
            f"{len(self.chosen)} transition words of {len(self.chosen) + len(self.others)} frequent ones, "
            f"{self.num_sentences} sentences in {self.num_traces} traces; entropy before them in nats "
            f"(all tokens: {self.typical:.2f})\n{rows}"
        )

    _repr_pretty_ = as_printed

    def plot(self, path: str | Path | None = None) -> Figure:
        """Entropy before each word as bars, chosen and others; written to `path` if given."""
        shown = [*self.chosen, *self.others][:40]
        figure, axes = new_figure(width=7, height=0.6 + 0.24 * len(shown))
        colours = [COLOURS[1]] * len(self.chosen) + [COLOURS[7]] * len(self.others)
        axes.barh(range(len(shown)), [w.entropy for w in shown], color=colours[: len(shown)])
        axes.set_yticks(range(len(shown)), [f"{w.word} ({w.count})" for w in shown], fontsize=8)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        axes.axvline(self.typical, color=COLOURS[0], linestyle="--", label="all tokens")
        axes.set_xlabel("mean entropy before the word, nats (orange: chosen)")
        axes.legend(frameon=False, loc="lower right")
        tidy(axes, grid="x")
        return finish(figure, path)


def transition_words(
    model: Any,
    tokenizer: Any,
    traces: Iterable[str],
    *,
    share: float = 0.25,
    min_count: int = 5,
    max_tokens: int = 2048,
) -> TransitionWords:
    """Find a model's transition words: those that begin sentences and that it predicts with high entropy.

    Where a script has no blanks, the sentence's first token is taken for a word.

    Args:
        model: a causal language model; read without gradients and left as it was.
        tokenizer: a fast one (it must say where tokens stand in the text).
        traces: reasoning texts.
        share: of the frequent words that is chosen, 0 to 1. Default 0.25 (ours).
        min_count: how often a word must begin a sentence to be counted. Default 5 (ours).
        max_tokens: read of each trace at most. Default 2048.

    Raises ValueError where no word is frequent enough, or the tokenizer gives no places.

    Source: arXiv 2602.01198, data; shares and counts are ours.
    """
    if not 0 < share <= 1 or min_count < 1:
        raise ValueError(f"share must be above 0 and at most 1, min_count at least 1; got {share} and {min_count}")
    sums: dict[str, list[float]] = {}
    total, num_tokens, num_traces, num_sentences = 0.0, 0, 0, 0
    for trace in traces:
        entropies, starts = _entropies(model, tokenizer, trace, max_tokens)
        num_traces += 1
        total += float(entropies.sum())
        num_tokens += len(entropies)
        for sentence in sentences(trace)[1:]:
            place, stop = starts.get(sentence.word_start, (None, 0))
            word = sentence.first_word
            if stands_alone(word):  # no blanks tell where a word ends, the tokenizer may
                word = normal(trace[sentence.word_start : stop])
            if place is not None and word:
                sums.setdefault(word, []).append(float(entropies[place]))
                num_sentences += 1
    frequent = [WordEntropy(word, len(v), sum(v) / len(v)) for word, v in sums.items() if len(v) >= min_count]
    if not frequent:
        raise ValueError(
            f"no word begins {min_count} sentences of {num_traces} traces ({num_sentences} sentences read); give more "
            "traces or a smaller min_count"
        )
    frequent.sort(key=lambda found: -found.entropy)
    number = max(1, round(share * len(frequent)))
    typical = total / max(num_tokens, 1)
    return TransitionWords(tuple(frequent[:number]), tuple(frequent[number:]), typical, num_traces, num_sentences)


@torch.no_grad()
def _entropies(model: Any, tokenizer: Any, text: str, max_tokens: int) -> tuple[Tensor, dict[int, tuple[int, int]]]:
    """Entropy of the prediction before each token but the first; by place, which begins there and where it stops."""
    try:
        encoded = tokenizer(text, return_offsets_mapping=True, truncation=True, max_length=max_tokens)
    except NotImplementedError as error:
        raise ValueError("transition words need a fast tokenizer, which says where its tokens stand") from error
    device = next(model.parameters()).device
    ids = torch.tensor([encoded["input_ids"]], device=device)
    with undisturbed(model):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    entropies = []
    for part in logits.split(256):
        logs = torch.log_softmax(part.float(), -1)
        entropies.append(-(logs.exp() * logs).sum(-1))
    starts: dict[int, tuple[int, int]] = {}
    for index, (start, stop) in enumerate(encoded["offset_mapping"]):
        if index and text[start:stop].strip():
            blank = len(text[start:stop]) - len(text[start:stop].lstrip())
            starts.setdefault(start + blank, (index - 1, stop))
    return torch.cat(entropies).cpu() if entropies else torch.zeros(0), starts
