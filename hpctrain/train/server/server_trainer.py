"""The trainer of a run with servers: what makes the steps up to where all ranks meet again.

Between two meetings ranks go on by letters alone. They meet where something is due after a step (an
evaluation, a checkpoint, the end), or as soon as something was asked of a rank, and then do together what any
run does between steps. What becomes of a step the head alone knows before.
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
from hpctrain.train.server.wire_format import own_pieces, pieces_of
from hpctrain.train.server.worker_loop import ShareStep, Worker
from hpctrain.train.step import StepResult, TrainState
from hpctrain.train.trainer import Trainer
from hpctrain.watch.stragglers import TimeComparison


class ServedTrainer(Trainer):
    """A Trainer on all ranks of `world`, whose `engine` is that of this rank's role.

    Hooks are told of a step after which all meet as of any; of another one the head alone tells them, see
    Hook.after_step_alone.
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
        told = world.everyone.all_gather_object(own_pieces(engine.stage.buckets) if serves else [])
        parameters = {p.shard.name: p for model in engine.stage.models for p in parameter_list(model)}
        pieces = [pieces_of(told[server], parameters, engine.stage.models) for server in range(roles.servers)]
        if serves:
            self.server = Server(deck, engine, self.mailbox, roles, pieces[world.rank])
        else:
            share_step = ShareStep(engine, batches, deck, roles.workers)
            self.step = share_step
            self.worker = Worker(deck, engine, share_step, self.mailbox, roles, pieces)
        self.book: UpdateLog | None = None
        if world.rank == HEAD:
            names = (*engine.objective.metrics, *engine.auxiliary_loss_names)
            self.book = UpdateLog(self.state, names, roles.workers, self._tell, self._moved)
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
        left_out = self.book.left_out if self.book is not None else 0
        return [*lines, f"discarded   {counted(left_out, 'push')}, not finite"] if left_out else lines

    @property
    def stage(self) -> int:
        """See Trainer: servers come before workers."""
        return int(self.worker is not None)

    @override
    def stragglers(self, factor: float) -> TimeComparison:
        hosts = self.world.everyone.all_gather_object(self.world.hostname)
        return SlowWorkers(self.book, self.roles, hosts, factor)

    def begin(self, state: TrainState) -> None:
        """Go on from a state."""
        for name, value in asdict(state).items():
            setattr(self.state, name, value)

    @property
    def staleness(self) -> Counter[int]:
        """On the head, how many pushes had which staleness."""
        return Counter() if self.book is None else self.book.staleness

    def train_step(self, batch: int | None = None) -> StepResult:
        """Make one step, after which all meet. Collective."""
        assert batch is None, "workers take the deck's batch"
        result = self._make_steps(self.state.step + 1, lambda: False)
        assert result is not None
        return result.result

    @override
    def advance(self, due: Callable[[int], bool], asked: Callable[[], bool]) -> None:
        end = next(step for step in range(self.state.step + 1, self.deck.run.steps + 1) if due(step))
        self._make_steps(end, asked)

    def _make_steps(self, end: int, asked: Callable[[], bool]) -> StepDone | None:
        """Make steps up to `end`, or fewer where anything is asked; the last one, if it is that."""
        if self.server is not None:
            if self.book is not None:
                self.book.begin(end)
            self.server.serve(self.state, end, asked, self.book)
        elif self.worker is not None:
            self.worker.work(self.state, asked, self.activations.around_step)
        return self._meet()

    def _meet(self) -> StepDone | None:
        """Have all ranks know what was done, and tell all hooks of a step after which something is due."""
        problem = self._problem if self.worker is None else self.worker.problem
        with self.world.agreement():
            if problem is not None:
                raise problem
        last = None if self.book is None else self.book.last
        here = None
        if self.book is not None:
            row = None if last is None else (last.result, last.seconds, last.payload)
            here = [asdict(self.state), row]
        state, row = self.world.everyone.broadcast_object(here, HEAD)
        self.begin(TrainState(**state))
        if row is None:
            return None
        done = last or StepDone(row[0], self.state, row[1], row[1], row[2])
        for hook in self.hooks:
            hook.after_step(done)
        return done

    def evaluate(self, batches: Batches, sequences: int) -> dict[str, float]:
        """See Trainer: by the workers, with the parameters that the servers have."""
        metrics = None
        if self.server is not None:
            self.server.serve_all()
        elif self.worker is not None:
            self.worker.pull(self.state.step)
            self.mailbox.wait_for_sends()
            metrics = self.step.evaluate(batches, sequences)
        shared: dict[str, float] = self.world.everyone.broadcast_object(metrics, self.roles.servers)
        return shared

    def _moved(self) -> int:
        return self.world.ledger.bytes + self.mailbox.received_bytes

    def _tell(self, done: StepDone) -> None:
        """Tell the hooks of a step at which the other ranks are not."""
        try:
            for hook in self.hooks:
                hook.after_step_alone(done)
        except HpctrainError as error:
            assert self.server is not None
            self._problem = error
            self.server.break_off()


def new_trainer(world: World, deck: Deck, batches: Batches) -> Trainer:
    """The trainer of a deck whose vocabulary is settled, with servers or without. Collective.

    HpctrainError on all ranks where its memory is not there, or the deck cannot be run here.
    """
    if deck.objective.kind not in LANGUAGE_KINDS:
        sentence = "is supported by `hpctrain run` and `hpctrain resume` only"
        raise HpctrainError(deck.problem("objective.kind", sentence))
    if deck.communication.server is None:
        engine, _ = build_within_memory(deck, world, make_mesh(deck, world))
        return Trainer(deck, engine, batches)
    engine, _ = build_role_within_memory(deck, world, lambda: None)
    return ServedTrainer(deck, world, engine, batches)
