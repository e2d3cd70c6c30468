"""A run's processes, and the five verbs of the loop over them: evaluate, generate, train, save, sync weights.

Start: Ray -> the rollout actor reads the data -> (engines and router) and (trainer ranks) start side by side, or, where
they have the memory in turns, one after the other. Every wait has a deadline and says what it waits for. End:
everything that was started is stopped, whatever happened.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colloid.checkpoints import BackgroundCheckpoint, check_save_directory, read_meta, wait_written, write_checkpoint
from colloid.cluster.engine_hosts import launch_on
from colloid.cluster.placement import Reservation, beside_driver, reserve
from colloid.cluster.processes import Processes
from colloid.cluster.ray_runtime import is_joined
from colloid.cluster.turns import MemoryTurns
from colloid.cluster.utilization import Utilization
from colloid.cluster.weight_sync import WeightSync
from colloid.config import resolve_num_rollout
from colloid.config.cluster import train_environment
from colloid.config.eval_config import evaluates, evaluates_only
from colloid.config.external import is_external
from colloid.config.layout import data_parallel_rank
from colloid.config.roles import has_critic, role_args
from colloid.config.sft import serves
from colloid.errors import ConfigError
from colloid.observe.metrics import METRICS_FILE, STEP_TIME, has_logged, numbers
from colloid.rollout.actor import RolloutActor, RolloutHandle
from colloid.rollout.engine_pool import external_kind
from colloid.training.worker import CriticWorker, TrainWorker

logger = logging.getLogger(__name__)

START_DEADLINE = 1800.0
DATA_DEADLINE = 3600.0
STEP_DEADLINE = 24 * 3600.0
"""Seconds for one rollout, training step or save. What can hang inside them has its own, much shorter deadline: a
request's progress, a collective operation (--distributed-timeout-minutes), a grading."""
ROLLOUT_SILENCE = DATA_DEADLINE
"""Seconds without a sign of life after which the rollout actor has failed: so long it may be busy with the data alone.
All else is done in pieces."""
CLOSE_DEADLINE = 60.0
FAILED_CLOSE_DEADLINE = 20.0
"""The same where the run has failed: what waits for a process that is gone does not end by itself."""


