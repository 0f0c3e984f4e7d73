"""The trainer of a run with parameter servers, which makes the steps up to the next synchronization.

Between two synchronizations ranks only exchange messages with servers. They synchronize if something is due
after a step (an evaluation, a checkpoint, the end), or as soon as a rank has received a request. Until then
only the head, the first server, knows the results of the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

from typing_extensions import override

from hpctrain.comm.mailbox import Mailbox
from hpctrain.comm.world import World
from hpctrain.data.batches import Batches
from hpctrain.deck.schema import Deck
from hpctrain.deck.sections.objective import LANGUAGE_KINDS
from hpctrain.engine.built_engine import Engine
from hpctrain.engine.layout.run_mesh import make_mesh
from hpctrain.engine.layout.server_roles import ServerRoles
from hpctrain.errors import HpctrainError
from hpctrain.model.part import parameter_list
from hpctrain.plan.engine import build_within_memory
from hpctrain.plan.server_plan import build_role_within_memory
from hpctrain.text import counted
from hpctrain.train.hook import StepDone
from hpctrain.train.server.server_loop import Server
from hpctrain.train.server.server_messages import HEAD
from hpctrain.train.server.update_log import SlowWorkers, UpdateLog, histogram_text
from hpctrain.train.server.wire_format import owned_ranges, served_ranges
from hpctrain.train.server.worker_loop import ShareStep, Worker
from hpctrain.train.step import StepResult, TrainState
from hpctrain.train.trainer import Trainer
from hpctrain.watch.stragglers import TimeComparison


class ServedTrainer(Trainer):
    """Trainer of a run with servers. Its engine is that of this rank's role.

    After a step at which all ranks synchronize, hooks are called as in any run. After other steps, the head
    calls `Hook.after_step_alone`.
    """

    def __init__(
        self, deck: Deck, world: World, engine: Engine, batches: Batches, state: TrainState | None = None
    ) -> None:
        super().__init__(deck, engine, batches, state)
        self._world = world
        self.roles = roles = ServerRoles.of(deck, world.size)
        everyone = tuple(range(world.size))
        self.mailbox = Mailbox(world.new_group(("server",), everyone, "mpi"))
        self.server: Server | None = None
        self.worker: Worker | None = None
        serves = roles.serves(world.rank)
        ranges = world.everyone.all_gather_object(owned_ranges(engine.stage.buckets) if serves else [])
        parameters = {p.shard.name: p for model in engine.stage.models for p in parameter_list(model)}
        pieces = [
            served_ranges(ranges[server], parameters, engine.stage.models) for server in range(roles.servers)
        ]
        if serves:
            self.server = Server(deck, engine, self.mailbox, roles, pieces[world.rank])
        else:
            share_step = ShareStep(engine, batches, deck, roles.workers)
            self.step = share_step
            self.worker = Worker(deck, engine, share_step, self.mailbox, roles, pieces)
        self.update_log: UpdateLog | None = None
        if world.rank == HEAD:
            names = (*engine.objective.metrics, *engine.auxiliary_loss_names)
            self.update_log = UpdateLog(
                self.state, names, roles.workers, self._after_step_alone, self._transferred_bytes
            )
        self._problem: HpctrainError | None = None

    @property
    @override
    def world(self) -> World:
        return self._world

    @property
    @override
    def computing_ranks(self) -> int:
        return self.roles.workers

    @property
    @override
    def rank_description(self) -> str:
        roles = self.roles
        return (
            f"{counted(self.world.size, 'rank')} ({counted(roles.servers, 'server')}, "
            f"{counted(roles.workers, 'worker')}; {self.deck.value('communication.server.mode')})"
        )

    @property
    @override
    def outcome_lines(self) -> list[str]:
        lines = [f"staleness   pushes by staleness: {histogram_text(self.staleness)}"]
        discarded_pushes = self.update_log.discarded_pushes if self.update_log is not None else 0
        return (
            [*lines, f"discarded   {counted(discarded_pushes, 'push')}, not finite"]
            if discarded_pushes
            else lines
        )

    @property
    @override
    def stage(self) -> int:
        # A memory plan has the servers first.
        return int(self.worker is not None)

    @override
    def stragglers(self, factor: float) -> TimeComparison:
        hosts = self.world.everyone.all_gather_object(self.world.hostname)
        return SlowWorkers(self.update_log, self.roles, hosts, factor)

    def set_state(self, state: TrainState) -> None:
        """Set the counters of the run."""
        for name, value in asdict(state).items():
            setattr(self.state, name, value)

    @property
    def staleness(self) -> Counter[int]:
        """Number of pushes of each staleness, on the head; empty on other ranks."""
        return Counter() if self.update_log is None else self.update_log.staleness

    @override
    def train_step(self, batch: int | None = None) -> StepResult:
        assert batch is None, "workers take the deck's batch"
        result = self._make_steps(self.state.step + 1, lambda: False)
        assert result is not None
        return result.result

    @override
    def advance(self, is_due: Callable[[int], bool], is_requested: Callable[[], bool]) -> None:
        end = next(step for step in range(self.state.step + 1, self.deck.run.steps + 1) if is_due(step))
        self._make_steps(end, is_requested)

    def _make_steps(self, end: int, is_requested: Callable[[], bool]) -> StepDone | None:
        """Make steps up to `end`, or fewer if a rank has a request. Return step `end` if it was made."""
        if self.server is not None:
            if self.update_log is not None:
                self.update_log.start(end)
            self.server.serve(self.state, end, is_requested, self.update_log)
        elif self.worker is not None:
            self.worker.work(self.state, is_requested, self.activations.around_step)
        return self._synchronize()

    def _synchronize(self) -> StepDone | None:
        """Share the state with all ranks, and call the hooks if the last step was the end. Collective."""
        problem = self._problem if self.worker is None else self.worker.problem
        with self.world.agreement():
            if problem is not None:
                raise problem
        last = None if self.update_log is None else self.update_log.last_step
        here = None
        if self.update_log is not None:
            row = None if last is None else (last.result, last.seconds, last.payload)
            here = [asdict(self.state), row]
        state, row = self.world.everyone.broadcast_object(here, HEAD)
        self.set_state(TrainState(**state))
        if row is None:
            return None
        done = last or StepDone(row[0], self.state, row[1], row[1], row[2])
        for hook in self.hooks:
            hook.after_step(done)
        return done

    @override
    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        # The workers evaluate, with the parameters of the servers.
        metrics = None
        if self.server is not None:
            self.server.serve_all()
        elif self.worker is not None:
            self.worker.pull(self.state.step)
            self.mailbox.wait_for_sends()
            metrics = self.step.evaluate(batches, sequences)
        shared: dict[str, float] = self.world.everyone.broadcast_object(metrics, self.roles.servers)
        return shared

    def _transferred_bytes(self) -> int:
        return self.world.ledger.bytes + self.mailbox.received_bytes

    def _after_step_alone(self, done: StepDone) -> None:
        """Call the hooks on the head only, after a step without synchronization."""
        try:
            for hook in self.hooks:
                hook.after_step_alone(done)
        except HpctrainError as error:
            assert self.server is not None
            self._problem = error
            self.server.stop_giving_shares()


def new_trainer(world: World, deck: Deck, batches: Batches) -> Trainer:
    """Return the trainer of a deck with a known vocabulary, with servers or without. Collective.

    Raises:
        HpctrainError: There is not enough memory, or the deck cannot run on these ranks; raised on all ranks.
    """
    if deck.objective.kind not in LANGUAGE_KINDS:
        sentence = "is supported by `hpctrain run` and `hpctrain resume` only"
        raise HpctrainError(deck.problem("objective.kind", sentence))
    if deck.communication.server is None:
        engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
        return Trainer(deck, engine, batches)
    engine, _ = build_role_within_memory(deck, world, lambda: None)
    return ServedTrainer(deck, world, engine, batches)
