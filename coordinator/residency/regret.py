"""When weights that do not fit twice move to where the other layout needs them: the regret rule. Pure.

Each phase of a request (its prompt, its answer) would take so long with the weights where they lie, and so long with
them where the other layout has them. What staying has cost over moving is added up and never falls below nothing; when
it reaches what a move there and back takes, the weights move before the phase is run. This is the work function
algorithm of a metrical task system with two states, where no rule without a look into the future is better: at most
three times the time of the best plan that knew all phases beforehand (Borodin, Linial and Saks 1992). Where the two
ways differ by d seconds, at most 1.5 d more, once.
"""

from dataclasses import dataclass, replace

from ...proto.ids import Layout


def other(layout: Layout) -> Layout:
    """The one that is not `layout`."""
    return Layout.TENSOR if layout is Layout.LAYER else Layout.LAYER


@dataclass(frozen=True, slots=True)
class Regret:
    """Where the weights lie, what moving them takes each way, and the regret of having stayed, all in seconds.

    A value: `note` gives the next one, so that what-if plans change nothing.
    """

    state: Layout
    to_tensor_seconds: float
    to_layer_seconds: float
    seconds: float = 0.0

    @property
    def round_trip_seconds(self) -> float:
        return self.to_tensor_seconds + self.to_layer_seconds

    def move_seconds(self, to: Layout) -> float:
        """Seconds until the weights lie where `to` needs them; 0 where they do."""
        if to is self.state:
            return 0.0
        return self.to_tensor_seconds if to is Layout.TENSOR else self.to_layer_seconds

    def note(self, in_layer: float, in_tensor: float) -> "Regret":
        """The state to run the next phase in, given its seconds in both. To be asked before it is run.

        A phase that cannot be run in a state takes infinitely long there.
        """
        here, there = (in_layer, in_tensor) if self.state is Layout.LAYER else (in_tensor, in_layer)
        if here == there:  # both infinite, maybe
            return self
        seconds = max(0.0, self.seconds + here - there)
        if here > there and seconds >= self.round_trip_seconds:
            return replace(self, state=other(self.state), seconds=0.0)
        return replace(self, seconds=seconds)

    def moved_to(self, state: Layout) -> "Regret":
        """Moved without being asked, or still there."""
        return self if state is self.state else replace(self, state=state, seconds=0.0)

    def at_prices(self, to_tensor_seconds: float, to_layer_seconds: float) -> "Regret":
        """The same with what moves take by a newer measurement."""
        return replace(self, to_tensor_seconds=to_tensor_seconds, to_layer_seconds=to_layer_seconds)
