"""Names under which rows of users' jobs may be, in the run that all nodes of a trace share."""

from __future__ import annotations

from argus.model.shares import Shares

KEPT_NAMES = 16_384
"""Names that are remembered, of which a user may take as many as stay free: one that is alone 8,192."""


class GivenNames:
    """Which user each name belongs to: who has it first, for as long as the trace lasts. Otherwise who runs short jobs
    could have rows of another user's in a later job, or make that another run.

    A user for whose names there is no room is given none: its job has its user's number behind the name, and a run of
    its own.
    """

    def __init__(self) -> None:
        self._given: dict[str, tuple[int, int]] = {}
        """User, and the newest run of the name."""
        self._shares = Shares()

    def owner(self, name: str) -> int | None:
        """The user whose name it is; None: nobody's."""
        given = self._given.get(name)
        return None if given is None else given[0]

    def newest_run(self, name: str) -> int:
        """The newest run of a name; 0: it was not given."""
        return self._given.get(name, (-1, 0))[1]

    def has_room(self, name: str, uid: int) -> bool:
        """Whether a name is remembered, or can be for a user."""
        return name in self._given or self._shares.fits((uid, ""), len(self._given) / KEPT_NAMES, several=True)

    def give(self, name: str, uid: int, run: int) -> bool:
        """A user's job of this name has begun or ended. Returns whether the name is this user's: remembered.

        Args:
            name: The name.
            uid: The user; below 0: not known.
            run: The job's.
        """
        owner, newest = self._given.get(name, (uid, 0))
        if owner != uid:
            return False
        if not self.has_room(name, uid):
            return False
        if name not in self._given:
            self._shares.add((uid, ""), 1)
        self._given[name] = uid, max(run, newest)
        return True

    def renumber(self, more: int) -> None:
        """All runs have become others, by so much."""
        self._given = {name: (uid, run + more) for name, (uid, run) in self._given.items()}
