"""Do to a model without weights what a guard does before the first step, and collect what it refuses or warns about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from routeguard.doctor.environment import missing_extra
from routeguard.doctor.findings import Finding, collecting
from routeguard.doctor.settings import TrainingSettings
from routeguard.protect.adapter_inits import ZERO_B_INITS
from routeguard.protect.adapter_start import ZERO_FACTORS
from routeguard.protect.freeze import refuse_started_adapters
from routeguard.protect.groups import check_pull_rate
from routeguard.protect.held import Held, held_parameters
from routeguard.protect.l2_sp import WholePull, pull_to, trained_weights
from routeguard.protect.modes import L2SP, Anchor, LowLR
from routeguard.protect.recipes import Recipe
from routeguard.routes.collection import Routes
from routeguard.sharding.zero import refuse_masters_on_disk
from routeguard.training.engines import (
    refuse_masters_without_zero,
    refuse_probing,
    refuse_split_rows,
    refuse_unsupported_engine,
)
from routeguard.training.guard import RouteGuard
from routeguard.training.protector import Protector, refuse_quantised_without_adapter
from routeguard.training.resolution import FEW, moving_share, too_small
from routeguard.training.summary import summarise

_STEPS_OF_ABOUT_LR = ("adam", "lion")  # families whose step on a steadily pushed entry is about the learning rate


def rehearse_engine(settings: TrainingSettings, chosen: Recipe, *, probed: bool = False) -> list[Finding]:
    """What the engine refuses, whatever the model; `probed` where the guard has a recall probe."""
    engine = settings.engine
    if engine is None:
        return []
    findings: list[Finding] = []
    with collecting(findings, "engine"):
        refuse_unsupported_engine(engine, chosen.protect, chosen.restore)
    with collecting(findings, "engine"):
        if engine.name == "DeepSpeed" and settings.zero_stage == 0 and settings.mixed_precision is not None:
            refuse_masters_without_zero()
    try:
        refuse_probing(engine)
    except ValueError as error:
        advice = "measure saved checkpoints with `routeguard recall`"
        findings.append(Finding("error" if probed else "warning", "recall", str(error), advice))
    if not any(finding.level == "error" for finding in findings):
        findings.append(Finding("ok", "engine", f"{engine.name} carries {chosen.protect.name}"))
    return findings


def rehearse_guard(model: Any, settings: TrainingSettings, guard: RouteGuard) -> tuple[Routes | None, list[Finding]]:
    """Hold the model, split an optimizer: what is held, or what keeps it from being held.

    Args:
        model: without weights, adapters included. It is changed, as a guard changes it.
        settings: of the run.
        guard: the guard of the run, which stays as it is.
    """
    findings: list[Finding] = []
    chosen = Recipe(guard.protect, guard.restore)
    protector = Protector(guard.protect, layers=guard.layers, roles=guard.roles, norms=guard.norms)
    held: list[Held] = []
    with collecting(findings, "guard"):
        held = protector.find(model)
        refuse_split_rows(settings.engine, chosen.protect, held)
        if settings.quantised_bits is not None and settings.adapter is None:
            refuse_quantised_without_adapter([h.name for h in held])
        protector.hold(model)
        _refuse_started_adapter(protector, settings)
    routes = protector.routes
    if routes is None or any(finding.level == "error" for finding in findings):
        return routes, findings
    pull = _pull(model, settings) if isinstance(chosen.protect, L2SP) else None
    findings.insert(0, Finding("ok", "guard", _summary(protector, routes, held, settings, chosen, pull)))
    findings += _optimizer(protector, model, settings)
    with collecting(findings, "engine"):
        trained = [h for h in held_parameters(model, routes) if h.trainable]
        if settings.masters_on_disk and trained:
            refuse_masters_on_disk(trained[0].name)
    findings += _resolution(model, trained, settings, chosen)
    return routes, findings


def _pull(model: Any, settings: TrainingSettings) -> WholePull:
    """L2SP's pull of what the run trains, with a stand-in of the start that has its shapes, dtypes and zeros."""
    trained = trained_weights(model)
    init = None if settings.adapter is None else settings.adapter.init
    in_linear, in_embedding = ZERO_FACTORS
    zero = [in_linear] if init in ZERO_B_INITS else []
    zero += [in_embedding] if init not in (None, False, "loftq") else []  # PEFT's: PiSSA is for linear maps
    starts = {
        name: torch.full((), 0.0 if any(part in name for part in zero) else 1.0, dtype=p.dtype).expand(p.shape)
        for name, p in trained.items()
    }
    return pull_to(torch.optim.SGD(list(trained.values())), model, starts, strength=1.0)