class Run:
    """Use as a context manager; the verbs work inside it."""

    def __init__(self, args: Any):
        self.args = args
        self.start_rollout_id = 0
        self.saved_metrics: dict[str, float] = {}
        """Those of the rollout before, as they were when the checkpoint was written that the run goes on from."""
        self.options_read: set[str] = set()
        self._rollout: Any = None
        self._workers: list[Any] = []
        self._critics: list[Any] = []
        self._engines: Any = None
        self._weights: WeightSync | None = None
        self.memory: MemoryTurns
        """Who has the memory: trainer or engines."""
        self._saving: BackgroundCheckpoint | None = None
        self._utilization: Utilization | None = None
        self._last_started: int | None = None
        self._processes = Processes(logger.info)

    def __enter__(self) -> Run:
        try:
            self._start()
        except BaseException:
            self._stop(FAILED_CLOSE_DEADLINE)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        try:
            if kind is None:
                self.finish_save()
        finally:
            self._stop(CLOSE_DEADLINE if kind is None else FAILED_CLOSE_DEADLINE)

    @property
    def trains(self) -> bool:
        """False where there are no trainer ranks, to train, to save or to send weights (`has_trainer`)."""
        return bool(self._workers)

    @property
    def serves(self) -> bool:
        """False with `--debug-train-only`, and for SFT without evaluation: there are no engines."""
        return bool(self._engines.addresses)

    @property
    def weight_version(self) -> int:
        """That of the engines: the number of weight updates so far, of the run that this one resumes included."""
        return self._weights.version

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics of all evaluation sets with the current weights."""
        what = f"the evaluation before rollout {rollout_id}"
        return self._wait_idle(self._rollout.evaluate.remote(rollout_id), what)

    def generate(self, rollout_id: int) -> RolloutHandle:
        """Generates and grades one rollout."""
        return self.wait_for_rollout(rollout_id, self.start_rollout(rollout_id, self.weight_version, rollout_id - 1))

    def start_rollout(self, rollout_id: int, weight_version: int, trained: int) -> Any:
        """Has a rollout made while the run goes on; those that are started are made one after another.

        Args:
            weight_version: the one that the engines hold when the rollout is trained.
            trained: the last rollout that has been trained.

        Returns:
            What `wait_for_rollout` takes.
        """
        after, self._last_started = self._last_started, rollout_id
        return self._rollout.generate.remote(rollout_id, weight_version, trained, after)

    def wait_for_rollout(self, rollout_id: int, reference: Any) -> RolloutHandle:
        """A rollout that was started."""
        return self._wait_idle(reference, f"rollout {rollout_id}")

    def train(self, rollout_id: int, rollout: RolloutHandle) -> dict[str, float]:
        """Trains on a rollout; each rank receives its data-parallel part only."""
        self._weights.is_ahead = True
        what = f"trainer ranks on rollout {rollout_id}"
        batches = [rollout.batches[data_parallel_rank(self.args, rank)] for rank in range(len(self._workers))]
        if self._critics:
            return self._train_with_critic(rollout_id, batches, what)
        pairs = zip(self._workers, batches, strict=True)
        return self._wait([worker.train.remote(rollout_id, batch) for worker, batch in pairs], what)[0]

    def _train_with_critic(self, rollout_id: int, batches: list[Any], what: str) -> dict[str, float]:
        """Values from the critic, then the policy's steps, then the critic's with the returns. A rank of the one and
        the rank of the other with the same number are given the same batch, and hand each other its arrays.
        """
        policy, critic = [], []
        for worker, other, batch in zip(self._workers, self._critics, batches, strict=True):
            values = other.values.remote(batch)
            metrics, returns = worker.train_with_critic.options(num_returns=2).remote(rollout_id, batch, values)
            policy.append(metrics)
            critic.append(other.train.remote(rollout_id, batch, values, returns))
        found = self._wait([*policy, *critic], what)
        return found[0] | found[len(policy)]

    def save(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        """Writes what `--save` and `--save-hf` ask for: a checkpoint of everything, a Hugging Face directory.

        With `--async-save` the checkpoint is written while the run goes on, see `finish_save`.

        Args:
            metrics: those of the rollout so far, for a run that goes on from here: this one may not come to log them.
        """
        args = self.args
        self.finish_save()
        if args.save_hf:
            directory = args.save_hf.replace("{rollout_id}", str(rollout_id))
            references = [worker.export_hf.remote(directory) for worker in self._workers]
            self._wait(references, f"the Hugging Face directory of rollout {rollout_id}")
        if not args.save:
            return

        def write(directory: Path) -> None:
            references = []
            for part, actors in (
                ("trainer", self._workers),
                ("critic", self._critics),
                ("rollout", [self._rollout]),
            ):
                if actors:
                    (directory / part).mkdir()
                references += [actor.save.remote(str(directory / part), rollout_id) for actor in actors]
            self._wait(references, f"the checkpoint of rollout {rollout_id}")

        def finish(directory: Path) -> None:
            wait_written(directory / "trainer", STEP_DEADLINE)
            if self._critics:
                wait_written(directory / "critic", STEP_DEADLINE)

        where = Path(args.save), rollout_id, {"weight_version": self.weight_version, "metrics": numbers(metrics)}
        if args.async_save:
            self._saving = BackgroundCheckpoint(*where, write, finish)
        else:
            write_checkpoint(*where, write)

    def finish_save(self) -> None:
        """Waits for the checkpoint that is being written in the background, if there is one."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            trainers = [*self._workers, *self._critics]
            self._wait([worker.finish_save.remote() for worker in trainers], "the checkpoint to be written")
            saving.wait()

    def sync_weights(self) -> dict[str, float]:
        """Sends the trainer's weights to the engines, as the next version.

        Raises:
            WeightSyncError: see `WeightSync.sync`.
        """
        return self._weights.sync()

    def utilization(self) -> dict[str, float]:
        """`perf/host/…`, `perf/device/…` and `perf/process/…` since the last call (`--utilization-interval`)."""
        return {} if self._utilization is None else self._utilization.take()

    def _start(self) -> None:
        args = self.args
        resume_from = Path(args.resume_from) if args.resume_from else None
        if args.save:
            check_save_directory(Path(args.save), resume_from)
        if is_external(args) and serves(args):
            args.rollout_engine = external_kind(args)
        slots = reserve(args, str(Path(__file__).parents[2]))
        import ray  # not before: it reads its environment when it is imported

        if args.utilization_interval:
            gpus = args.device == "cuda"
            self._utilization = Utilization(args.utilization_interval, gpus, args.run_dir, is_joined())
        self._rollout = self._processes.add(
            "the rollout actor",
            ray.remote(RolloutActor).options(**beside_driver()).remote(args),
            silence=ROLLOUT_SILENCE,
        )
        self.memory = MemoryTurns(
            self._wait,
            self._rollout,
            (("trainer", self._workers), ("critic", self._critics)),
            offload_train=bool(args.offload_train),
            offload_rollout=bool(args.offload_rollout),
        )
        length = self._wait([self._rollout.load_data.remote()], "the data set", DATA_DEADLINE)[0]
        resolve_num_rollout(args, length)
        if resume_from is not None and args.start_rollout_id is None:
            check_not_finished(args, resume_from)
            self.saved_metrics = read_meta(resume_from).get("metrics", {})
        engines = self._rollout.start.remote(args.num_rollout, slots.placement, launch_on(slots, args.device))
        self._make_workers(slots)
        if args.offload_rollout:
            self._wait([engines], "engines to start", START_DEADLINE)
            self.memory.begin()
        ranks = [worker.start.remote() for worker in [*self._workers, *self._critics]]
        self._engines, *states = self._wait([engines, *ranks], "engines and trainer ranks to start", START_DEADLINE)
        resumed = states[0].start_rollout_id if states else 0
        self.start_rollout_id = resumed if args.start_rollout_id is None else args.start_rollout_id
        self._weights = WeightSync(
            *(self._rollout, self._workers, self._wait),
            api_key=self._engines.api_key,
            pause_mode=args.pause_mode,
            tolerates=bool(args.use_fault_tolerance),
            checks=bool(args.check_weight_update_equal),
            version=read_meta(resume_from)["weight_version"] if resume_from is not None else 0,
        )
        if resume_from is not None:
            reference = self._rollout.load.remote(str(resume_from / "rollout"), resumed - 1)
            self._wait([reference], "the data source of the checkpoint", DATA_DEADLINE)
        self.utilization()  # that of the start belongs to no step

    def _make_workers(self, slots: Reservation) -> None:
        """The processes of the trainer's ranks, which meet; their models are built when they start."""
        import ray

        args = self.args
        if not slots.placement.ranks:
            return
        names = {"actor": "trainer rank", "critic": "critic rank"}
        roles = [("actor", TrainWorker, self._workers)]
        if has_critic(args) and not evaluates_only(args):
            roles.append(("critic", CriticWorker, self._critics))  # on the policy's slots
        environment = {"runtime_env": {"env_vars": train_environment(args)}} if args.train_env_vars else {}
        for number, (role, kind, workers) in enumerate(roles):
            of_role, rendezvous = role_args(args, role), slots.rendezvous(Path(args.run_dir), number)
            for rank, share in enumerate(slots.placement.ranks):
                worker = ray.remote(kind).options(**slots.on_node(share.node), **environment)
                gpu = share.slots[0] if args.device == "cuda" else None
                worker = worker.remote(of_role, rank, args.world_size, rendezvous, gpu)
                workers.append(self._processes.add(f"{names[role]} {rank}{slots.where(share)}", worker))

    def _stop(self, deadline: float) -> None:
        import ray

        if not ray.is_initialized():
            return
        if self._utilization is not None:
            self._utilization.close()
        closing = [worker.end.remote() for worker in [*self._workers, *self._critics]]
        if self._rollout is not None:
            closing.append(self._rollout.close.remote())
        for read in self._processes.end(closing, deadline):
            self.options_read |= read
        if self._saving is not None:
            self._saving.settle(deadline)
        ray.shutdown()
        if self._processes.any_died:
            from colloid.weights.ring_writer import remove_leftovers  # imports torch

            remove_leftovers()

    def _wait_idle(self, reference: Any, what: str) -> Any:
        """What a call to the rollout actor returns, while the trainer has nothing to do but to serve new engines."""
        changes = self._workers and self._engines.changes
        meanwhile = self._weights.serve_joining if changes else None
        return self._processes.wait([reference], what, STEP_DEADLINE, meanwhile)[0]

    def _wait(self, references: list[Any], what: str, deadline: float = STEP_DEADLINE) -> list[Any]:
        return self._processes.wait(references, what, deadline)


def check_not_finished(args: Any, resume_from: Path) -> None:
    """Raises `ConfigError` where the checkpoint is the run's last, and all is logged: nothing would be left to do."""
    last, num_rollout = read_meta(resume_from)["rollout_id"], args.num_rollout
    if last + 1 < num_rollout or args.num_restarts:
        return
    trained = has_logged(args.run_dir, last, STEP_TIME)
    evaluated = not evaluates(args) or has_logged(args.run_dir, num_rollout)
    if (trained and evaluated) or not Path(args.run_dir, METRICS_FILE).exists():
        raise ConfigError(
            f"{resume_from} is of rollout {last}, and --num-rollout is {num_rollout}: the run is finished. Raise "
            "--num-rollout to go on"
        )
