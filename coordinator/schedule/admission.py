"""Which slots a request gets when its turn comes: those of its kept prefix, free ones, those kept for others.

And where they go when it ends, has shifted, or does not.
"""

from dataclasses import dataclass

from ...proto.errors import DoesNotFitError
from ...proto.generation_result import ShiftFailureKind
from ...proto.ids import Layout
from ...proto.kv import BundleTable, block_count
from .kept import KeptSequence, KeptSequences
from .session import Session
from .slots import SlotPool


@dataclass(frozen=True, slots=True)
class Grant:
    """Tables for a request's whole length; `target` where it will change its layout."""

    table: BundleTable
    target: BundleTable | None
    in_place: bool = False  # source and target share slots: what moves changes places, once the prompt is read


class Admission:
    """Grants are all or nothing, and a shift's target is granted with the rest: no request stops half-way for slots."""

    def __init__(self, slots: SlotPool, kept: KeptSequences, *, in_place: bool = False) -> None:
        """`in_place`: the arenas were sized for one layout's keys and values at a time."""
        self._slots, self._kept, self._in_place = slots, kept, in_place

    def admit(self, session: Session, *, alone: bool) -> Grant | None:
        """Slots for a request, None if it has to wait for those of open ones (never when `alone`).

        May turn the session to its cold plan. Raises `DoesNotFitError` where it can never be opened.
        """
        if session.plan.kept is not None:
            grant = self._continue(session, alone)
            if grant is not None or session.plan.kept is not None:
                return grant
        while (grant := self._grant(session, shifts=_shifts(session))) is None and self._kept.drop_oldest():
            pass
        if grant is not None or not alone:
            return grant
        plan = session.plan
        if not _shifts(session) or (grant := self._grant(session, shifts=False)) is None:
            raise DoesNotFitError(f"{plan.cells} tokens need more KV slots than the workers have")
        session.layout, session.target_layout = plan.prefill, plan.decode
        session.note_failure(ShiftFailureKind.NO_ROOM, "no room for its keys and values in both layouts")
        return grant

    def take_back(self, session: Session) -> None:
        """An ended request's slots are free; those of a conversation's turn are kept for what goes on from it."""
        plan, tokens = session.plan, session.written_tokens
        if session.table is None:
            return
        if plan.request.conversation is not None and tokens:
            sequence = KeptSequence(plan.request_id, tokens, session.layout, session.table)
            self._kept.keep(plan.request.conversation, sequence)
        else:
            self._slots.release(session.table, session.layout)

    def take_back_target(self, session: Session) -> None:
        """Of a shift that is not made: its target's slots, but for those that hold the request."""
        if session.target is not None:
            self._slots.release_moving(session.target, session.target_layout, but=session.table)

    def take_back_source(self, session: Session, table: BundleTable, layout: Layout) -> None:
        """Of a shift that was made: the slots it came from, unless source and target share them."""
        if session.target is not table:
            self._slots.release_moving(table, layout, but=session.table)

    def _grant(self, session: Session, *, shifts: bool) -> Grant | None:
        plan, blocks = session.plan, block_count(session.plan.cells)
        journey = (plan.prefill, plan.decode if shifts else plan.prefill)
        in_place = shifts and (self._in_place or not self._slots.could_fit(blocks, journey))
        in_place = in_place and not self._slots.fits(blocks, journey)
        if not self._slots.fits(blocks, journey, in_place=in_place):
            return None
        table = self._slots.grant(blocks, plan.prefill)
        if table is None:
            raise AssertionError("slots that fit could not be granted")
        if in_place:
            return Grant(table, self._slots.grant_swap(table, plan.decode), in_place=True)
        return Grant(table, self._slots.grant_shift(table, plan.decode) if shifts else None)

    def _continue(self, session: Session, alone: bool) -> Grant | None:
        """Slots around the kept prefix. Where it is gone or in the way, the session gets its cold plan."""
        while (grant := self._grow(session)) is None and session.plan.kept is not None:
            if self._kept.drop_oldest(but=session.plan.request.conversation):
                continue
            if alone:
                session.read_all()
            break
        return grant

    def _grow(self, session: Session) -> Grant | None:
        """The kept prefix's table, grown to the request's length. All or nothing: what does not fit stays kept."""
        plan = session.plan
        conversation, prefix = plan.request.conversation, plan.kept
        sequence = self._kept.find(conversation, prefix) if conversation is not None and prefix is not None else None
        if conversation is None or prefix is None or sequence is None:
            session.read_all()
            return None
        kept_blocks, blocks = block_count(prefix.tokens), block_count(plan.cells)
        returns = plan.first_layout is not plan.prefill
        other = plan.prefill if returns else plan.decode
        to = other if returns or _shifts(session) else plan.first_layout
        if not self._slots.fits_around(sequence.table, blocks, (plan.first_layout, to)):
            return None
        table = self._slots.grow(self._kept.take(conversation, kept_blocks), plan.first_layout, blocks)
        if table is None:
            raise AssertionError("slots that fit could not be granted")
        return Grant(table, self._slots.grant_shift(table, to) if to is not plan.first_layout else None)


def _shifts(session: Session) -> bool:
    plan = session.plan
    return plan.decode is not plan.prefill and plan.decode_steps > 0
