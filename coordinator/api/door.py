"""Workers that come to the clients' address: sent on, or away."""

from ...proto.channel import ClientListener, Knock
from ...proto.commands import Redirect, Refuse


class WorkersDoor:
    """`workers_port` None: this coordinator starts its workers itself."""

    def __init__(self, listener: ClientListener, workers_port: int | None) -> None:
        self._listener = listener
        self._workers_port = workers_port

    def send_to(self, workers_port: int) -> None:
        """Another group gathers, elsewhere."""
        self._workers_port = workers_port

    def answer(self, knock: Knock) -> None:
        if self._workers_port is None:
            refusal = Refuse("this coordinator starts its workers itself (--external awaits others)")
            self._listener.answer_worker(knock.peer, refusal)
        else:
            self._listener.answer_worker(knock.peer, Redirect(self._workers_port))
