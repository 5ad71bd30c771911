"""The report as one HTML page: no script, no picture or style from elsewhere."""

from __future__ import annotations

from routeguard import __version__
from routeguard.report import markup
from routeguard.report.drift_section import drift_section
from routeguard.report.recall_section import gate_section, recall_given_section, recall_run_section
from routeguard.report.run import RunReport
from routeguard.report.style import style_sheet
from routeguard.report.words import (
    NOT_RECORDED,
    amount_held,
    by_length,
    drift_at_end,
    layers_held,
    number,
    protection,
    restoration,
    summary,
)
from routeguard.restoration.report import RestoreReport


def render_page(run: RunReport) -> str:
    """The whole page as text."""
    name = run.folder.resolve().name or str(run.folder)
    title = f"routeguard: {name}"
    body = "".join(
        [
            f"<header><h1>{markup.text(name)}</h1>",
            markup.paragraph(summary(run), "soft"),
            markup.facts(_overview(run)),
            "</header><main>",
            _warnings(run),
            _held(run),
            drift_section(run),
            recall_run_section(run),
            recall_given_section(run),
            gate_section(run),
            _training(run),
            _environment(run),
            _remarks(run),
            "</main>",
            f"<footer>{markup.paragraph(f'Page written by routeguard {__version__} from {run.folder}.')}</footer>",
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{markup.text(title)}</title><style>{style_sheet()}</style></head>\n<body>{body}</body></html>\n"
    )


def _overview(run: RunReport) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = [
        ("Protection", protection(run)),
        ("Restore at the end", restoration(run)),
        ("Drift at the end", drift_at_end(run)),
    ]
    states = {f"{name} the run": r for name, r in run.given.items()} or run.states_during
    if states:
        parts = []
        for state, result in states.items():
            cells = ", ".join(f"{cell.accuracy:.2f} at {length}" for length, cell in by_length(result).items())
            parts.append(f"{state.replace(' the run', '')}: {cells}")
        pairs.append(("Recall by tokens", "; ".join(parts)))
    for verdict in run.verdicts:
        if verdict.report is not None:
            pairs.append((f"Gate, {verdict.name}", "passed" if verdict.report.ok else "FAILED"))
    pairs.append(("Warnings", len(run.warnings) or "none"))
    return pairs


def _warnings(run: RunReport) -> str:
    if not run.warnings:
        return markup.section("Warnings and failures", markup.paragraph("None recorded."))
    return markup.section("Warnings and failures", markup.bullets(run.warnings, "warnings"))


def _held(run: RunReport) -> str:
    state, found = run.state, run.coverage
    parts = [
        markup.facts(
            [
                ("Mode", protection(run)),
                ("Layers of full attention", layers_held(run)),
                ("Roles", NOT_RECORDED if state is None else ", ".join(state.roles)),
                ("Norm gains too", NOT_RECORDED if state is None else "yes" if state.norms else "no"),
                ("Covered", amount_held(found)),
                ("Start", NOT_RECORDED if state is None else state.reference_origin),
                ("Digest of the start", NOT_RECORDED if state is None else f"sha256 {state.reference_digest}"),
                ("Guarded stage of these weights", NOT_RECORDED if state is None else state.stage),
            ]
        )
    ]
    if found is not None:
        rows = [
            (layer.layer, tensor, f"{held:,} of {total:,}")
            for layer in found.layers
            for tensor, held, total in layer.tensors
        ]
        parts.append(markup.table(f"Tensors, from {found.source}", ("layer", "tensor", "rows held"), rows, words={1}))
    if isinstance(run.restore, RestoreReport):
        parts.append(
            markup.table(
                f"Put back at the end with {run.restore.method}",
                ("layer", "tensors", "rows", "changed bytes", "drift before"),
                [
                    (
                        layer.layer,
                        len(layer.tensors),
                        layer.num_rows,
                        f"{layer.changed_bytes:,}",
                        ", ".join(f"{r} {number(v)}" for r, v in layer.drift_before.items()) or "not measured",
                    )
                    for layer in run.restore.layers
                ],
                words={4},
            )
        )
    return markup.section("What was held", *parts)


def _training(run: RunReport) -> str:
    found = run.training
    if found is None:
        return ""
    steps = str(found.step) if found.max_steps is None else f"{found.step} of {found.max_steps}"
    pairs: list[tuple[str, object]] = [
        ("Optimizer steps", steps),
        ("Epochs", number(found.epoch)),
        ("First logged loss", number(found.first_loss)),
        ("Last logged loss", number(found.last_loss)),
        ("From", found.source),
    ]
    return markup.section("Training", markup.facts(pairs))


def _environment(run: RunReport) -> str:
    rows = [(r.name, r.value or NOT_RECORDED, r.source or "") for r in run.environment]
    note = "Only what the run's own files say; the machine that wrote this page is not asked."
    return markup.section(
        "Environment",
        markup.paragraph(note, "soft"),
        markup.table("Model and packages", ("what", "value", "file"), rows, words={1, 2}),
    )


def _remarks(run: RunReport) -> str:
    parts = [markup.bullets(run.absent) if run.absent else markup.paragraph("Nothing is missing.")]
    notes = markup.section("Notes", markup.bullets(run.notes)) if run.notes else ""
    return notes + markup.section("Not in this report", *parts)
