"""One guarded `train()` call: everything that exists between its first and last step, and is gone afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from routeguard.checkpoint.sidecar import SIDECAR_FILE, SIDECAR_FOLDER, read_facts
from routeguard.drift.meter import DriftMeter
from routeguard.drift.record import DriftRecord
from routeguard.drift.sample import DriftSample
from routeguard.protect.anchor import AnchorPull
from routeguard.protect.freeze import Frozen
from routeguard.protect.held import Held, held_parameters
from routeguard.protect.l2_sp import WholePull, pull_to
from routeguard.protect.modes import L2SP, Anchor, Average, Freeze
from routeguard.protect.optimizers import inner_optimizer
from routeguard.protect.routing_groups import RoutingGroups
from routeguard.restoration.reference import save_reference
from routeguard.sharding.processes import sum_over_processes
from routeguard.sharding.split import shards_of
from routeguard.sharding.zero import is_partitioned, pulls_of
from routeguard.storage.aside import move_aside
from routeguard.training.coverage import coverage_of
from routeguard.training.engines import refuse_unread_masters
from routeguard.training.four_bit import warn_of_packed
from routeguard.training.leftovers import set_aside
from routeguard.training.log_metrics import LogWrapper, flat_metrics
from routeguard.training.planned_rates import planned_rates
from routeguard.training.resolution import ResolutionWatch
from routeguard.training.rewriters import refuse_bema_beside_shards
from routeguard.training.run_state import DRIFT_FILE, STATE_FILE, WHOLE_START_FILE, versions_here, write_state
from routeguard.training.start import Start, find_start
from routeguard.training.start_values import refuse_nan, start_values
from routeguard.training.stillness import Stillness
from routeguard.training.summary import summarise
from routeguard.training.whole_start import WholeStart, keep_whole_start, trained_start

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
        num_steps: int,
        kept: Start | None,
        is_main: bool,
        trainer: Any,
    ) -> None:
        assert guard.routes is not None
        self.guard = guard
        self.folder = Path(output_dir) / SIDECAR_FOLDER
        self.is_main = is_main
        self.frozen = frozen
        self.groups = groups
        self.pull: AnchorPull | WholePull | None = None
        self.watch: ResolutionWatch | None = None
        self.meter: DriftMeter | None = None
        self.log: LogWrapper | None = None
        self.model = model
        self.trainer = trainer
        self.step = self._written_step = resumed_step
        self.num_steps = num_steps
        self._newest: DriftSample | None = None
        resumed = resumed_from is not None or resumed_step > 0
        self._fresh = not resumed and kept is None
        whole = held_parameters(model, guard.routes)
        self.shards = shards_of(whole)
        self.zero = any(is_partitioned(h.parameter) for h in whole)
        if self.zero:
            refuse_unread_masters(trainer, optimizer)
        held: Sequence[Held] = self.shards or whole
        self.held = held
        refuse_bema_beside_shards(trainer, whole)
        refuse_nan(held)
        warn_of_packed(model)
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
        self.whole_start: WholeStart | None = None
        if isinstance(guard.restore, Average) or isinstance(guard.protect, L2SP):
            self.whole_start = keep_whole_start(
                model,
                guard.reference,
                to_average=isinstance(guard.restore, Average),
                digest=start.digest,
                insist=guard.insist,
                output_dir=Path(output_dir),
                resumed_from=resumed_from,
                resumed=resumed,
                again=kept is not None,
            )
        self.state = replace(
            guard.run_state(start.digest, start.origin, start.stage),
            coverage=coverage_of(
                guard.routes,
                STATE_FILE,
                num_adapter_tensors=sum(h.part != "base" and not (frozen and h.is_shared_factor) for h in whole),
            ),
            versions=versions_here(),
        )
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
        self.step = step
        if self.groups is not None and self.zero:
            self.groups.check()
        if self.meter is not None:
            self.meter.measure(step)
            if self.meter.num_pending >= _MAX_PENDING:
                self._write(self.meter.read(routing=False))

    def metrics(self, *, routing: bool = True) -> dict[str, float]:
        """What a log line gets: writes the queued steps to the drift file and returns the newest as flat numbers.

        `routing=False` leaves the logit form out, which is that of the weights now and not of the newest step.
        """
        if self.watch is not None:
            self.watch.report()
        if self.meter is None:
            assert self.still is not None
            self.still.check()  # what stands still at a log step has not moved at the steps before it
            zero = dict.fromkeys(_cells(self.guard), 0.0)
            samples = [DriftSample(step, zero) for step in range(self._written_step + 1, self.step + 1)]
        else:
            samples = self.meter.read(routing=routing)
        self._write(samples)
        self._written_step = self.step
        if samples:
            self._newest = samples[-1]
        return {} if self._newest is None else flat_metrics(self._newest)

    @property
    def unlogged(self) -> DriftSample | None:
        """The newest drift that was read, if no log line has carried any (a run shorter than `logging_steps`)."""
        return None if self.log is not None and self.log.has_added else self._newest

    def write_checkpoint_state(self, folder: str) -> None:
        """Leave `routeguard.json` in a checkpoint that the Trainer has just written."""
        if Path(folder).is_dir():
            write_state(Path(folder), self.state)

    def close(self) -> None:
        """Remove every hook and wrapper of this `train()`; the model's frozen parameters stay frozen."""
        for part in (self.log, self.watch, self.pull, self.groups):
            if part is not None:
                part.remove()
        if self.frozen is not None:
            self.frozen.detach_optimizers()

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
            self.watch = ResolutionWatch(self.groups, self.pull if isinstance(self.pull, AnchorPull) else None)
        if isinstance(self.guard.protect, L2SP):
            assert self.whole_start is not None
            strength = self.guard.protect.strength(planned_rates(optimizer, scheduler, self.num_steps))
            self.pull = pull_to(optimizer, self.model, trained_start(self.model, self.whole_start), strength)

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
            copy_bytes=(rows if self.meter is None else self.meter.start_bytes)
            + (self.pull.start_bytes if isinstance(self.pull, WholePull) else 0),
            pulled=self.pull.describe_members() if isinstance(self.pull, WholePull) else "",
            reference_origin=self.start.origin,
            notes=self.start.notes,
            obstacles=self.meter.obstacles if self.meter is not None else {},
        )

    def _write_start(self, resumed_step: int) -> None:
        if self._fresh:
            own = {SIDECAR_FILE} if self.start.reference is not None else set()
            own |= {WHOLE_START_FILE} if self.whole_start is not None and self.whole_start.is_own else set()
            set_aside(self.folder, written=own, named=self.guard.reference)
        write_state(self.folder, self.state)
        if self.start.reference is not None:
            path = self.folder / SIDECAR_FILE
            if not path.is_file() or read_facts(path)["digest"] != self.start.digest:
                move_aside(path)
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


def _cells(guard: RouteGuard) -> list[tuple[int, str]]:
    return list(dict.fromkeys((route.layer, route.role) for route in guard.routes or ()))
