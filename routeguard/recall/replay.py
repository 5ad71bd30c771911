"""Mix retrieval samples into fine-tuning data, so that recall is trained as well."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from routeguard.recall.checks import check_lengths
from routeguard.recall.encoding import Encoder
from routeguard.recall.haystack_use import chosen_haystack, haystack_notes
from routeguard.recall.reasoning import SUFFIX
from routeguard.recall.registry import find_tasks
from routeguard.recall.result import RecallResult
from routeguard.recall.sample import Sample, build_sample
from routeguard.recall.task import Task

if TYPE_CHECKING:
    from routeguard.recall.probe import RecallProbe

REPLAY_TASKS = ("niah_single_2", "niah_multikey_1", "niah_multivalue")


def replay(
    dataset: Any,
    tokenizer: Any,
    share: float = 0.02,
    *,
    tasks: str | Task | Iterable[str | Task] | None = None,
    lengths: Sequence[int] = (512, 960),
    haystack: Any = None,
    seed: int = 0,
    probe: RecallProbe | RecallResult | None = None,
    fill: Mapping[str, Any] | None = None,
) -> Any:
    """Return a dataset in which `share` of the rows are retrieval samples, at random places among the others.

    Their names, variables, numbers and UUIDs are never those of `measure_recall` and `RecallProbe`, whatever the seeds
    (`key_words`: two halves), and their tasks not the probe's.
    A probe that asks the kind of question that is replayed proves little: it measures what was trained, not what was
    kept.

    Prompt and completion: TRL's loss is on the completion, here the answer. Messages: the last turn is the assistant's
    `prefix answer`; for a loss on answers only set `assistant_only_loss=True`. Packing needs nothing.

    Args:
        dataset: a `datasets.Dataset` with columns `prompt` and `completion` (texts, or lists of messages), or
            `messages`. Other columns must be named in `fill`.
        tokenizer: measures lengths; messages need its chat template.
        share: share of the new dataset's rows, above 0 and below 1.
        tasks: kinds of question. None (default): `REPLAY_TASKS`, less what the probe asks.
        lengths: tokens of a new row, in turn. Rows longer than the training's `max_length` (TRL: 1024 unless set) are
            dropped or cut by the Trainer, so that nothing is replayed; stay some tokens below it, since a chat template
            may end the answer's turn with a few more.
        haystack: as in `measure_recall`.
        seed: of all randomness.
        probe: the `RecallProbe`, or `RecallResult`, that this run is judged by: its tasks are left out, with or without
            reasoning before the question.
        fill: what the new rows have in the dataset's other columns, for example `{"source": "replay"}`; None is a
            value as well. Columns that nobody reads are better removed from the dataset.

    Raises ValueError for a share out of range or too small for a single row, for other columns that `fill` does not
    name, other kinds of dataset, for tasks that the probe asks, a probe or tokenizer that is none, and a haystack that
    no task uses.
    """
    style = _style(dataset)
    filling = _filling(dataset, style, dict(fill or {}))
    if not 0 < share < 1:
        raise ValueError(f"share={share}: give the share of rows that are replayed, above 0 and below 1")
    count = round(len(dataset) * share / (1 - share))
    if count < 1:
        raise ValueError(
            f"share={share} of {len(dataset)} rows is less than one row; give at least {1 / len(dataset):.2g}"
        )
    chosen, lengths = _tasks(tasks, probe), check_lengths(lengths)
    encoder = Encoder(tokenizer, chat=style in ("messages", "prompt messages"))
    text = chosen_haystack(haystack, chosen)
    rng = random.Random(f"replay/{seed}")
    samples = [
        build_sample(
            chosen[i % len(chosen)],
            encoder,
            length_tokens=lengths[i // len(chosen) % len(lengths)],
            depth=rng.random(),
            index=i,
            haystack=text,
            seed=seed,
            split="replay",
        )
        for i in range(count)
    ]
    rows = [{**filling, **_row(sample, style)} for sample in samples]
    print(
        f"routeguard: replay: {count} of {len(dataset) + count} rows ask {', '.join(task.name for task in chosen)} at "
        f"{', '.join(map(str, lengths))} tokens; a probe on these kinds proves little "
        "(their names and values are not the probe's)",
        flush=True,
    )
    if style == "messages":
        print(
            "routeguard: replay: with messages the loss is on the answers only if the Trainer has "
            "assistant_only_loss=True; without it, it is on the whole haystack too",
            flush=True,
        )
    for note in haystack_notes(text, chosen):
        print(f"routeguard: replay: note: {note}", flush=True)
    return _mixed(dataset, rows, rng)


def _style(dataset: Any) -> str:
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        raise ValueError(f"replay takes a datasets.Dataset (one split, not streamed); got {type(dataset).__name__}")
    columns = set(dataset.column_names)
    if not len(dataset):
        raise ValueError("the dataset has no rows")
    if {"prompt", "completion"} <= columns:
        kinds = {"text" if isinstance(dataset[0][name], str) else "messages" for name in ("prompt", "completion")}
        if len(kinds) > 1:
            raise ValueError("prompt and completion must both be texts or both be lists of messages")
        return "prompt text" if kinds == {"text"} else "prompt messages"
    if "messages" in columns:
        return "messages"
    raise ValueError(
        f"replay needs columns prompt and completion, or messages; the dataset has {', '.join(dataset.column_names)}"
    )


def _filling(dataset: Any, style: str, fill: dict[str, Any]) -> dict[str, Any]:
    own = {"messages"} if style == "messages" else {"prompt", "completion"}
    others = [name for name in dataset.column_names if name not in own]
    unfilled = [name for name in others if name not in fill]
    if unfilled:
        raise ValueError(
            f"the dataset has other columns: {', '.join(unfilled)}; say what replayed rows have there, "
            f"fill={ {unfilled[0]: None} } (None where the Trainer takes it), or remove them: "
            f"dataset.remove_columns({unfilled})"
        )
    unknown = [name for name in fill if name not in others]
    if unknown:
        raise ValueError(
            f"fill names {', '.join(unknown)}; the dataset's other columns are {', '.join(others) or 'none'}"
        )
    return fill


def _probed(probe: Any) -> set[str]:
    """The kinds of question that a probe or a result asks, whether after reasoning or not."""
    if probe is None:
        return set()
    from routeguard.recall.probe import RecallProbe

    if isinstance(probe, RecallResult):
        names: Iterable[str] = probe.tasks
    elif isinstance(probe, RecallProbe):
        names = [task.name for task in probe.tasks]
    else:
        inner = getattr(probe, "probe", None)
        hint = "; give the guard's own probe, probe=guard.probe" if isinstance(inner, RecallProbe) else ""
        raise ValueError(f"probe takes a RecallProbe or a RecallResult; got {type(probe).__name__}{hint}")
    return {name.removesuffix(SUFFIX) for name in names}


def _tasks(tasks: str | Task | Iterable[str | Task] | None, probe: Any) -> tuple[Task, ...]:
    probed = _probed(probe)
    if tasks is None:
        left = [name for name in REPLAY_TASKS if name not in probed]
        if not left:
            raise ValueError(f"the probe asks all of {', '.join(REPLAY_TASKS)}; give tasks= that it does not ask")
        return find_tasks(left)
    chosen = find_tasks(tasks)
    both = [task.name for task in chosen if task.name.removesuffix(SUFFIX) in probed]
    if both:
        raise ValueError(
            f"the probe asks {', '.join(both)} too: it would measure what is trained; replay other tasks, or "
            "probe others"
        )
    return chosen


def _row(sample: Sample, style: str) -> dict[str, Any]:
    if style == "prompt text":
        prompt = "\n".join(sample.turns) + " " + sample.answer_prefix
        return {"prompt": prompt, "completion": f"{sample.answer}."}
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(sample.turns)]
    answer = {"role": "assistant", "content": f"{sample.answer_prefix}{sample.answer}."}
    return {"messages": [*messages, answer]} if style == "messages" else {"prompt": messages, "completion": [answer]}


def _mixed(dataset: Any, rows: list[dict[str, Any]], rng: random.Random) -> Any:
    from datasets import Dataset, concatenate_datasets

    columns = {name: [row.get(name) for row in rows] for name in dataset.column_names}
    try:
        new = Dataset.from_dict(columns, features=dataset.features)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"replayed rows do not fit the dataset's columns {dataset.features}: {error}") from None
    total = len(dataset) + len(rows)
    places = set(rng.sample(range(total), len(rows)))
    own, replayed = iter(range(len(dataset))), iter(range(len(dataset), total))
    order = [next(replayed) if i in places else next(own) for i in range(total)]
    return concatenate_datasets([dataset, new]).select(order)