def _summary(
    protector: Protector,
    routes: Routes,
    held: Sequence[Held],
    settings: TrainingSettings,
    chosen: Recipe,
    pull: WholePull | None,
) -> str:
    frozen = protector.frozen
    copied = [h for h in held if h.trainable] if frozen is None else frozen.rows
    return summarise(
        routes,
        held,
        chosen.protect,
        chosen.restore,
        learning_rate=settings.learning_rate,
        copy_bytes=sum(h.num_bytes for h in copied) + (0 if pull is None else pull.start_bytes),
        pulled="" if pull is None else pull.describe_members(),
        reference_origin="live weights at the start of training",
        obstacles={a.layer: a.product_obstacle for a in routes.attention if frozen is None and a.product_obstacle},
    ).removeprefix("routeguard: ")


def _refuse_started_adapter(protector: Protector, settings: TrainingSettings) -> None:
    """The values of a fresh adapter are not here, but its initialisation says whether they are zero."""
    adapter, frozen = settings.adapter, protector.frozen
    if adapter is not None and frozen is not None and adapter.init not in ZERO_B_INITS:
        refuse_started_adapters([h.name for h in frozen.rows if h.part == "lora_B"])


def _optimizer(protector: Protector, model: Any, settings: TrainingSettings) -> list[Finding]:
    """Make the run's optimizer over the trainable parameters, and give routing its part of it."""
    if settings.engine is not None and "optimizer" in settings.engine.own_blocks:
        return [Finding("note", "optimizer", "DeepSpeed makes the optimizer of its own block; it was not tried")]
    findings: list[Finding] = []
    name = settings.optimizer
    try:
        optimizer = _make_optimizer(model, settings)
    except ImportError as error:
        missing = missing_extra("bitsandbytes") if "bitsandbytes" in str(error) else None
        return [Finding("error", "optimizer", f"{name}: {error}", missing.do if missing is not None else "")]
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return [
            Finding(
                "warning",
                "optimizer",
                f"{name} could not be made here, so nobody knows whether the guard can use it: {first}",
                "the guard says so before the first step; torch's AdamW serves every mode",
            )
        ]
    with collecting(findings, "optimizer"):
        protector.split(optimizer)
        if protector.frozen is not None:
            protector.frozen.attach(optimizer)
        if protector.groups is not None and isinstance(protector.protect, Anchor):
            check_pull_rate(protector.groups.tagged, "Anchor", protector.protect.strength)
    if not findings:
        findings.append(
            Finding("ok", "optimizer", f"{name} ({type(optimizer).__name__}) serves {protector.protect.name}")
        )
    return findings


def _make_optimizer(model: Any, settings: TrainingSettings) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="unused",
        optim=settings.optimizer,
        optim_args=settings.optimizer_options,
        learning_rate=settings.learning_rate,
        use_cpu=True,
        report_to=[],
    )
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    options.pop("fused", None)  # a question of the device
    return kind([parameter for parameter in model.parameters() if parameter.requires_grad], **options)


def _resolution(model: Any, trained: Sequence[Held], settings: TrainingSettings, chosen: Recipe) -> list[Finding]:
    """Whether 16-bit weights would move at all by the steps that the mode makes (derived; the run itself counts)."""
    protect = chosen.protect
    low = [h for h in trained if h.part == "base" and h.parameter.dtype.itemsize == 2]
    std = getattr(model.config.get_text_config(), "initializer_range", None)
    families = any(family in settings.optimizer for family in _STEPS_OF_ABOUT_LR)
    if not isinstance(protect, (LowLR, Anchor)) or not low or settings.masters or not std or not families:
        return []
    step = settings.learning_rate * (protect.scale if isinstance(protect, LowLR) else 1.0)
    dtype = low[0].parameter.dtype
    share = moving_share(step, std, dtype)
    if share >= FEW:
        return []
    text = f"expected, for weights of standard deviation {std:g} and steps of about {step:g}: "
    return [Finding("warning", "optimizer", text + too_small(share, protect.name, dtype))]
