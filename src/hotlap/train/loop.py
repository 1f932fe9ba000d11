"""Steps until the run is done, the slice's deadline is near, or somebody asks to stop.

One flat loop. Its order is the promise: state changes only in `Stepper.apply`; a row of metrics follows; whatever
is published is a copy of the state after a whole step. Nothing here depends on the time except when to publish and
when to leave, so where slices are cut does not change what is learned.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from hotlap import clock, runs
from hotlap.checkpoint import Checkpoint, CheckpointStore, read
from hotlap.errors import ConfigError, CorruptFile, TrainingFailed
from hotlap.train import model, optim
from hotlap.train.answer import sampler_for
from hotlap.train.assembly import assemble
from hotlap.train.context import Context
from hotlap.train.evaluate import Evaluator
from hotlap.train.machine import use_threads, versions
from hotlap.train.metrics import MetricsLog
from hotlap.train.opening import OpenedRun
from hotlap.train.publisher import OPTIMIZER_FILE, Publisher, Snapshot
from hotlap.train.results import Results
from hotlap.train.step import StepLoss, Stepper, require_sane
from hotlap.train.stop import GivenUp

_ZERO_LOSSES_TO_TELL = 3
_POLL_S = 0.05
_MOST_OF_CAP_FOR_SAVING = 0.2


@dataclass(frozen=True)
class Progress:
    """How far the run is, as a checkpoint keeps it. `best` is `{step, val_loss, checkpoint}`."""

    step: int = 0
    num_updates: int = 0
    metrics_bytes: int = 0
    last_eval_step: int = 0
    best: dict[str, Any] | None = None
    micro_batch_rows: int | None = None
    lowest_val_loss: float | None = None
    """Of all evaluations. `best` may be an older one, if a full disk could not take it."""

    evals_without_gain: int = 0
    samples_bytes: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Tells two states of a run apart."""
        return self.step, self.last_eval_step


class NoTime(Exception):
    """An evaluation would run past the slice's deadline."""


