"""A section of a Markdown model card: how routing was protected, and what came of it."""

from __future__ import annotations

from routeguard.recall.result import RecallResult
from routeguard.report.run import RunReport
from routeguard.report.words import (
    amount_held,
    by_length,
    cell_text,
    drift_at_end,
    is_protected,
    layers_held,
    protection,
    restoration,
    summary,
)


def render_card(run: RunReport) -> str:
    """Markdown for the model's README on the Hub. What the run did not record is said to be so."""
    pairs = [
        ("Protection", protection(run)),
        ("Layers", layers_held(run)),
        ("Held", amount_held(run.coverage)),
        ("Drift at the end", drift_at_end(run)),
        ("Restore at the end", restoration(run)),
    ]
    if run.state is not None:
        pairs.append(("Start", f"{run.state.reference_origin} (sha256 `{run.state.reference_digest[:16]}`)"))
    if run.reasoning is not None:
        pairs.append(("Reasoning score", f"{run.reasoning[0]:g} before, {run.reasoning[1]:g} after"))
    for verdict in run.verdicts:
        said = verdict.problem if verdict.report is None else "passed" if verdict.report.ok else "FAILED"
        pairs.append((f"Recall gate, {verdict.name}", said))
    lines = [
        f"## {'Trained with routing protection' if is_protected(run) else 'Routing during training'}",
        "",
        f"{summary(run)} Measured and written by `routeguard`.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_cell(name)} | {_cell(value)} |" for name, value in pairs),
        "",
        *_recall(run),
    ]
    if run.warnings:
        lines += ["", "Warnings:", "", *(f"- {_line(warning)}" for warning in run.warnings)]
    return "\n".join(lines) + "\n"


def _recall(run: RunReport) -> list[str]:
    states = dict(run.given) or run.states_during
    if not states:
        return ["Recall was not measured."]
    any_result: RecallResult = next(iter(states.values()))
    tables = {name: by_length(result) for name, result in states.items()}
    lengths = sorted({n for cells in tables.values() for n in cells})
    how = "measured beside the run" if run.given else "measured during the run"
    counts = sorted({cell.count for cells in tables.values() for cell in cells.values()})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return [
        f"Recall, {how} ({', '.join(any_result.tasks)}; {samples} samples a length; 95 % interval):",
        "",
        f"| | {' | '.join(f'{n} tokens' for n in lengths)} |",
        f"|---|{'---|' * len(lengths)}",
        *(
            f"| {_cell(name)} | {' | '.join(cell_text(cells[n]) if n in cells else 'not measured' for n in lengths)} |"
            for name, cells in tables.items()
        ),
    ]


def _cell(value: str) -> str:
    return _line(value).replace("|", "\\|")


def _line(value: str) -> str:
    """One line of Markdown, in which HTML and links of the run's own texts stay text."""
    flat = " ".join(value.split())
    return flat.replace("<", "&lt;").replace("[", "\\[").replace("](", "]\\(")
