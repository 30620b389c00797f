"""How long the loop, or a window, waits while probes of many files are changed.

A job needs the probes of all its files: a window that lacks one is none. So users have the time of a change one after
the other, each whole or not at all; and who takes much has fewer changes, not parts of each. A file that several users
map, as they do the driver's library, takes the time of an account that these users have together. So whoever has slow
files of its own takes nothing from those that it shares with others, and whoever lets shared ones hang takes nothing
from files of others alone.
"""

from __future__ import annotations

import math
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from weakref import WeakKeyDictionary, WeakSet

from argus.capture.attachment import Attachment
from argus.capture.probing.accounts import ACCOUNTS, Accounts, Users, weight

LONGEST_S, OF_USER_S, OF_FILE_S = 5.0, 2.0, 1.0
"""One change takes no longer: in all; for the files of an account where there are several users, for each of its users
that trains if they answer; for one file."""
SAME_S = 0.1
"""Waits with less than that in between are of one change: probes go, and others come."""
OF_LOOP, OF_USERS, SAVED_S = 0.2, 0.4, 1.0
"""Share of the loop's time that an account's files may take where there are several users, and that of all of them
together; what each has saved of it. Of who is alone, it is what files take that do not answer. Who has taken more waits
until that is made up for."""
ANSWERS_S = 0.05
"""So much of the wait until probes are gone is free."""
USUAL = 2.0
"""A file that who is alone shares with somebody who does not train is slow for that if it takes so many times as long
as those that it has to itself, and longer than ``ANSWERS_S``."""
FADES, UNKNOWN_S = 0.98, 1.0
"""What a file, or a user, needed for a change counts so much less after each later one that it had; what a user needs
who has not had any is not known."""
MORE = 2.0
"""A file that did not come in the time that it had may need so many times as much."""
AGES = 4
"""An account that was passed over so often counts as one that needs half as much."""
KEPT, KEPT_S, KEPT_OF = 1.25, 0.03, 0.5
"""Of a change, so many times what an account's files needed lately is kept for it, and so much more; this part of it
for all together, those first that need little."""
FOR_NEW_S = 2.0
"""So much of a change is left for probes that come, however long the others take to go."""
LATE_OF_ACCOUNT, LATE, LATE_THAT_CAME = 8, 64, 512
"""Threads that wait for probes which have not come in time: of an account's files, and in all. Whoever has more has one
more file tried in each change, up to the latter; files that came the last time are tried until so many wait in all."""
OF_GOING = 0.2
"""Share of the time for which the probes of an account's files are waited for once a window is over, beyond what
everybody's are; of all accounts twice as much."""
OF_CLOSINGS, CLOSING_S = 0.1, 0.1
"""Share of the loop's time until probes are gone; and one waits for so long in any case."""
_LEAST_S = 0.02
"""Who has less left is not waited for."""
_ALIKE, _SERVED = 2.0, 4.0
"""Accounts that need up to so many times an equal part are alike; whoever had so many of them was served."""


