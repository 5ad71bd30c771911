"""One guarded `train()` call: everything that exists between its first and last step, and is gone afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import read_facts
from routeguard.drift.meter import DriftMeter, DriftSample
from routeguard.drift.record import DriftRecord
from routeguard.protect.anchor import AnchorPull
from routeguard.protect.freeze import Frozen
from routeguard.protect.groups import RoutingGroups
from routeguard.protect.held import Held, held_parameters
from routeguard.protect.modes import Anchor, Freeze, Restoration
from routeguard.protect.optimizers import inner_optimizer
from routeguard.restoration.in_memory import restore
from routeguard.restoration.reference import save_reference
from routeguard.restoration.report import RestoreReport
from routeguard.restoration.sharded import restore_shards
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.shard import Shard
from routeguard.sharding.split import shards_of
from routeguard.sharding.zero import is_partitioned, publish_masters, pulls_of, zero_optimizer
from routeguard.storage.durable import write_json
from routeguard.training.log_metrics import LogWrapper
from routeguard.training.resolution import ResolutionWatch
from routeguard.training.rewriters import Marks, averaged_models
from routeguard.training.run_state import DRIFT_FILE, FOLDER, REFERENCE_FILE, write_state
from routeguard.training.start import Start, find_start
from routeguard.training.start_values import refuse_nan, start_values
from routeguard.training.stillness import Stillness
from routeguard.training.summary import summarise

if TYPE_CHECKING:
    from routeguard.training.guard import RouteGuard

_MAX_PENDING = 1000  # steps queued on the device when nothing is logged


class Session:
    """Built in `on_train_begin`, stepped in `on_step_end`, closed at the end or when the next one begins."""

    def __init__(
        self,
        guard: RouteGuard,
        model: nn.Module,
        optimizer: Any,
        *,
        scheduler: Any,
        frozen: Frozen | None,
        groups: RoutingGroups | None,
        output_dir: str,
        resumed_from: Path | None,
        resumed_step: int,
        kept: Start | None,
        is_main: bool,
        trainer: Any,
    ) -> None:
        assert guard.routes is not None
        self.guard = guard
        self.folder = Path(output_dir) / FOLDER
        self.is_main = is_main
        self.frozen = frozen
        self.groups = groups
        self.pull: AnchorPull | None = None
        self.watch: ResolutionWatch | None = None
        self.meter: DriftMeter | None = None
        self.log: LogWrapper | None = None
        self.marks: Marks | None = None
        self.model = model
        self.trainer = trainer
        self._step = self._written_step = resumed_step
        self._last_metrics: dict[str, float] = {}
        resumed = resumed_from is not None or resumed_step > 0
        whole = held_parameters(model, guard.routes)
        self.shards = shards_of(whole)
        self.optimizer = optimizer
        self.zero = any(is_partitioned(h.parameter) for h in whole)
        if self.zero and zero_optimizer(optimizer) is None:
            raise ValueError(
                "DeepSpeed keeps float32 masters here without ZeRO (stage 0 in 16 bits), which routeguard does not "
                "read; use ZeRO stage 1, 2 or 3"
            )
        held: Sequence[Held] = self.shards or whole
        self.held = held
        refuse_nan(held)
        start = find_start(
            guard.reference,
            model,
            whole,
            guard.run_state(),
            guard.protect,
            output_dir=Path(output_dir),
            resumed_from=resumed_from,
            resumed=resumed,
            kept=kept,
            insist=guard.insist,
        )
        self.state = guard.run_state(start.digest, start.origin, start.stage)
        self.starts = start_values(held, start.reference, fresh=not resumed, earlier=start.shards)
        self.start = start if self.shards is None else start.of_shards(self.starts, is_first=is_main)
        try:
            self._start_protection(inner_optimizer(optimizer), scheduler, self.starts)
            self.still = Stillness(frozen) if frozen is not None else None
            if not isinstance(guard.protect, Freeze):
                total = None if self.shards is None else sum_over_processes
                self.meter = DriftMeter(model, guard.routes, held, self.starts, total=total)
            self.summary = self._summary(whole, inner_optimizer(optimizer))
            if is_main:
                self._write_start(resumed_step)
            if trainer is not None:
                self.log = LogWrapper(trainer, self.metrics)
        except BaseException:
            self.close()
            raise

    def after_step(self, step: int) -> None:
        """Queue this step's drift on the device."""
        self._step = step
        if self.groups is not None and self.zero:
            self.groups.check()
        if self.meter is not None:
            self.meter.measure(step)
            if self.meter.num_pending >= _MAX_PENDING:
                self._write(self.meter.read(routing=False))

    def metrics(self) -> dict[str, float]:
        """What a log line gets: writes the queued steps to the drift file and returns the newest as flat numbers."""
        if self.watch is not None:
            self.watch.report()
        if self.meter is None:
            assert self.still is not None
            self.still.check()  # what stands still at a log step has not moved at the steps before it
            zero = dict.fromkeys(_cells(self.guard), 0.0)
            samples = [DriftSample(step, zero) for step in range(self._written_step + 1, self._step + 1)]
        else:
            samples = self.meter.read()
        self._write(samples)
        self._written_step = self._step
        if samples:
            self._last_metrics = flat_metrics(samples[-1])
        return self._last_metrics

    def write_checkpoint_state(self, folder: str) -> None:
        """Leave `routeguard.json` in a checkpoint that the Trainer has just written."""
        if Path(folder).is_dir():
            write_state(Path(folder), self.state)

    def finish(self, model: nn.Module, method: Restoration | None) -> None:
        """The end of training: the restore, if one was asked for."""
        if method is None:
            return
        if self.shards is not None:
            report = self._restore_shards(self.shards, method)
        else:
            report = self._restore(model, method)
            for average in averaged_models(self.trainer):
                print(f"routeguard: the average that is saved beside the model: {self._restore(average, method)}")
        self.marks = Marks([h for h in self.held if h.trainable])
        if self.is_main:
            write_json(self.folder / "restore.json", report.to_dict())
            print(report, flush=True)
        if self.trainer is not None:
            drifts = [value for layer in report.layers for value in layer.drift_before.values()]
            self.trainer.log({"routeguard/drift_before_restore": max(drifts, default=0.0)})

    def look_again(self, method: Restoration | None) -> None:
        """After every callback's end: what is frozen stands still, and what was restored is restored.

        Raises RuntimeError as `Stillness.check` does. Warns where it has to restore a second time.
        """
        if self.still is not None:
            self.still.check()
        if self.marks is not None and self.marks.changed():
            warnings.warn(
                "a callback that runs after RouteGuard at the end of training wrote over the restored queries and keys "
                "(an average, EMA); they are restored again. What other callbacks uploaded in between has them as "
                "that callback left them",
                UserWarning,
                stacklevel=2,
            )
            self.finish(self.model, method)

    def close(self) -> None:
        """Remove every hook and wrapper of this `train()`; the model's frozen parameters stay frozen."""
        for part in (self.log, self.watch, self.pull, self.groups):
            if part is not None:
                part.remove()
        if self.frozen is not None:
            self.frozen.detach_optimizers()

    def _restore(self, model: nn.Module, method: Restoration) -> RestoreReport:
        assert self.start.reference is not None
        guard = self.guard
        return restore(
            model, self.start.reference, method=method, roles=guard.roles, layers=guard.layers, norms=guard.norms
        )

    def _restore_shards(self, shards: Sequence[Shard], method: Restoration) -> RestoreReport:
        assert self.guard.routes is not None and self.meter is not None
        self.meter.measure(self._step)
        drift = self.meter.read()[-1].factors
        report = restore_shards(shards, self.starts, self.guard.routes, method, drift, self.start.origin)
        if self.zero:
            publish_masters(self.optimizer)
        return report

    # -- building --------------------------------------------------------------------------------------------------

    def _start_protection(self, optimizer: torch.optim.Optimizer, scheduler: Any, starts: dict[str, Tensor]) -> None:
        if self.frozen is not None:
            if self.shards is not None:
                self.frozen.follow(self.shards)
            self.frozen.take_start()  # the weights of a resumed checkpoint came after the freeze
            self.frozen.attach(optimizer)
        if self.groups is not None:
            if self.shards is not None and not self.zero:
                self.groups.follow(self.shards)
            self.groups.reassert(scheduler)
            self.groups.remove()
            self.groups.arm(check=not self.zero)
            self.groups.check()
            if isinstance(self.guard.protect, Anchor):
                parts_of = pulls_of(self.shards, starts) if self.zero and self.shards is not None else None
                self.pull = AnchorPull(self.groups, starts, self.guard.protect, parts_of)
            self.watch = ResolutionWatch(self.groups, self.pull)

    def _summary(self, held: Sequence[Held], optimizer: torch.optim.Optimizer) -> str:
        guard = self.guard
        assert guard.routes is not None
        rows = 0 if self.frozen is None else sum(t.numel() * t.element_size() for t in self.frozen.start.values())
        return summarise(
            guard.routes,
            held,
            guard.protect,
            guard.restore,
            learning_rate=float(optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])),
            copy_bytes=rows if self.meter is None else self.meter.start_bytes,
            reference_origin=self.start.origin,
            obstacles=self.meter.obstacles if self.meter is not None else {},
        )

    def _write_start(self, resumed_step: int) -> None:
        write_state(self.folder, self.state)
        if self.start.reference is not None:
            path = self.folder / REFERENCE_FILE
            if not path.is_file() or read_facts(path)["digest"] != self.start.digest:
                _keep_other(path)
                save_reference(self.start.reference, path)
        header = {
            "protect": self.state.protect,
            "restore": self.state.restore,
            "reference_digest": self.state.reference_digest,
        }
        self.record = DriftRecord(self.folder / DRIFT_FILE, header, resume_step=resumed_step)

    def _write(self, samples: Sequence[DriftSample]) -> None:
        if self.is_main:
            self.record.append(samples)


def flat_metrics(sample: DriftSample) -> dict[str, float]:
    """A sample as reporter metrics: mean drift by role, the largest, and the logit form's mean and largest head."""
    metrics = {}
    for role in dict.fromkeys(role for _, role in sample.factors):
        mean = sample.of_role(role)
        if mean is not None:
            metrics[f"routeguard/drift_{role}"] = mean
    if sample.factors:
        metrics["routeguard/drift_max"] = max(sample.factors.values())
    heads = [value for layer in sample.routing.values() for value in layer]
    if heads:
        metrics["routeguard/routing_drift"] = sum(heads) / len(heads)
        metrics["routeguard/routing_drift_max"] = max(heads)
    return metrics


def _cells(guard: RouteGuard) -> list[tuple[int, str]]:
    return list(dict.fromkeys((route.layer, route.role) for route in guard.routes or ()))


def _keep_other(path: Path) -> None:
    """Move another run's reference aside instead of overwriting it."""
    if path.is_file():
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