class Loop:
    """The training state of one slice."""

    def __init__(self, run: runs.RunFolder, lock: runs.RunLock, opened: OpenedRun, context: Context) -> None:
        self._run, self._lock, self._context = run, lock, context
        self._config, self._identity, self._order = context.config, opened.identity, opened.order
        self.num_steps = opened.order.num_steps
        self.num_tokens = 0
        self._num_zero_losses = 0
        self._did_anything = False
        self._num_threads = use_threads(self._config.slice.num_threads or self._identity.num_threads)
        with context.timeline.phase("load"), context.stop.may_give_up():
            self._model, self._optimizer = assemble(opened, context)
            self._results = Results(run, lock, self._model, opened.model_folder if self._model.has_grown else None)
        keep = self._config.checkpoint.keep
        self._store = CheckpointStore(run.checkpoints, lock.number, keep, lock.require)
        self._metrics, self._samples = MetricsLog(run.metrics, context.say), MetricsLog(run.samples, context.say)
        self._publisher = Publisher(self._store, self._model.saved, self._make_durable, self._on_published, context.say)
        context.stop.measure_tail_with(self._publisher.tail_s)
        self._stepper = Stepper(
            self._model, self._optimizer, opened, self._config, on_out_of_memory=self._on_out_of_memory
        )
        held_out = opened.packing.held_out
        self._evaluator = held_out and Evaluator(self._model, held_out, self._config.eval.micro_batch_rows)
        self._sampler = sampler_for(self._model, self._config, opened.model_folder, held_out is not None)
        with context.timeline.phase("resume"), context.stop.may_give_up():
            self.progress = self._resume()
        self.resumed_at = self.progress.step

    # --- resume ---

    def _resume(self) -> Progress:
        context = self._context
        self._lock.require()
        self._store.clean()
        checkpoint = self._store.newest(context.say)
        progress = Progress() if checkpoint is None else self._restore(checkpoint)
        self._stepper.micro_batch_rows = progress.micro_batch_rows or self._config.train.micro_batch_rows
        for log, place in ((self._metrics, "metrics_bytes"), (self._samples, "samples_bytes")):
            try:
                log.begin_at(getattr(progress, place))
            except CorruptFile as error:
                context.say(f"{error} Those rows are lost; the training state is whole, and training goes on.")
                progress = replace(progress, **{place: log.begin_at_end()})
        return progress

    def _restore(self, checkpoint: Checkpoint) -> Progress:
        facts = checkpoint.facts
        adapter = checkpoint.folder / model.ADAPTER_FILE
        model.load_parameters(self._model.saved, model.load_tensors(adapter), adapter)
        tensors = model.load_tensors(checkpoint.folder / OPTIMIZER_FILE)
        optim.load_state(self._optimizer, self._model.parameters, tensors)
        here = versions()
        for what, then, now in (
            ("threads", facts["num_threads"], self._num_threads),
            *((name, then, here.get(name)) for name, then in facts["versions"].items()),
        ):
            if then != now:
                self._context.say(f"{what}: {then} before, {now} now. Training goes on, not promised bit for bit.")
        progress = Progress(**facts["progress"])
        # One slow save must not be believed so far that no later slice has time for a step.
        longest_s = self._config.slice.cap_s * _MOST_OF_CAP_FOR_SAVING
        self._publisher.take_up(progress.key, min(facts["publish_s"] or longest_s, longest_s))
        if progress.best is not None:
            try:
                read(self._run.checkpoints / progress.best["checkpoint"])
            except CorruptFile as error:
                self._context.say(f"The best checkpoint so far is lost: {error} The best from here on is kept.")
                progress = replace(progress, best=None)
        return progress

    # --- the loop ---

    def run(self) -> str:
        """Train. Returns the reason word of the ending, with the state saved: `done`, `stopped` or `slice_over`.

        Raises:
            TrainingFailed: the state before the failing step is saved.
        """
        try:
            ending = self._steps()
        except GivenUp:
            ending = "stopped"
        except TrainingFailed:
            self._save()
            raise
        self._save()
        if ending == "done":
            ending = self._publish_results()
        if ending == "slice_over" and not self._did_anything:
            raise self._hopeless()
        return ending

    def _steps(self) -> str:
        context, timeline, publisher = self._context, self._context.timeline, self._publisher
        publish_due_at_s = clock.monotonic_s() if self.progress.step == 0 else self._next_publish_s()
        while True:
            improved = False
            if self._evaluation_is_due() and not context.stop.is_requested:
                try:
                    improved = self._evaluate()
                except NoTime:
                    return "slice_over"
            if self._is_at_its_end() and not self._evaluation_is_due():
                return "done"
            if context.stop.is_requested:
                return "stopped"
            if not self._room().allows(timeline.slowest_recent_step_s()):
                return "slice_over"
            if improved or (clock.monotonic_s() >= publish_due_at_s and not publisher.is_busy()):
                with timeline.phase("publish"):
                    is_started = self._publish_behind()
                if improved and not is_started:
                    return "stopped" if context.stop.is_requested else "slice_over"
                publish_due_at_s = self._next_publish_s()
            step = self.progress.step + 1
            with timeline.step():
                with context.stop.may_give_up():
                    result = self._stepper.forward_backward(step)
                grad_norm = None if result.loss is None else self._stepper.apply(step)
            self._record(step, result, grad_norm)

    def _room(self) -> clock.Deadline:
        """Until when there is time for more than the last publish."""
        return self._context.deadline.keeping(self._publisher.tail_s())

    def _publish_behind(self) -> bool:
        """Start a publish, after the one that is under way. False if the slice's last one would have to wait for it,
        or somebody asks to stop."""
        publisher = self._publisher
        while self._room().allows(publisher.publish_s()) and not self._context.stop.is_requested:
            if not publisher.is_busy():
                publisher.start(self._snapshot())
                return True
            publisher.let_finish(_POLL_S)
        return False

    def _next_publish_s(self) -> float:
        return clock.monotonic_s() + self._config.checkpoint.every_s

    def _record(self, step: int, result: StepLoss, grad_norm: float | None) -> None:
        """The step has happened: count it, and write its row."""
        self.progress = replace(
            self.progress, step=step, num_updates=self.progress.num_updates + (grad_norm is not None)
        )
        self.num_tokens += result.num_tokens
        self._did_anything = True
        row = {
            "step": step,
            "loss": result.loss,
            "lr": self._stepper.schedule.at(step),
            "grad_norm": grad_norm,
            "num_trained_tokens": result.num_trained_tokens,
            "num_tokens": result.num_tokens,
        }
        self._append(row)
        times = {"step_s": self._context.timeline.last_step_s(), "elapsed_s": self._context.timeline.elapsed_s()}
        self._context.emit({"event": "step", **row, "num_steps": self.num_steps, **times})
        self._num_zero_losses = self._num_zero_losses + 1 if result.loss == 0.0 else 0
        if result.loss is None:
            self._context.say(f"Step {step} has no trained token; nothing was updated.")
        if self._num_zero_losses == _ZERO_LOSSES_TO_TELL:
            self._context.say(
                f"Loss is exactly 0 for {_ZERO_LOSSES_TO_TELL} steps, which is suspicious: look at the data."
            )

    def _append(self, row: dict[str, Any]) -> None:
        self._lock.require()
        num_bytes = self._metrics.append(row)
        self.progress = replace(self.progress, metrics_bytes=self.progress.metrics_bytes + num_bytes)

    def _on_out_of_memory(self, step: int, num_rows: int) -> None:
        """Same rows in a step, in more and smaller micro-batches."""
        self.progress = replace(self.progress, micro_batch_rows=num_rows)
        self._append({"step": step, "out_of_memory": True, "micro_batch_rows": num_rows})
        self._context.say(
            f"Out of memory at step {step}: micro-batches of {num_rows} rows from here on, same step size."
        )

    # --- evaluation ---

    def _is_at_its_end(self) -> bool:
        patience = self._config.eval.patience
        has_stopped_early = patience is not None and self.progress.evals_without_gain >= patience
        return self.progress.step >= self.num_steps or has_stopped_early

    def _evaluation_is_due(self) -> bool:
        step, every = self.progress.step, self._config.eval.every_steps
        if step == 0:
            return self._sampler is not None and self.progress.samples_bytes == 0
        if self._evaluator is None or self.progress.last_eval_step == step:
            return False
        return step >= self.num_steps or (every is not None and step % every == 0)

    def _evaluate(self) -> bool:
        """Evaluate this step and write the row. Returns whether it is the best so far. Before the first step only
        prompts are answered, to be read beside later answers."""
        context, step = self._context, self.progress.step
        assert self._evaluator is not None

        def check_time() -> None:
            if self._room().is_over():
                raise NoTime

        def on_out_of_memory(num_rows: int) -> None:
            context.say(f"Out of memory in the evaluation: {num_rows} rows at a time from here on.")

        with context.timeline.phase("evaluation"), context.stop.may_give_up():
            value = self._evaluator.val_loss(check_time, on_out_of_memory) if step else None
            answers = self._sampler.answers(check_time) if self._sampler else []
        if value is None:
            self._append_samples(answers)
            return False
        require_sane(value, step, "Held-out loss", intact_step=step)
        self._keep_to_saved_best()
        best = self.progress.best
        improved = best is None or value < best["val_loss"]
        if improved:
            best = {"step": step, "val_loss": value, "checkpoint": self._store.name_of(step)}
        self._append({"step": step, "val_loss": value})
        self.progress = replace(self.progress, last_eval_step=step, best=best)
        self._count_gain(value)
        self._append_samples(answers)
        context.emit({"event": "evaluation", "step": step, "val_loss": value, "is_best": improved})
        return improved

    def _append_samples(self, answers: list[tuple[str, str]]) -> None:
        self._did_anything = True
        for prompt, text in answers:
            num_bytes = self._samples.append({"step": self.progress.step, "prompt": prompt, "text": text})
            self.progress = replace(self.progress, samples_bytes=self.progress.samples_bytes + num_bytes)

    def _count_gain(self, val_loss: float) -> None:
        """A function of the held-out losses alone, so that cut and uncut runs stop early at the same step."""
        progress, patience = self.progress, self._config.eval.patience
        if progress.lowest_val_loss is None or val_loss < progress.lowest_val_loss:
            self.progress = replace(progress, lowest_val_loss=val_loss, evals_without_gain=0)
            return
        self.progress = replace(progress, evals_without_gain=progress.evals_without_gain + 1)
        if self.progress.evals_without_gain == patience and progress.step < self.num_steps:
            self._append({"step": progress.step, "stopped_early": True})
            self._context.say(
                f"Stopped early at step {progress.step} of {self.num_steps}: {patience} evaluations in a row without a "
                f"held-out loss below {progress.lowest_val_loss:.4f}."
            )

    def _make_durable(self) -> None:
        self._metrics.make_durable()
        self._samples.make_durable()

    def _hopeless(self) -> ConfigError:
        minutes = self._config.slice.minutes
        what, advice = "a first step", "data.seq_len or train.micro_batch_rows"
        if self._evaluation_is_due():
            what, advice = "the evaluation", "data.eval_examples"
        elif self.progress.step >= self.num_steps:
            what, advice = "the publishing of the result", "lora.rank"
        return ConfigError(
            f"The slice's {minutes:g} minutes were over before {what} could end, so no number of slices would finish "
            f"this run. Raise slice.minutes, or lower {advice}."
        )

    # --- saving ---

    def _save(self) -> None:
        """Publish the state as it is, in what time is left."""
        with self._context.timeline.phase("publish"):
            self._publisher.settle(self.progress.key, self._until)
            if self._did_anything:
                self._publisher.finish(self._snapshot(), self._until)

    def _until(self) -> clock.Deadline:
        """When the slice must have ended: at its own deadline, or when a stop signal's grace is over."""
        own, asked = self._context.deadline, self._context.stop.deadline
        return own if asked is None or own.at_s < asked.at_s else asked

    def _keep_to_saved_best(self) -> None:
        """A checkpoint may only name a best that there is: on a full disk it may not have been saved."""
        best, saved = self.progress.best, self._store.newest_facts().get("best")
        if best in (None, saved) or best["step"] == self.progress.step or self._publisher.is_busy():
            return
        self._context.say(f"Step {best['step']} was the best so far and could not be saved; the one before stays.")
        is_there = saved is not None and (self._run.checkpoints / saved["checkpoint"]).exists()
        self.progress = replace(self.progress, best=saved if is_there else None)

    def _snapshot(self) -> Snapshot:
        self._keep_to_saved_best()
        config, identity, progress = self._config, self._identity, self.progress
        rows_seen = min(progress.step * config.train.rows_per_step, self._order.total_rows)
        facts = {
            "progress": asdict(progress),
            "data": {"rows_seen": rows_seen, "epoch": rows_seen / identity.num_rows},
            "config": config.model_dump(mode="json"),
            "seed": identity.seed,
            "best": progress.best,
            "publish_s": self._publisher.measured_s,
            "num_threads": self._num_threads,
            "versions": versions(),
        }
        return Snapshot(
            key=progress.key,
            num_updates=progress.num_updates,
            adapter=_copies({name: parameter.detach() for name, parameter in self._model.saved.items()}),
            optimizer=_copies(optim.state_tensors(self._optimizer, self._model.parameters)),
            adapter_config=self._model.adapter_config_json(),
            facts=facts,
        )

    def _on_published(self, step: int) -> None:
        self._context.emit({"event": "published", "step": step})

    def _publish_results(self) -> str:
        """`adapter/`, the final state, and `best/`, the best by held-out loss, as standard PEFT folders. Returns the
        ending: not `done` if it is left to the next slice because the time is over."""
        if not self._until().allows(self._publisher.tail_s()):
            return "stopped" if self._context.stop.is_requested else "slice_over"
        run, best = self._run, self.progress.best
        final = run.checkpoints / self._final_checkpoint()
        facts = {"step": self.progress.step, "seed": self._identity.seed, "run": run.name}
        if best is not None:
            self._results.publish(run.checkpoints / best["checkpoint"], run.best, {**facts, **best})
        self._results.publish(final, run.adapter, facts)
        return "done"

    def _final_checkpoint(self) -> str:
        checkpoint = self._store.newest(self._context.say)
        if checkpoint is None or checkpoint.step != self.progress.step:
            raise CorruptFile(
                f"The checkpoint of step {self.progress.step} was damaged after it was written. Look at the disk and "
                f"run the same command again; it goes on from {checkpoint.folder.name if checkpoint else 'the start'}."
            )
        return checkpoint.folder.name


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