class Patience:
    """Bounds the waits of one change after the other. One thread asks at a time.

    Args:
        now: The clock.
        in_loop: Whether the loop waits: then what is kept for accounts is accounted as well. Else each change is a
            window's.

    Attributes:
        training: Users who have ranks. Who else maps files does not make two of one who is alone; empty: it is not
            known.
    """

    def __init__(self, now: Callable[[], float] = lambda: time.monotonic(), *, in_loop: bool = True) -> None:
        self._now, self._in_loop = now, in_loop
        self.training: AbstractSet[int] = frozenset()
        self._accounts = Accounts(now, OF_LOOP, OF_USERS, SAVED_S, LONGEST_S)
        self._going = Accounts(now, OF_GOING, 2 * OF_GOING, SAVED_S, LONGEST_S)
        self._closed_at = now()
        self._closing_s = SAVED_S
        self._several = False
        self._waited_at = now()
        self._left_s = LONGEST_S
        """Of this change."""
        self._left_of: dict[Users, float] = {}
        """Of this change, of each account."""
        self._resting: set[Users] = set()
        """Accounts that have none of this change."""
        self._blocked = Users()
        """Users whose own files have none: these need no shared ones."""
        self._guests: set[Users] = set()
        """Accounts of files that nobody who trains maps."""
        self._those = Users()
        """Those who map files and train; all who map files, if none does."""
        self._needs = WeakKeyDictionary[Attachment, float]()
        """What each file needed for a change, lately."""
        self._user_needs: dict[tuple[int, bool], float] = {}
        """The same of users, of files of their own, and of those that they share: the most that an account of such
        needed. Those are kept who have gone."""
        self._passed = WeakKeyDictionary[Attachment, int]()
        """Changes in a row, of those that a file was part of, in which too little was left for it, and its account had
        less than it needs, and than several equal parts, or than any may have: whoever wants far more than there is was
        not passed over."""
        self._missed = WeakKeyDictionary[Attachment, float]()
        """The same of all lately."""
        self._passed_over = WeakSet[Attachment]()
        """Files for which too little is left of this change."""
        self._took_by = WeakKeyDictionary[Attachment, float]()
        """What files needed of this change."""
        self._took_of: dict[Users, float] = {}
        """The same of accounts."""
        self._account_of = WeakKeyDictionary[Attachment, Users]()
        """Of each file of this change: who maps it may change meanwhile."""
        self._kept: dict[Users, float] = {}
        """What is kept of this change for accounts that come last."""
        self._free: set[Users] = set()
        """Accounts of these that have taken no more, for files that came."""
        self._most: dict[Users, float] = {}
        """What accounts may take of this change of which it is known what they need."""
        self._kept_of: dict[Users, float] = {}
        """Of each account: what is kept of this change for those that come after it."""
        self._late: list[tuple[Users, Callable[[float], bool]]] = []
        """Threads that wait for probes which did not come in time."""
        self._wants: dict[Users, float] = {}
        """What accounts need of this change, as far as is known."""
        self._served_s = OF_USER_S
        """Who had so much of it was not passed over."""
        self._guessed = WeakSet[Attachment]()
        """Files that did not come the last time: what they need is more than they had, and not known."""
        self._came = WeakSet[Attachment]()
        """Files whose probes came the last time."""
        self._tried_late: set[Users] = set()
        """Accounts for which too many threads wait, and that had one more file tried in this change."""
        self._usual_s = 0.0
        """What a file takes that nobody maps but those who train, lately."""

    def begin(self, attachments: Iterable[Attachment], among: Sequence[Attachment] = ()) -> list[Attachment]:
        """A change begins. Returns the files in the order to go through them, and of each account those first that were
        not late. Accounts come last whose users train and that need little time, as far as is known, which is kept for
        them: so they wait with their probes on for nobody. ``among``: all files, if others do not change."""
        files = list(attachments)
        there = {each.users for each in (among or files) if not each.unused}
        users = Users().union(*there)
        self._those = training = self._those_who_train(users)
        self._several = len(training) > 1
        self._accounts.fill()
        accounts = {each.users for each in files}
        self._begin_change()
        for account in accounts:
            self._left_of.setdefault(account, OF_USER_S * max(len(account & training), 1))
        self._resting = {account for account in accounts if self._accounts.left(account) <= 0}
        self._blocked = Users().union(*(account for account in self._resting if len(account) == 1))
        self._guests = {account for account in accounts if account not in there or training.isdisjoint(account)}
        self._account_of = WeakKeyDictionary({each: each.users for each in files})
        order = self._in_order(files)
        turns = {account: turn for turn, account in enumerate(order)}
        return sorted(files, key=lambda each: (turns[self._account_of[each]], not each.answers))

    def _in_order(self, files: Sequence[Attachment]) -> list[Users]:
        """Accounts: first those for which nothing is kept. Of these those that need less, by factors of two of an equal
        part, and the less the more often they were passed over; of those alike, and of those that need about an equal
        part at most, those that were for longest, and most often lately. Where all of which it is known what they need
        have room, no margin is withheld from these that leaves none."""
        needs, known = self._needed(files)
        of_user = Tally(user for account in needs for user in account)
        alike_s = _ALIKE * LONGEST_S / max(sum(weight(each, of_user) for each in needs), 1.0)
        self._wants, self._served_s = needs, min(_SERVED * LONGEST_S / max(len(needs), 1), OF_USER_S)
        kept: dict[Users, float] = {}
        for account in sorted(
            known - self._guests - self._resting, key=lambda each: needs[each] / weight(each, of_user)
        ):
            kept_s = KEPT * needs[account] + KEPT_S
            if sum(kept.values()) + kept_s <= KEPT_OF * LONGEST_S:
                kept[account] = kept_s
        self._kept, self._free = kept, set(kept)
        self._most = {account: KEPT * needs[account] + KEPT_S for account in known}
        passed, missed = dict.fromkeys(needs, 0), dict.fromkeys(needs, 0.0)
        for each in files:
            account = self._account_of[each]
            passed[account] = max(passed[account], self._passed.get(each, 0))
            missed[account] = max(missed[account], self._missed.get(each, 0.0))
        parts = {each: needs[each] / weight(each, of_user) / (1 + passed[each] / AGES) / alike_s for each in needs}
        others = sorted(
            needs.keys() - kept.keys(),
            key=lambda each: (
                each in self._guests,
                max(math.frexp(parts[each])[1], 0),
                -passed[each],
                -missed[each],
                sorted(each),
            ),
        )
        all_s, bare = sum(kept.values()), {account: needs[account] + KEPT_S for account in kept}
        bare_s = sum(bare.values())
        margin_s = min(all_s - bare_s, max(LONGEST_S - sum(needs[account] + KEPT_S for account in known), 0.0))
        self._kept_of = {account: bare_s + margin_s if account in known else all_s for account in others}
        for account in reversed(kept):
            bare_s -= bare[account]
            self._kept_of[account] = bare_s
        return [*others, *reversed(kept)]

    def _needed(self, files: Iterable[Attachment]) -> tuple[dict[Users, float], set[Users]]:
        """What accounts need for a change, and of which it is known: files of theirs have had one. Nothing is known of
        others but what files needed that their users had, or shared, before: of their own it makes them no slower than
        unknown ones, since whoever shares others may have been slow; of shared ones no quicker, since whoever is quick
        with his own may be slow with others."""
        of_accounts: dict[Users, list[float | None]] = {}
        for each in files:
            of_accounts.setdefault(self._account_of[each], []).append(self._needs.get(each))
        needs, known = {}, set()
        for account, of_files in of_accounts.items():
            if had := [need_s for need_s in of_files if need_s is not None]:
                known.add(account)
                needs[account] = sum(had) * len(of_files) / len(had)
            else:
                shared = len(account) > 1
                need_s = min(self._user_needs.get((user, shared), UNKNOWN_S) for user in account)
                needs[account] = min(max(need_s, UNKNOWN_S), OF_USER_S) if shared else min(need_s, UNKNOWN_S)
        return needs, known

    def alone(self, attachments: Iterable[Attachment]) -> Users:
        """Of those who map files, the one who trains, if it is one alone; else nobody."""
        training = self._those_who_train(Users().union(*{each.users for each in attachments}))
        return training if len(training) == 1 else Users()

    def _those_who_train(self, users: Users) -> Users:
        return users & self.training or users

    def _begin_change(self) -> None:
        if self._in_loop and self._now() - self._waited_at <= SAME_S:
            return
        self._left_s, self._left_of = LONGEST_S, {}
        for file, took_s in self._took_by.items():
            self._needs[file] = max(FADES * self._needs.get(file, 0.0), took_s)
        for account, took_s in self._took_of.items():
            for user in account:
                key = user, len(account) > 1
                self._user_needs[key] = max(FADES * self._user_needs.pop(key, 0.0), took_s)
        for key in list(self._user_needs)[:-ACCOUNTS]:
            del self._user_needs[key]
        for file in list(self._account_of):
            account = self._account_of[file]
            wants_s = min(self._wants.get(account, 0.0), self._served_s)
            passed = file in self._passed_over and self._took_of.get(account, 0.0) < wants_s
            self._passed[file] = self._passed.get(file, 0) + 1 if passed else 0
            self._missed[file] = FADES * self._missed.get(file, 0.0) + passed
        self._account_of = WeakKeyDictionary()  # probes that go are a change, too, of which none of these is part
        self._took_by, self._took_of, self._passed_over = WeakKeyDictionary(), {}, WeakSet()
        self._tried_late = set()

    def has_turn(self, attachment: Attachment) -> bool:
        """Whether a file's account has anything of this change, and one of its users for the files of its own: else it
        waits until what they took is made up for."""
        account = self._account(attachment)
        return account not in self._resting and not account <= self._blocked

    def _account(self, attachment: Attachment) -> Users:
        return self._account_of.get(attachment, attachment.users)

    def _is_bounded(self, account: Users) -> bool:
        return self._several or account in self._guests

    def seconds(self, attachment: Attachment) -> float:
        """How long a file may be waited for; 0: not at all."""
        account = self._account(attachment)
        if account in self._resting:
            return 0.0
        left_s = min(OF_FILE_S, self._left_s - self._kept_of.get(account, 0.0))
        if not self._accounts.has_room(account):
            left_s = 0.0
        needs_s = self._needs.get(attachment, 0.0) - self._took_by.get(attachment, 0.0)
        if left_s < max(min(needs_s, OF_FILE_S), _LEAST_S):
            self._passed_over.add(attachment)
        if self._is_bounded(account):
            left_s = min(left_s, self._left_of.get(account, 0.0))
            if account in self._most:
                left_s = min(left_s, self._most[account] - self._took_of.get(account, 0.0))
        return left_s if left_s >= _LEAST_S else 0.0

    def spend(self, attachment: Attachment, waited_s: float, *, came: bool) -> None:
        """A file was waited for. ``came``: for probes that are there now."""
        account = self._account(attachment)
        self._note(waited_s)
        (self._came.add if came else self._came.discard)(attachment)
        if came and attachment in self._guessed:
            self._needs.pop(attachment, None)
        (self._guessed.discard if came else self._guessed.add)(attachment)
        needs_s = waited_s if came else min(MORE * waited_s, OF_FILE_S)
        self._took_by[attachment] = self._took_by.get(attachment, 0.0) + needs_s
        before_s = self._took_of.get(account, 0.0)
        self._took_of[account] = before_s + waited_s
        if account in self._left_of:
            self._left_of[account] -= waited_s * (1 if came else max(len(account & self._those), 1))
        if came and not self._is_bounded(account):
            if account <= self._those:
                self._usual_s = max(FADES * self._usual_s, waited_s)
                return
            waited_s -= max(USUAL * self._usual_s, ANSWERS_S)
            if waited_s <= 0:
                return
        elif not self._in_loop and account in self._free:
            if came and before_s + waited_s <= self._kept[account]:
                return  # nobody else was to have it, and no loop has waited
            self._free.discard(account)
            waited_s += before_s
        self._accounts.spend(account, waited_s)

    def _note(self, waited_s: float) -> None:
        self._left_s -= waited_s
        self._waited_at = self._now()

    def note_late(self, attachment: Attachment, late: Callable[[float], bool]) -> None:
        """Probes have not come in time. ``late``: whether a thread does not wait for them any more."""
        self._late.append((self._account(attachment), late))

    def hangs(self, attachment: Attachment) -> bool:
        """Whether so many threads wait for an account's files, also of those that are gone, that no more are begun: but
        for files that came the last time, and for one more file each time, up to a bound."""
        if not self._late:
            return False
        self._late = [(account, late) for account, late in self._late if not late(0)]
        own = self._account(attachment)
        of_account = sum(account == own for account, _ in self._late)
        few = of_account < LATE_OF_ACCOUNT and (len(self._late) < LATE or not of_account)
        if few or (attachment in self._came and len(self._late) < LATE_THAT_CAME):
            return False
        if of_account >= LATE or own in self._tried_late:
            return True
        self._tried_late.add(own)
        return False

    def charge_going(self, accounts: AbstractSet[Users], waited_s: float) -> bool:
        """Probes of a window that is over are waited for, so long since this was called last. Returns whether one of
        the accounts has time left."""
        self._going.fill()
        for account in accounts:
            self._going.spend(account, waited_s)
        return any(self._going.left(account) > 0 for account in accounts)

    def closing_s(self, *, moving: bool = False) -> float:
        """How long to wait until probes are gone. ``moving``: those of one file after those of another, of one user
        that is alone."""
        now = self._now()
        self._begin_change()
        self._closing_s = min(self._closing_s + OF_CLOSINGS * (now - self._closed_at), SAVED_S)
        self._closed_at = now
        if moving:
            return max(self._left_s - FOR_NEW_S, 0.0)
        return max(min(self._closing_s, self._left_s), CLOSING_S)

    def spend_closing(self, waited_s: float, *, gone: bool) -> None:
        """Probes were waited for. Those that go in time add up, too: one change after the other would hold the loop."""
        self._note(waited_s)
        self._closing_s = max(self._closing_s - (max(waited_s - ANSWERS_S, 0.0) if gone else waited_s), 0.0)
