"""Which files have probes: each that a traced process maps, once for all processes or for each target apart."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache, partial

from argus.capture.attachment import LONGEST_RETRY_S, RETRY_S, Attachment, the_same
from argus.capture.probing.late_probes import LateProbes
from argus.capture.process.follow import Family
from argus.capture.process.targets import TORCH_PYTHON, FileKey, Library, Target
from argus.live.cost.attaching import ATTACH_S, OF_LOOP, Attaching
from argus.live.cost.file_users import FileUsers
from argus.live.cost.mapped_elsewhere import MappedElsewhere
from argus.live.cost.turns import Turns
from argus.live.job import Member
from argus.live.session import Session
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import UNKNOWN, Owner, Whom
from argus.model.shares import CONTAINERS

KEPT_FILES = 64
"""Files that no traced process maps any more and whose probes stay: a job that starts again maps the same ones, and the
calls that it makes before it was noticed are recorded. Of others (a container's, that is made anew for each job) there
are as many as the trace lives long."""
LATER_S = 0.2
"""A file whose owner has too much under way is tried again so soon."""
EARLY_TRIES = 4
"""Of so many containers of a user a file is tried before its time that was refused for others."""
MISSED_S = 1.0
"""A process that ends has missed probes that it lacked for so long, or that waited for their turn: others come as soon
as the kernel can put them there."""
MOST_WAITING, LEAST_WAITING = 2048, 32
"""Files that lack their probes, in one process or in all, that are gone through for one owner; of a user in many
containers eight times as many, and the least of each further one. Others have their turn once some are probed."""
LOOKS_S = 1.0
"""CPU time that an owner has saved for its files to be gone through: it gets a tenth of the loop's time."""
_NOBODY: Owner = (-2, "")
"""Has its part of that time, and leaves it: so what an owner spends is taken off though it is alone, too."""
_Place = tuple[FileKey, int | None]
"""A file, in one process or in all."""
_Uses = list[tuple[Library, Target]]


@dataclass(slots=True)
class _Missing:
    """Probes that a process would have on a file, and has not."""

    since: float
    again_at: float = 0.0
    wait_s: float = RETRY_S
    why: ArgusError | None = None
    """Why the kernel refused them."""
    counted: AbstractSet[int] = frozenset()
    """Processes for which that is counted."""
    whom: dict[int, Whom] = field(default_factory=dict)
    """Processes that lack them, and whom that concerns: it is not known any more once they have ended."""
    waited: bool = False
    """They had to wait for their turn."""
    held: bool = False
    """They had to wait for those of another file, which may be the same."""
    owners: frozenset[Owner] = frozenset()
    """Of those who map it, when it was last tried."""

    tried: frozenset[Owner] = frozenset()
    """On whose account they were tried since they were due last."""

    def refused(self, why: ArgusError, now: float) -> None:
        self.why = why
        if self.again_at <= now:  # else somebody came meanwhile, and puts nothing off
            self.again_at, self.wait_s = now + self.wait_s, min(2 * self.wait_s, LONGEST_RETRY_S)

    def tries(self, uses: _Uses, now: float) -> None:
        """They are tried for all who map the file now."""
        self.owners = frozenset(target.identity.owner for _, target in uses)
        self.tried = self.tried | self.owners if self.again_at > now else self.owners

    def rests(self, uses: _Uses, now: float) -> bool:
        """Whether it is too soon to try again. For who did not map the file when it was refused it may come."""
        if self.again_at <= now:
            return False
        if self.why is None:
            return True
        tried = Tally(user for user, _ in self.tried)
        return all(
            owner in self.tried or tried[owner[0]] >= EARLY_TRIES for owner in {each.identity.owner for _, each in uses}
        )


class _Waiting:
    """How many files that lack probes are gone through, of each owner and user."""

    def __init__(self) -> None:
        self._of_owner = Tally[Owner]()
        self._of_user = Tally[int]()

    def has_room(self, owner: Owner) -> bool:
        """Whether an owner may have one more, which is taken then."""
        most = MOST_WAITING if self._of_user[owner[0]] < CONTAINERS * MOST_WAITING else LEAST_WAITING
        if self._of_owner[owner] >= most:
            return False
        self._of_owner[owner] += 1
        self._of_user[owner[0]] += 1
        return True


def _turn_of(places: Mapping[_Place, _Uses]) -> Callable[[_Place], int]:
    """The order in which files are probed: of each owner one, then of each another one."""
    before = Tally[Owner]()
    turns: dict[_Place, int] = {}
    for place, uses in places.items():
        owner = uses[0][1].identity.owner
        turns[place] = before[owner]
        before[owner] += 1
    return turns.__getitem__


class ProbedFiles:
    """Puts probes on files, and takes them off.

    Args:
        session: The trace.
        family: Which processes are let through.
        timed: Whether a process may have GPU times.

    Attributes:
        attached: Probes on files.
        released: Times that probes were taken off a file that no traced process maps any more.
        named: PIDs that the user asked for one by one.
    """

    def __init__(self, session: Session, family: Family, timed: Callable[[int], bool] = lambda _: False) -> None:
        self._session = session
        self._family = family
        self._timed = timed
        self.attached: list[Attachment] = []
        self.released = 0
        self.named: set[int] = set()
        self._shared: dict[FileKey, bool] = {}
        """Whether a file is probed once for all processes."""
        self._twins: dict[FileKey, FileKey] = {}
        """Files of overlays in which the probes of another one stand (``_has_twin``)."""
        self._unused: dict[FileKey, None] = {}
        """Files with probes that no traced process maps, the one that was mapped last comes last."""
        self._attaching = Attaching()
        self._late_probes = LateProbes()
        self._users = FileUsers(session)
        self._pids: AbstractSet[int] = frozenset()
        self._elsewhere = MappedElsewhere(lambda pid: pid in self._pids or pid in family)
        self._missing: dict[_Place, _Missing] = {}
        """Files that processes map and that have no probes."""
        self._left_out: dict[int, int] = {}
        """Of each process, files that were left out at one time and are counted."""
        self._looks = Turns(OF_LOOP, LOOKS_S)
        self._due_at: dict[Owner, float] = {}
        """When the files of an owner are gone through again, if there is time."""
        self._changed = False
        self._refused: set[Owner] = set()
        """Owners of whom no more files may be under way in this look."""

    def probes(self, key: FileKey) -> bool:
        """Whether a file is probed once for all processes."""
        return self._shared.get(key, False)

    def decided(self, key: FileKey) -> bool:
        """Whether it is known how a file is probed."""
        return key in self._shared

    def attach(self, users: Sequence[Target], pids: set[int], *, running: bool) -> bool:
        """Puts probes on every library in use that has none yet, for a while; ``due`` says when to go on. Whether some
        came, or a file was found to have none.

        Whether a file is probed once for all processes, or for each target apart, is decided when it is first seen and
        kept: both at once would record every call twice.

        Args:
            users: Processes whose libraries are probed.
            pids: All processes that are traced, or may be.
            running: The trace has begun.

        Raises:
            ArgusError: The trace has not begun, and nothing at all can be probed of the processes that the user named,
                or of all. What cannot be probed otherwise is counted and noted, and the rest goes on: a file that the
                kernel refuses may be anybody's.
        """
        owners = [target.identity.owner for target in users]
        self._attaching.begin(owners, running=running)
        self._fill(owners)
        begun_s = time.thread_time()
        self._changed = False
        self._refused.clear()
        self._adopt_attached()
        self._pids = pids
        # Who has very many files that lack probes does not have them gone through all the time.
        going = {owner for owner in self._due_at if not running or self._looks.may(owner)}
        gone_through = [target for target in users if target.identity.owner in going]
        places, left_out = self._places(gone_through)
        # Decided for all files before the first is probed: that takes long, and probes cost the job meanwhile.
        fresh = {key: uses for (key, _), uses in places.items() if key not in self._shared}
        self._decide(fresh, running)
        if not self._shared.keys().isdisjoint(fresh):
            places, left_out = self._places(gone_through)
        twins = len(self._twins)
        self._users.note_layouts(gone_through, self._twins)
        self._count_missed({target.pid for target in users})
        resting = {target.pid for target in users if target.identity.owner not in going}
        self._missing = {
            place: missing
            for place, missing in self._missing.items()
            if place in places or not resting.isdisjoint(missing.whom)
        }
        for place in sorted(places, key=_turn_of(places)):
            self._attach_one(place, places[place], running)
        if len(self._twins) != twins:
            self._users.note_layouts(gone_through, self._twins)
        self._users.price(gone_through, self.attached, self._twins)
        self._due_at = {owner: math.inf if owner in going else 0.0 for owner in self._due_at}
        self._count_missing(places, resting)
        self._count_left_out(left_out, {target.pid for target in users})
        if running:
            self._charge(gone_through, time.thread_time() - begun_s)
        if not running and self._missing and not self.attached and not self._attaching.under_way:
            refused = [(each.why, places[place]) for place, each in self._missing.items() if each.why is not None]
            concerned = {target.pid for _, uses in refused for _, target in uses}
            if refused and (concerned & self.named if self.named else pids <= concerned):
                raise refused[0][0]
        return self._changed

    def _decide(self, fresh: Mapping[FileKey, _Uses], running: bool) -> None:
        """Decides how files are probed that were not mapped before: for each target apart if another process maps them,
        or if that was not seen in time. While others are looked at it stays open.

        Args:
            fresh: The files, and processes that map each.
            running: The trace has begun: nobody waits until all processes were looked at.
        """
        others, libraries = self._elsewhere, {key: uses[0][0] for key, uses in fresh.items()}
        others.take()
        if self._session.options.children or not fresh:
            elsewhere: set[FileKey] = set()
        elif not running:
            elsewhere = others.now(libraries)
        else:
            owners = dict.fromkeys(target.identity.owner for uses in fresh.values() for _, target in uses)
            lone = not self._attaching.several
            owner = next((owner for owner in owners if lone or others.may(owner[0])), None)
            # It is nobody's to pay for: how long it takes is up to those who are looked at.
            looking = others.begin(owner[0]) if not others.known and owner is not None else None
            if looking is not None and owner is not None and self._attaching.wait(looking, owner):
                others.take()
            if others.looking is not None:
                self._put_off(fresh)
                return
            elsewhere = others.among(libraries)
        self._shared.update({key: key not in elsewhere for key in fresh})
        for key in fresh:  # what waited for the look waits no longer
            if (missing := self._missing.get((key, None))) is not None and missing.why is None:
                missing.again_at = 0.0

    def _put_off(self, fresh: Mapping[FileKey, _Uses]) -> None:
        """While all processes are looked at files lack their probes, for ``MISSED_S`` at most: then they have them in
        each process apart."""
        now = time.monotonic()
        for key in fresh:
            missing = self._missing.setdefault((key, None), _Missing(now))
            missing.again_at = missing.since + MISSED_S
            if now >= missing.again_at:
                self._shared[key] = False

    def _fill(self, owners: Iterable[Owner]) -> None:
        """Hands out time to those whose processes map files."""
        before, self._due_at = self._due_at, dict.fromkeys(owners, 0.0)
        self._due_at |= {owner: at for owner, at in before.items() if owner in self._due_at}
        self._looks.fill({UNKNOWN, _NOBODY, *self._due_at}, time.monotonic())

    def _charge(self, gone_through: Sequence[Target], seconds: float) -> None:
        """Takes off what it took to go through files of processes, of each owner by how many it has."""
        files = Tally[Owner]()
        for target in gone_through:
            files[target.identity.owner] += len(target.libraries)
        for owner, number in files.items():
            self._looks.spend(owner, seconds * number / max(files.total(), 1))

    def _places(self, users: Iterable[Target]) -> tuple[dict[_Place, _Uses], Tally[int]]:
        """Files that are mapped and have no probes, or in which processes they have none, and who maps them; of each
        process how many were left out, since its owner has too many."""
        probed: dict[FileKey, set[int | None]] = {}
        for attachment in self.attached:
            probed.setdefault(attachment.library.key, set()).add(attachment.pid)
        places: dict[_Place, _Uses] = {}
        left_out, waiting = Tally[int](), _Waiting()
        shared_by = {each.library.key: each for each in self.attached if each.pid is None}
        nobody, seen = set[int | None](), itertools.count()
        first: dict[FileKey, int] = {}
        for target in users:
            owner = target.identity.owner
            for library in target.libraries:
                key, pid = library.key, None
                if (shared := self._shared.get(key)) is False:
                    pid, pids = target.pid, probed.get(key, nobody)
                    first.setdefault(key, next(seen))
                    if pid in pids or (not pids and key in self._twins):
                        continue
                elif shared and (key in probed or key in self._twins):
                    if (each := shared_by.get(self._twins.get(key, key))) is not None and owner not in each.owners:
                        self._session.probes.mapped_by(each, each.owners | {owner})
                    continue
                # One of which it is not decided counts as one for all.
                if (uses := places.get((key, pid))) is not None:
                    uses.append((library, target))
                elif waiting.has_room(owner):
                    places[key, pid] = [(library, target)]
                    first.setdefault(key, next(seen))
                else:
                    left_out[target.pid] += 1
        return {place: places[place] for place in sorted(places, key=lambda place: first[place[0]])}, left_out

    def _has_twin(self, key: FileKey, uses: list[tuple[Library, Target]]) -> bool:
        """Whether probes stand in a file already, by another name: two overlays may show one file below them, whose
        device /proc/PID/maps distinguishes from Linux 6.8 on."""
        if key in self._twins:
            return True
        library = uses[0][0]
        # All of its users: one alone could make its own memory look so.
        pids = [target.pid for _, target in uses if target.alive()]
        if not pids or not library.file.on_overlay:
            return False
        for other in self.attached:
            alike = other.pid is None and other.library.file.on_overlay and other.library.stamp == library.stamp
            if alike and all(self._session.probes.stands_in(other, library, pid) for pid in pids):
                self._twins[key] = other.library.key
                return True
        return False

    def _attach_one(self, place: _Place, uses: _Uses, running: bool) -> None:
        """Attaches to a file by the path of the first of its users that still runs and whose owner may have more."""
        now = time.monotonic()
        missing = self._missing.get(place)
        if place in self._attaching.under_way or (missing is not None and missing.rests(uses, now)):
            return
        key, pid = place
        if key not in self._shared:
            return
        missing = missing or _Missing(now)
        if self._refused.issuperset(target.identity.owner for _, target in uses):
            self._wait(place, missing, now)
            return
        by_owner: dict[Owner, tuple[Library, Target]] = {}
        for library, target in uses:
            # Of one that has ended the file can still be probed, and nobody would call it.
            if target.identity.owner not in by_owner and target.alive():
                by_owner[target.identity.owner] = library, target
        if not by_owner:
            ended = [target.pid for _, target in uses if target.pid in self.named]
            if not running and ended:
                which = ", ".join(map(str, ended))
                raise ArgusError(f"process {which} ended before it could be probed", "", EXIT_UNAVAILABLE)
            return
        owner = self._on_whose_account(by_owner)
        # By another name it may be a file that is probed right now: it shows once that is done.
        users = {target.identity.owner[0] for _, target in uses}
        twin = uses[0][0].file.on_overlay and self._attaching.is_at(key[2:], users, now - missing.since)
        missing.held |= twin
        if owner is None or twin:
            self._wait(place, missing, now, turn=owner is None)
            return
        if missing.held and now - missing.since >= MISSED_S:
            self._count_late(missing, uses)
        if not any(each.library.key == key for each in self.attached) and self._has_twin(key, uses):
            self._missing.pop(place, None)
            return
        self._missing[place] = missing
        missing.tries(uses, now)
        # Where Python's own function for backward passes is probed, the engine's would report each begin twice.
        named = all(target.has(TORCH_PYTHON) for _, target in uses)
        without = ("backward_begin",) if named else ()
        timed = any(self._timed(target.pid) for _, target in uses)
        probes, use = self._session.probes, by_owner[owner]
        # For whom the file may be read: it, then one of each owner.
        mapped = (use[0], *(each for each, _ in by_owner.values()), *(each for each, _ in uses))
        others = list({id(each): each for each in mapped}.values())[1:]
        # In a thread of its own: the kernel reads the file's pages, which may never come.
        work = partial(
            probes.attach, use[0], pid, without=without, timed=timed, owner=owner, users=[*by_owner], others=others
        )
        if self._attaching.go(place, work, use):
            self._adopt(place)

    def _on_whose_account(self, by_owner: Mapping[Owner, tuple[Library, Target]]) -> Owner | None:
        """Whose turn a file takes, of all who map it, and whose room for links; None: nobody's yet. Where one may have
        no more links, another may; where nobody may, it is tried, and refused."""
        has_turn = list(filter(self._attaching.may, by_owner))
        self._refused |= set() if has_turn else by_owner.keys()
        (library, _), *_ = by_owner.values()
        with_room = self._session.probes.placement.links.who_has(library, by_owner)
        able = [owner for owner in has_turn if owner in with_room] if with_room else has_turn
        return able[0] if able else None

    def _count_late(self, missing: _Missing, uses: _Uses) -> None:
        """Counts probes that waited for those of another file, once for each process."""
        pids = {target.pid for _, target in uses}
        if new := pids - missing.counted:
            self._session.losses.count("attach_failed", *map(self._session.whom, sorted(new)))
        missing.counted |= pids

    def _wait(self, place: _Place, missing: _Missing, now: float, *, turn: bool = True) -> None:
        """A file has its turn later. ``turn``: since its owners have had theirs."""
        self._missing[place] = missing
        missing.again_at = now + LATER_S
        missing.waited |= turn

    def _adopt_attached(self) -> None:
        """Takes over probes on files that came meanwhile."""
        for place in self._attaching.ended():
            self._adopt(place)

    def _adopt(self, place: _Place) -> None:
        """Takes over what has become of probes on a file."""
        key, pid = place
        use = self._attaching.under_way[place].use
        self._changed = True
        try:
            attachment = self._attaching.take(place)
        except Exception as failure:  # what fails for a file costs that file
            if (missing := self._missing.get(place)) is None:
                return
            if use is not None and not use[1].alive():  # by which it was opened; others may map it
                missing.again_at = time.monotonic() + LATER_S
                return
            what = f"{use[0].shown_path if use else 'a file'} cannot be probed ({type(failure).__name__}: {failure})"
            why = failure if isinstance(failure, ArgusError) else ArgusError(what[:300], "", EXIT_UNAVAILABLE)
            if missing.why is None:
                self._session.note(why.message)
            missing.refused(why, time.monotonic())
            return
        if (missing := self._missing.pop(place, None)) is not None and pid is None:
            attachment.mapped_by(missing.owners)
        # It may have been released meanwhile, and been decided anew: both at once would record every call twice.
        if self._shared.setdefault(key, pid is None) is not (pid is None):
            self._session.probes.release([attachment])
            return
        self.attached.append(attachment)
        # What is probed at all may have changed meanwhile.
        self._late_probes.settle(self._session.probes, attachment)

    def _count_missed(self, there: AbstractSet[int]) -> None:
        """Counts probes that processes never had which have ended. ``there``: those that have not."""
        now = time.monotonic()
        for missing in self._missing.values():
            ended = missing.whom.keys() - there
            if (missing.waited or now - missing.since >= MISSED_S) and (missed := ended - missing.counted):
                self._session.losses.count("attach_failed", *(missing.whom[pid] for pid in sorted(missed)))
            for pid in ended:
                del missing.whom[pid]

    def _count_missing(self, places: Mapping[_Place, _Uses], resting: AbstractSet[int]) -> None:
        """Counts files that the kernel refuses, or that have not had their probes for ``ATTACH_S``, as a loss of those
        who map them. Sets when to go on. ``resting``: processes that were not gone through this time."""
        now = time.monotonic()
        whom = lru_cache(None)(self._session.whom)
        for place, missing in self._missing.items():
            if (uses := places.get(place)) is None:
                continue  # of those who are not gone through this time
            under_way = place in self._attaching.under_way
            pids = {target.pid for _, target in uses}
            others = missing.whom.keys() & resting
            missing.whom = {pid: missing.whom[pid] for pid in others} | {pid: whom(pid) for pid in pids}
            late = now - missing.since >= ATTACH_S
            if late and under_way and not missing.counted:
                library = uses[0][0]
                self._session.note(f"{library.shown_path} cannot be probed yet: its file system does not answer")
            due_at = math.inf
            if late or missing.why is not None:
                if new := pids - missing.counted:
                    self._session.losses.count("attach_failed", *map(whom, sorted(new)))
                missing.counted = pids | (missing.counted & resting)
            elif under_way:
                due_at = missing.since + ATTACH_S
            if not under_way:
                due_at = min(due_at, missing.again_at)
            for owner in {target.identity.owner for _, target in uses}:
                self._due_at[owner] = min(self._due_at[owner], due_at)

    def _count_left_out(self, left_out: Mapping[int, int], there: AbstractSet[int]) -> None:
        """Counts files that were left out: once each, however long that lasts. ``there``: processes that run."""
        for pid, number in left_out.items():
            if (more := number - self._left_out.get(pid, 0)) > 0:
                self._session.losses.count("files_over_share", self._session.whom(pid), number=more)
                self._left_out[pid] = number
        if not self._left_out.keys() <= there:
            self._left_out = {pid: number for pid, number in self._left_out.items() if pid in there}

    def due(self) -> bool:
        """Whether ``attach`` has something to do, though no process has mapped anything: probes have come, or a file's
        turn has, and its owner has time. Goes on with files that did not answer while their probes were changed."""
        if self._late_probes.under_way or any(not each.answers for each in self.attached):
            self._late_probes.go_on(self._session.probes)
        looking = self._elsewhere.looking
        if looking is not None and looking.wait(0):
            return True
        self._fill([*self._due_at])
        now = time.monotonic()
        due = {self._attaching.under_way[place].owner for place in self._attaching.ended()}
        due |= {owner for owner, at in self._due_at.items() if now >= at}
        return any(map(self._looks.may, due))

    def of(self, target: Target) -> list[Attachment]:
        """Probes on the files that a process maps."""
        keys = {self._twins.get(library.key, library.key) for library in target.libraries}
        return [a for a in self.attached if a.library.key in keys and a.pid in (None, target.pid)]

    def count_probes(self, members: Iterable[Member]) -> None:
        """Notes how many probes stand in the files that each rank maps; later, where its owner has no time left."""
        probes = Tally[_Place]()
        for attachment in self.attached:
            probes[attachment.library.key, attachment.pid] += attachment.probes
        for member in members:
            target = member.target
            owner = target.identity.owner
            if not self._looks.may(owner):
                self._due_at[owner] = 0.0
                continue
            with self._looks.spending(owner):
                keys = {self._twins.get(library.key, library.key) for library in target.libraries}
                member.probes = sum(probes[key, None] + probes[key, target.pid] for key in keys)

    def was_used(self, target: Target) -> None:
        """A process that mapped these files has ended: they are the last to lose their probes."""
        for library in target.libraries:
            if library.key in self._shared:
                self._unused.pop(library.key, None)
                self._unused[library.key] = None

    def release(self, users: Sequence[Target]) -> None:
        """Takes the probes off files that no traced process maps any more, but for the newest ``KEPT_FILES``.

        Args:
            users: Processes that are there.
        """
        files: dict[Owner, set[FileKey]] = {}
        for target in users:
            files.setdefault(target.identity.owner, set()).update(library.key for library in target.libraries)
        owners: dict[FileKey, list[int]] = {each.library.key: [] for each in self.attached if each.pid is None}
        for number, keys in enumerate(files.values()):
            keys.update([self._twins[key] for key in keys & self._twins.keys()])
            for key in keys & owners.keys():
                owners[key].append(number)
        used, all_owners = set[FileKey]().union(*files.values()), [*files]
        # Most files are mapped by the same ones.
        sets = {numbers: the_same(frozenset(all_owners[n] for n in numbers)) for numbers in map(tuple, owners.values())}
        there = {target.pid for target in users}
        for key in used:
            self._unused.pop(key, None)
        for key in self._shared.keys() - used:
            self._unused.setdefault(key)
        for each in self.attached:
            each.unused = each.pid is None and each.library.key in self._unused
            if each.pid is None:
                self._session.probes.mapped_by(each, sets[tuple(owners[each.library.key])])
        old = set(itertools.islice(self._unused, max(len(self._unused) - KEPT_FILES, 0)))
        gone = [each for each in self.attached if each.library.key in old or each.pid not in (None, *there)]
        for key in old:
            del self._unused[key], self._shared[key]
        if old:
            self._twins = {key: of for key, of in self._twins.items() if key not in old and of not in old}
        if gone:
            self.released += len(gone)
            released = set(map(id, gone))
            self.attached = [each for each in self.attached if id(each) not in released]
            self._session.probes.release(gone)
        self._users.retain(users, self.attached, self._twins)
