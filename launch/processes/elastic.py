"""torchrun's elastic agent over forked workers. Imports torch: whoever needs this module has to import it late.

Elastic's own agent starts each worker as a program, which imports torch again. This one has the same rendezvous, ranks
and end, by the parts that elastic leaves to its users, and forks. The store that workers meet at has threads, so it
begins behind the fork; its socket listens before, and those that come early wait in the kernel's queue.
"""

import os
import signal
import socket
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # exported, though torch does not say so
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from .agent_lines import Order
from .forked_workers import EVIDENCE_SECONDS, ForkedWorkers

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 10.0  # an end wakes the agent at once; elastic wants to look at the group now and then
NO_FILE = "/dev/null"


class LoopbackRendezvous(RendezvousHandler):
    """Of one agent, once: nobody else may come. Workers meet at a store on loopback alone; torch's own listen
    on every interface."""

    def __init__(self, group: str) -> None:
        self._group = group
        # Port 0: chosen while binding, so that launches never race for one.
        self._listener = socket.create_server((LOOPBACK, 0))
        self._port: int = self._listener.getsockname()[1]
        self._store: TCPStore | None = None

    def fileno(self) -> int:
        """The listening socket, before `serve`."""
        return self._listener.fileno()

    def serve(self) -> None:
        """Let the workers meet; from here on this process has threads."""
        self._store = TCPStore(
            LOOPBACK,
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join anyway."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._group

    def shutdown(self) -> bool:
        return True


class ForkingAgent(SimpleElasticAgent):
    """Forks the workers that an order asks for, once, and watches them until all have ended."""

    def __init__(self, order: Order, workers: ForkedWorkers) -> None:
        self._meeting = LoopbackRendezvous(order.group)
        self._order = order
        self._workers = workers
        super().__init__(
            WorkerSpec(
                role="worker",
                local_world_size=order.workers,
                rdzv_handler=self._meeting,
                entrypoint=order.module,
                args=order.arguments,
                max_restarts=0,
                monitor_interval=0.001,  # `_monitor_workers` waits; elastic asks for more than 0
                local_addr=LOOPBACK,
            ),
            exit_barrier_timeout=5,
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        pids = {}
        for worker in worker_group.workers:
            pids[worker.local_rank] = self._workers.fork(
                worker.global_rank, self._order.module, self._order.arguments,
                environment_of(worker, worker_group), foreign=(self._meeting.fileno(),),
            )  # fmt: skip
        self._workers.tell_started()
        self._meeting.serve()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._workers.wait(LOOK_SECONDS)
        if self._workers.failed:
            self._workers.wait(EVIDENCE_SECONDS)
            return RunResult(WorkerState.FAILED, failures=self._failures(worker_group))
        if self._workers.running:
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._workers.exit_codes))

    def _failures(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        codes, pids = self._workers.exit_codes, self._workers.pids
        return {
            one.global_rank: ProcessFailure(one.local_rank, pids[one.global_rank], code, NO_FILE)
            for one in worker_group.workers
            if (code := codes.get(one.global_rank, 0)) != 0
        }

    def _construct_event(self, state: str, source: EventSource, *more: Any, **further: Any) -> Event:
        """Nobody reads them, and elastic's own ask DNS for this host's name each time: seconds, where none answers."""
        return Event(state, source)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._workers.end()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._workers.end()


def environment_of(worker: Worker, group: WorkerGroup) -> dict[str, str]:
    """What torchrun sets for a worker."""
    spec = group.spec
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": str(spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
