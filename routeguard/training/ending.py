"""The end of a guarded `train()` call: what is still to be written down, the restore, and a second look after it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from routeguard.protect.modes import AtEnd, Average, Restoration
from routeguard.restoration.averaging import average
from routeguard.restoration.in_memory import restore
from routeguard.restoration.report import RestoreReport
from routeguard.restoration.sharded import restore_shards
from routeguard.sharding.distributed_tensors import reshard
from routeguard.sharding.shard import Shard
from routeguard.sharding.zero import publish
from routeguard.storage.durable import write_json
from routeguard.training.rewriters import Marks, averaged_models
from routeguard.training.run_state import RESTORE_FILE
from routeguard.training.whole_start import average_at_end

if TYPE_CHECKING:
    from routeguard.training.session import Session


class Ending:
    """Made when a session has made its last step.

    Args:
        session: what was trained; its hooks may be gone when `look_again` is called.
        model: the trained model, as the Trainer hands it to callbacks.
        method: how to put queries and keys back, or average every weight; None does neither.
    """

    def __init__(self, session: Session, model: nn.Module, method: AtEnd | None) -> None:
        self._session = session
        self._model = model
        self._method = method
        self._marks: Marks | None = None

    def finish(self) -> None:
        """Write the steps since the last log line, say the drift if no line did, and restore if that was asked for."""
        session = self._session
        session.metrics(routing=False)  # the best model may have been loaded over the last one
        if session.unlogged is not None and session.is_main:
            print(f"routeguard: drift at the end: {session.unlogged}", flush=True)
        if isinstance(self._method, Average):
            self._average(self._model, self._method)
        elif self._method is not None:
            self._put_back(self._model, self._method)

    def look_again(self) -> None:
        """After every callback's end: what is frozen stands still, and what was restored is restored.

        Raises RuntimeError as `Stillness.check` does. Warns where it has to restore a second time.
        """
        if self._session.still is not None:
            self._session.still.check()
        if self._method is None or self._marks is None or not self._marks.changed():
            return
        if isinstance(self._method, Average):
            warnings.warn(
                "a callback that runs after RouteGuard at the end of training wrote over the averaged weights (an "
                "EMA); they are as that callback left them. Average what was saved: routeguard average BASE TUNED "
                "--out FIXED",
                UserWarning,
                stacklevel=2,
            )
        else:
            warnings.warn(
                "a callback that runs after RouteGuard at the end of training wrote over the restored queries and keys "
                "(an average, EMA); they are restored again. What other callbacks uploaded in between has them as "
                "that callback left them",
                UserWarning,
                stacklevel=2,
            )
            self._put_back(self._session.model, self._method)

    def _put_back(self, model: nn.Module, method: Restoration) -> None:
        session = self._session
        if session.shards is not None:
            report = self._restore_shards(session.shards, method)
        else:
            report = self._restore(model, method)
        if session.shards is None or session.is_main:  # of a split start, the first process has all, and saves
            for other in averaged_models(session.trainer):
                print(f"routeguard: the average that is saved beside the model: {self._restore(other, method)}")
        self._marks = Marks([h for h in session.held if h.trainable])
        if session.is_main:
            write_json(session.folder / RESTORE_FILE, report.to_dict())
            print(report, flush=True)
        if session.trainer is not None:
            drifts = [value for layer in report.layers for value in layer.drift_before.values()]
            session.trainer.log({"routeguard/drift_before_restore": max(drifts, default=0.0)})

    def _average(self, model: nn.Module, mode: Average) -> None:
        session = self._session
        assert session.whole_start is not None
        insist = session.guard.insist
        report = average_at_end(model, session.whole_start, mode, insist=insist)
        for other in averaged_models(session.trainer) if session.is_main else ():
            found = average(other, session.whole_start.source(other), mode.alpha, insist=insist)
            print(f"routeguard: the average that is saved beside the model: {found}")
        trained = [h for h in session.held if h.trainable]
        self._marks = Marks(trained) if trained else None
        if session.is_main:
            write_json(session.folder / RESTORE_FILE, report.to_dict())
            print(f"routeguard: {report}", flush=True)
        if session.trainer is not None and report.drift_before is not None:
            session.trainer.log({"routeguard/drift_before_restore": report.drift_before})

    def _restore(self, model: nn.Module, method: Restoration) -> RestoreReport:
        guard, start = self._session.guard, self._session.start.reference
        assert start is not None
        return restore(
            model,
            start,
            method=method,
            roles=guard.roles,
            layers=guard.layers,
            norms=guard.norms,
            insist=guard.insist,
        )

    def _restore_shards(self, shards: Sequence[Shard], method: Restoration) -> RestoreReport:
        session = self._session
        assert session.guard.routes is not None and session.meter is not None
        session.meter.measure(session.step)
        drift = session.meter.read(routing=False)[-1].factors
        report = restore_shards(shards, session.starts, session.guard.routes, method, drift, session.start.origin)
        publish(shards)
        reshard(session.model)
        return report
