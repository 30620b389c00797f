"""Loads the BPF programs, attaches them to functions of libraries, and reads what they count.

Attaching is done here rather than by bcc: bcc reads all of /proc/kallsyms for each tracepoint (50 ms), and makes one
perf event a function and process, and on current kernels taking one away costs about 0.1 s. A multi-uprobe link (Linux
6.6) carries all functions of a file at once and goes away in about 20 ms (``scripts/bench probe``). Older kernels get
perf-event links (Linux 5.15). Both carry a cookie that names the function that was hit, and both vanish with the
process that made them, even if it is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from argus.capture.attachment import Attachment, Subject, subject_of
from argus.capture.call_prices import CallPrices, TrapPrices
from argus.capture.kernel import btf
from argus.capture.kernel.compile import CompileError, compiled
from argus.capture.kernel.links import (
    PATIENCE_S,
    TRACE_UPROBE_MULTI,
    Backend,
    Closing,
    Links,
    link,
)
from argus.capture.kernel.programs import KPROBE, RAW_TRACEPOINT, LoadError, Module, attach_raw_tracepoint
from argus.capture.kernel.ring import HEADER_BYTES, Ring
from argus.capture.owners import Owners
from argus.capture.placement import Placement
from argus.capture.prices import Prices, prices
from argus.capture.probing.patience import Patience
from argus.capture.probing.pulse_probes import PulseLinks, PulseProbes
from argus.capture.probing.windows import NotPutError, Window, by_user, put_in_time, window_points
from argus.capture.process.instructions import code_of, has_probes
from argus.capture.process.targets import CUBLAS, Library
from argus.capture.torch_layouts import TorchLayouts
from argus.capture.under_way import forget, in_progress
from argus.model import calls, records
from argus.model.errors import EXIT_UNAVAILABLE, ArgusError
from argus.model.losses import UNKNOWN, Owner
from argus.model.records import Counter
from argus.system.limits import raise_descriptor_limit
from argus.system.privileges import lacking, needed
from argus.system.resources import resource_dir

SOURCES = ("common.bpf.h", "math.bpf.c", "launches.bpf.c", "collectives.bpf.c", "torch.bpf.c", "forks.bpf.c")
_OPTIONAL_PROGRAMS: Final[dict[str, tuple[Subject, ...]]] = {
    "mark": ("ranges", "backward", "nvtx"),
    "math": ("math",),
}
"""Programs, by the beginnings of their names, without which only these subjects are not probed."""
PROGRAMS: Final = {
    **{f"{name}_{edge}": KPROBE for name in ("cuda", "nccl", "control", "mark", "math") for edge in ("enter", "exit")},
    "torch_enter": KPROBE,
    "thread_exit": RAW_TRACEPOINT,
    "follow_fork": RAW_TRACEPOINT,
}
"""Those of ``SOURCES``: name -> kind."""
_ON_DEMAND = {"follow_fork"}
"""Programs that ``Probes.follow_forks`` loads."""
MINIMUM_KERNEL = (5, 15)
"""First kernel with attach cookies for uprobes (bpf_get_attach_cookie)."""

_COMPARED = 16
"""Probed functions that are looked at to see whether two files are one."""
_ENOTSUPP = 524
"""Of the kernel alone (include/linux/errno.h)."""
_BCC_PAGE = 4096
"""bcc counts a ring's size in these (bpf/include)."""

MARK_RING_BYTES = 4 << 20
"""Room for 30,800 marks: 6 s of the densest job tried, 4 ranks that make 100 steps of 13 marks a second. The start of a
trace may keep its reader busy for 2 s."""
MATH_RING_BYTES = 4 << 20
"""Room for 26,214 products and attentions: a large model makes some 1,000 a step."""
DEFAULT_LAUNCH_RING_BYTES = 16 << 20
"""Room for 209,715 calls: a second of the most a node was seen to make (research: 10^5 launches/min/GPU, 16 GPUs)."""
COLLECTIVE_RING_BYTES = 16 << 20
"""Room for 209,715 collectives: 10 s of 20 ranks that make 20 each in steps of 20 ms, while a trace begins."""
CONTROL_RING_BYTES = 16 << 20
"""Room for 65,536 registrations of kernels: `import torch` makes 40,000 in 0.1 s, maybe before the ring is read."""
RECORDS_S = 100_000
"""Budget of a process for each ring, records a second: several times what a rank makes (10^5 launches a minute; the
densest loop of launches tried, 50,000 a second)."""
BURST, NAMES_BURST = 0.25, 1.0
"""So much of a ring a process may write at once, beyond that: of launches, a quarter second of all of a node; of names
all, as a program registers its kernels at once, and while Argus may be busy attaching."""
SHARED = 0.25
"""So much of a ring may be full, for a process above its budget to write to it."""
SHARES = 16
"""One of so many parts of each map that processes fill is a process's: 4,096 calls under way and as many communicators,
1,024 threads in groups, 512 calls about communicators or names, and of cuBLAS and attention."""


def kernel_version() -> tuple[int, int]:
    """Major and minor version of the running kernel."""
    parts = os.uname().release.split(".")
    digits = "".join(c for c in parts[1] if c.isdigit()) if len(parts) > 1 else "0"
    return int(parts[0]), int(digits or 0)


class TracedProcesses:
    """Which processes' calls are let through: the part of ``Probes`` that is about them.

    Attributes:
        owners: Whose processes share the rings.
        forks: Whether the kernel lets children of traced processes through (``follow_forks``): "on", or why not.
    """

    _module: Module
    placement: Placement
    _trap_prices: TrapPrices
    owners: Owners
    forks = "off: not asked for"
    _at_fork: int | None = None

    @property
    def layouts(self) -> TorchLayouts:
        """How each process's PyTorch is read: to be set before its files are probed."""
        return self.placement.layouts

    def price_without_slots(self, files: Mapping[int, Mapping[int, Attachment]]) -> None:
        """Which files that have no slot of their own each process maps, by their ``id``: what their calls cost it."""
        of_owners: dict[int, dict[int, Attachment]] = {}
        for pid, of_process in files.items():
            if number := self.owners.number(pid):
                of_owners.setdefault(number, {}).update(of_process)
        self._trap_prices.share(of_owners)

    def follow_forks(self) -> None:
        """From now on the kernel lets children of traced processes through before they run: ``add_target`` may come
        later. ``forks`` has why where it does not."""
        try:
            kernel = btf.kernel(btf.VMLINUX)
            for number, field in enumerate(("pid", "tgid")):
                self._module["task_fields"].set(number, kernel.offset("task_struct", field))
            program = self._module.load("follow_fork", PROGRAMS["follow_fork"])
            self._at_fork = attach_raw_tracepoint("sched_process_fork", program)
        except LoadError as failure:
            self.forks = f"failed: {load_failure('load the program follow_fork', failure.log, failure).message}"
        except (OSError, btf.BtfError) as failure:
            self.forks = btf.why_unreadable(btf.VMLINUX, failure)
        else:
            self.forks = "on"

    def _end_follow_forks(self) -> None:
        if self._at_fork is not None:
            os.close(self._at_fork)
            self._at_fork = None

    def target_pids(self) -> list[int]:
        """Processes whose calls are let through, those included that only the kernel has added."""
        keys, _ = self._module["targets"].read()
        return list[int](keys.view(np.uint32).ravel().tolist())

    def is_target(self, pid: int) -> bool:
        """Whether calls of a process are let through."""
        return self._module["targets"].get(pid) is not None

    def add_target(self, pid: int, owner: Owner = UNKNOWN) -> int:
        """Lets calls of a process through.

        Args:
            pid: The process.
            owner: Its user and container, which share the rings with others.

        Returns:
            How many calls of it were seen, and not recorded, before.
        """
        numbers, before = self.owners.add(pid, owner), self._target(pid)
        if self.forks != "on" or before is None:
            self._module["targets"].set(pid, _fresh_target(numbers, before).tobytes())
            if before is not None:
                self.owners.count_rooms()
        strangers = self._module["strangers"]
        missed = strangers.get(pid)
        strangers.delete(pid)
        return int.from_bytes(missed or b"", sys.byteorder)

    def spent(self, pid: int) -> tuple[int, int, int]:
        """Hits of a process's probes since it is traced, records that its budgets had no room for, and what the hits'
        traps cost it, ns."""
        target = self._target(pid)
        if target is None:
            return 0, 0, 0
        return int(target["hits"][0]), int(target["refused"][0]), int(target["trap_ns"][0])

    def spent_of_all(self) -> dict[int, tuple[int, int, int]]:
        """The same of each process that is traced, by its PID."""
        keys, values = self._module["targets"].read()
        counts = (values.view(records.TARGET)[name][:, 0].tolist() for name in ("hits", "refused", "trap_ns"))
        return dict(zip(keys.view("<u4")[:, 0].tolist(), zip(*counts, strict=True), strict=True))

    def over_share(self, pid: int) -> tuple[int, int, int]:
        """What a process was refused: calls that were not remembered until their exits, and collectives that were not
        numbered, since it or its owner had their share of the maps' room; records, since its owner had its share of a
        ring."""
        target = self._target(pid)
        if target is None:
            return 0, 0, 0
        return int(target["pending_refused"][0]), int(target["seq_refused"][0]), int(target["owner_refused"][0])

    def _target(self, pid: int) -> NDArray[np.void] | None:
        value = self._module["targets"].get(pid)
        return None if value is None else np.frombuffer(value, records.TARGET).copy()

    def remove_target(self, pid: int) -> None:
        """Forgets a process that ended: its PID may be another's soon."""
        self.owners.remove(pid)
        target = self._target(pid)
        for name in ("targets", "strangers"):
            self._module[name].delete(pid)
        self.layouts.forget(pid)
        if target is not None and (target["held"].any() or target["ignored"][0]):  # marking may have lost a count
            forget(self._module, pid)
        if target is None or target["granted"].any():  # none: the kernel took it away, its number was given again
            self.owners.count_rooms()


class Counts:
    """What the kernel side counted: the part of ``Probes`` that is about that."""

    _module: Module

    def run_times(self) -> dict[str, tuple[int, int]]:
        """Of each program, by name: ns that it ran, and runs (``Module.run_times``)."""
        return self._module.run_times()

    def counters(self) -> dict[Counter, int]:
        """What the kernel side counted so far, summed over CPUs."""
        table = self._module["counters"]
        return {counter: table.total(counter) for counter in Counter} | {Counter.HITS: int(self._hits().sum())}

    def hits(self) -> NDArray[np.int64]:
        """Calls of each function by traced processes so far, those inside others included: shape (256,), by the call's
        number."""
        return self._hits()[:256]

    def _hits(self) -> NDArray[np.int64]:
        """The same, followed by returns of those whose exits make marks: shape (512,)."""
        table = np.frombuffer(self._module["hits_of"].get(0) or bytes(4096), "<i8").reshape(-1, 512)
        return np.asarray(table.sum(axis=0), np.int64)

    def in_progress(self) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void]]:
        """Calls entered and not returned: (CUDA calls, NCCL calls, about communicators), flagged unfinished."""
        return in_progress(self._module)


class Probes(TracedProcesses, Counts, PulseProbes):
    """The BPF programs and maps of one tracing session.

    Args:
        launch_ring_bytes: Size of the ring of CUDA calls: a power of two.
        launch_durations: Probe the exit of launches too, to see when the launch queue is full.
        backend: Force a way to attach; default: the best the kernel has.

    Raises:
        ArgusError: bcc is missing, the kernel refuses, or permission is lacking.
    """

    def __init__(
        self,
        *,
        launch_ring_bytes: int = DEFAULT_LAUNCH_RING_BYTES,
        launch_durations: bool = False,
        backend: Backend | None = None,
    ) -> None:
        if kernel_version() < MINIMUM_KERNEL:
            raise ArgusError(
                f"Linux {os.uname().release} is too old: uprobes with cookies need 5.15", "", EXIT_UNAVAILABLE
            )
        self.launch_durations = launch_durations
        self.attachments: list[Attachment] = []
        self.unanswered = 0
        """How often probes on files took longer than they are waited for."""
        self.probed: set[Subject] = set(get_args(Subject)) - {"math"}
        """Which subjects are probed."""
        self.entries_only: set[Subject] = set()
        """Of those, subjects whose exits are not probed."""
        self._window: Window | None = None
        self.lacking: list[Attachment] = []
        """Files that lack probes in the last window, if no thread for it could be started."""
        self._pulse: frozenset[int] = frozenset()
        self._pulse_links: dict[int, PulseLinks] = {}
        self.closed = False
        self._lock = threading.Lock()
        """Threads that attach share ``attachments``, links of pulses and ``_closing`` with the loop's."""
        self.refused: dict[str, str] = {}
        """Of the optional subjects, those whose programs the kernel refuses, and why."""
        raise_descriptor_limit()
        self._module = self._compile(launch_ring_bytes)
        self.backend = _load(self._module, backend, self.refused)
        self.probed -= self.refused.keys()
        self.owners = Owners(self._module)
        self._closing: list[Closing] = []
        self._patience, self._window_patience = Patience(), Patience(in_loop=False)
        """How long the loop waits, and a window."""
        self.prices: Prices = prices(self.backend, self._attach_to_self)
        self.placement = Placement(self._module, self.prices, launch_durations=launch_durations, backend=self.backend)
        self._trap_prices = _trap_prices_of(self._module, lambda: self.attachments, self._by_entry)
        self._at_exit = self._attach_at_exit()
        self.launches = Ring(self._module["launches"].fd, launch_ring_bytes, records.LAUNCH)
        self.collectives = Ring(self._module["collectives"].fd, COLLECTIVE_RING_BYTES, records.COLLECTIVE)
        self.control = Ring(self._module["control"].fd, CONTROL_RING_BYTES, records.CONTROL)
        self.marks = Ring(self._module["marks"].fd, MARK_RING_BYTES, records.MARK)
        self.math = Ring(self._module["math"].fd, MATH_RING_BYTES, records.MATH)

    def rings(self) -> dict[str, Ring]:
        """All rings, by name, in the order to drain them in. Control after launches: the name of a kernel that was
        launched is then there as well."""
        return {
            "launches": self.launches,
            "collectives": self.collectives,
            "control": self.control,
            "marks": self.marks,
            "math": self.math,
        }

    def _compile(self, launch_ring_bytes: int) -> Module:
        directory = resource_dir("bpf")
        text = "\n".join((directory / name).read_text() for name in SOURCES)
        return module(text, flags(launch_ring_bytes), "compile the BPF programs")

    def _attach_at_exit(self) -> int:
        try:
            return attach_raw_tracepoint("sched_process_exit", self._module.programs["thread_exit"])
        except OSError as reason:
            raise load_failure("follow the end of threads", "", reason) from reason

    @contextlib.contextmanager
    def _attach_to_self(self, path: str, offsets: list[int], at_exit: bool) -> Iterator[None]:
        """Probes functions of this process, with a program that ends at once: this is no traced process."""
        name = "mark_exit" if at_exit else "mark_enter"
        if name not in self._module.programs:
            raise OSError(errno.ENOENT, f"the kernel has refused the program {name}")
        program = self._module.programs[name]
        points = [(offset, 0) for offset in offsets]
        links = link(self.backend, program, path, points, at_exit, os.getpid())
        try:
            yield
        finally:
            self.let_go([(links, [])])

    # --- probes

    def ignore(self, *pids: int) -> None:
        """Records nothing more of processes. Probes that stand in these alone are taken away, which nobody waits for;
        those of files that others map, too, go on costing their calls the traps into the kernel."""
        for pid in pids:
            target = self._target(pid)
            if target is not None:
                target["ignored"] = 1
                self._module["targets"].set(pid, target.tobytes())
        ignored = set(pids)
        if own := [attachment for attachment in self.attachments if attachment.pid in ignored]:
            self.release(own)

    def attach(
        self,
        library: Library,
        pid: int | None,
        without: Collection[str] = (),
        *,
        timed: bool = True,
        owner: Owner = UNKNOWN,
        users: Iterable[Owner] = (),
        others: Collection[Library] = (),
    ) -> Attachment:
        """Puts a probe on every function of a file that Argus knows.

        Args:
            library: The file.
            pid: Only in this process; None: in every process that maps the file.
            without: Kinds of calls that are left out.
            timed: Whether anybody needs the ends of NCCL's collectives whatever they cost, as GPU times do: kernels
                are those of the call within which they were launched. Else dear ones are left out (``DEAR_EXIT``).
            owner, users: Of processes that map the file: of the slots for files no owner takes all.
            others: The file as other processes map it, for which it is read where it cannot be for that one.

        Raises:
            ArgusError: The kernel refuses. Nothing is left attached.
        """
        attachment = Attachment(library, pid, owner=owner)
        by_program: dict[str, list[tuple[int, int]]] = {}
        try:
            self.placement.choose(attachment, by_program, code_of(library, *others), without, timed, owner, *users)
        except BaseException:
            self.placement.release(attachment)
            self.placement.links.give_back(attachment)
            raise
        attachment.places = _entry_offsets(by_program)
        try:
            for name in _exits_first(by_program):
                links = attachment.exit_links if name.endswith("_exit") else attachment.entry_links
                self._attach_program(attachment, name, by_program[name], links, in_time=False)
            for subject in sorted(self.probed):
                self._attach_optional(attachment, subject, in_time=False)
            self._join(attachment)
        except BaseException as reason:
            self._let_go_of([attachment])
            if not isinstance(reason, OSError):
                raise
            raise _attach_failure(library, pid, reason) from reason
        self.write_prices([attachment])
        return attachment

    def _join(self, attachment: Attachment) -> None:
        """Adds a file with its probes of the pulse: ``set_pulse`` sees it with them, or not at all."""
        while True:
            turn = self.pulse_turn
            links = self.pulse_of(attachment, in_time=False)
            with self._lock:
                if turn == self.pulse_turn and not self.closed:
                    self._pulse_links[id(attachment)] = links
                    self.attachments.append(attachment)
                    return
            self.let_go([(links, [])])
            if self.closed:
                raise OSError(errno.ECANCELED, "the trace has ended")

    def stands_in(self, attachment: Attachment, library: Library, pid: int) -> bool:
        """Whether probes on one file show in another one that a process maps: overlays of several containers show one
        file below them under names, devices and mounts of their own, and the kernel puts probes into that one.

        Args:
            attachment: Of the first file, in all processes that map it.
            library: The other file.
            pid: The process. It could make its own code look so, and would go without probes itself.
        """
        if platform.machine() != "x86_64":
            return False
        places = _probed_places(attachment)[:_COMPARED]
        return has_probes(pid, (library.device, library.inode), places)

    def _attach_program(
        self,
        attachment: Attachment,
        name: str,
        points: list[tuple[int, int]],
        links: list[int],
        *,
        in_time: bool = True,
    ) -> None:
        """Probes functions with a program. ``in_time``: it is waited for a while, and not at all while it is not known
        that the file answers."""
        make = self._making(attachment, name, points)
        if not in_time:
            links += make()
            return
        try:
            links += put_in_time(attachment, make, self._patience)
        except NotPutError as why:
            self.unanswered += why.note()
            raise why.failure from None

    def _making(self, attachment: Attachment, name: str, points: list[tuple[int, int]]) -> Callable[[], list[int]]:
        program, path = self._module.programs[name], attachment.library.open_path
        return partial(link, self.backend, program, path, points, name.endswith("_exit"), attachment.pid)

    def detach(self, attachments: Iterable[Attachment] | None = None) -> None:
        """Takes probes away (all, by default). Returns when they are gone, or after a while (``close_in_time``)."""
        chosen = list(self.attachments if attachments is None else attachments)
        if attachments is None:
            self.end_windows()
        Closing(by_user(self._links_of(*chosen))).wait(PATIENCE_S)
        self._forget(chosen)
        self.placement.release(*chosen)
        self.placement.links.give_back(*chosen)

    def mapped_by(self, attachment: Attachment, owners: frozenset[Owner]) -> None:
        """Takes who maps a file now. If its owner does not any more, it is another one's."""
        if owners is attachment.owners or owners == attachment.owners:
            return
        attachment.mapped_by(owners)
        if owners and attachment.owner not in owners:
            self.placement.links.hand_on(attachment)

    def trains(self, users: Set[int]) -> None:
        """Takes which users have ranks: who else maps files does not count where one may be alone."""
        self._patience.training = self._window_patience.training = users

    def release(self, attachments: Collection[Attachment]) -> None:
        """Takes the probes away from files that no traced process maps any more, without waiting for that."""
        self._forget(attachments)
        self._let_go_of(attachments)

    def _forget(self, attachments: Iterable[Attachment]) -> None:
        """Of a process that is ignored they may be gone already."""
        gone = set(map(id, attachments))
        with self._lock:
            self.attachments = [each for each in self.attachments if id(each) not in gone]

    def _close_soon(self, links: list[tuple[Attachment, Links]]) -> None:
        """Returns when they are closed, or after a while: nothing is put on a file before its links are. Where one user
        alone is traced, it goes on as long as they are closed one after the other."""
        seconds, begun = self._patience.closing_s(), time.monotonic()
        closing = Closing(by_user(links))
        gone = closing.wait(seconds)
        self._patience.spend_closing(time.monotonic() - begun, gone=gone)
        if not gone and (alone := self._patience.alone(self.attachments)):
            seconds, begun = self._patience.closing_s(moving=True), time.monotonic()
            closing.wait_on(seconds, [number for number, (each, _) in enumerate(links) if each.users <= alone])
            self._patience.spend_closing(time.monotonic() - begun, gone=True)
        for number, (attachment, _) in enumerate(links):
            if not closing.closed(number):
                attachment.left_out_until(partial(closing.closed, number))

    def _links_of(self, *attachments: Attachment) -> list[tuple[Attachment, Links]]:
        """The links of attachments, which have none any more."""
        links: list[tuple[Attachment, Links]] = []
        for each in attachments:
            of_file = [(each.entry_links, each.exit_links), *each.optional_links.values()]
            of_file.append((self._pulse_links.pop(id(each), PulseLinks()), []))
            links += [(each, both) for both in of_file if any(both)]
            each.entry_links, each.exit_links, each.optional_links = [], [], {}
        return links

    def attach_optional(self, *subjects: Subject) -> int:
        """Puts the probes of subjects on all files, and on later ones too. Returns how many files refused."""
        chosen = [subject for subject in subjects if subject not in self.refused]
        if not chosen:
            return 0
        self._let_window_go(chosen)
        self.probed.update(chosen)
        refused = 0
        # cuBLAS calls cuBLASLt: where only the latter is probed yet, a product would look like a call of its own.
        files = self._patience.begin(self.attachments)
        for attachment in sorted(files, key=lambda each: CUBLAS[1] in each.library.roles):
            failed = 0
            for subject in chosen:
                try:
                    self._attach_optional(attachment, subject)
                except OSError:  # its process has ended, most likely
                    failed = 1
            refused += failed
        self.write_prices()
        return refused

    def _let_window_go(self, subjects: Iterable[Subject]) -> None:
        """A window that sees one of these ends: its calls would be seen twice. Files whose probes are not gone in time
        are left out until they are."""
        window = self._window
        if window is None or window.subjects.isdisjoint(subjects):
            return
        if not window.gone():
            seconds, begun = self._patience.closing_s(), time.monotonic()
            window.let_go(seconds)
            self._patience.spend_closing(time.monotonic() - begun, gone=not window.there())
        there = window.there()
        for attachment, gone in there:
            attachment.left_out_until(gone)

    def probes_of(self, subject: Subject) -> bool:
        """Whether any function of a subject is probed now."""
        return any(links for each in self.attachments for links in each.optional_links.get(subject, ()))

    def detach_optional(self, *subjects: Subject) -> None:
        """Takes the probes of subjects away, and puts none on later files."""
        self.probed -= set(subjects)
        links = [(each, each.optional_links.pop(s, ([], []))) for each in self.attachments for s in subjects]
        self._close_soon([(each, both) for each, both in links if any(both)])
        self.write_prices()

    def _attach_optional(self, attachment: Attachment, subject: Subject, *, in_time: bool = True) -> None:
        if subject not in attachment.optional_links:
            entries_only = frozenset(self.entries_only)
            attachment.put(subject, self.links_for(attachment, subject, entries_only, in_time), entries_only)

    def links_for(
        self, attachment: Attachment, subject: Subject, entries_only: Collection[Subject], in_time: bool = False
    ) -> tuple[list[int], list[int]]:
        """Links that hold a subject's probes on a file: of entries and of exits. They are the caller's to keep.

        Args:
            entries_only: Subjects whose exits are left out.

        Raises:
            OSError: The kernel refuses, or does not answer. Nothing is left attached.
        """
        points = attachment.optional_points.get(subject, {})
        if subject in entries_only:
            points = attachment.entries_of(subject)
        links: tuple[list[int], list[int]] = ([], [])
        try:
            for name in _exits_first(points):
                self._attach_program(attachment, name, points[name], links[name.endswith("_exit")], in_time=in_time)
        except BaseException:
            self.let_go([links])
            raise
        return links

    def let_go(self, links: list[Links]) -> None:
        """Closes links of one file, on a thread: each close waits for a grace period of the kernel, and nobody needs
        to."""
        self._add_closing(Closing([(frozenset(), both) for both in links]))

    def _let_go_of(self, gone: Collection[Attachment]) -> None:
        """Closes all links of files. Once those of one are closed, what was kept for it is there for others."""
        gone = [attachment for attachment in gone if not attachment.let_go]  # one of a process that is ignored is twice
        for attachment in gone:
            attachment.let_go = True
        links = self._links_of(*gone)
        left = Tally(id(attachment) for attachment, _ in links)

        def closed(number: int) -> None:
            attachment = links[number][0]
            with self._lock:
                left[id(attachment)] -= 1
                if not left[id(attachment)]:
                    free(attachment)

        def free(attachment: Attachment) -> None:
            if not self.closed:  # else the maps are gone
                self.placement.release(attachment)
                self.placement.links.give_back(attachment)

        for attachment in gone:
            if not left[id(attachment)]:
                free(attachment)
        self._add_closing(Closing(by_user(links), closed))

    def _add_closing(self, new: Closing) -> None:
        with self._lock:
            self._closing = [*(closing for closing in self._closing if not closing.wait(0)), new]

    def open_window(
        self, subjects: Iterable[Subject], seconds: float, only: Collection[int] | None = None
    ) -> Window | None:
        """Probes the entries of some subjects' functions for a while, beside the loop: ``settle_window`` once it has
        begun or ended. None: the last window is not over, or no file has functions that are not probed anyway.

        Args:
            subjects: Those that are probed anyway are left out.
            seconds: For how long. They go on a thread of their own.
            only: Numbers of the calls of these subjects that are probed; None: all.

        Raises:
            RuntimeError: No thread can be started. Files that lack their probes in it are in ``lacking``, and counted.
        """
        self.lacking = []
        if self.window_goes:
            return None
        if self._window is not None:
            for attachment, gone in self._window.there():
                attachment.left_out_until(gone)
            self._add_closing(self._window.closing)
            self._window = None
        chosen = frozenset(subjects) - self.probed - self.refused.keys()
        files = list(self.attachments)  # others may come meanwhile
        points_of = {id(each): window_points(each, chosen, self._pulse, only) for each in files}
        concerned = [each for each in files if points_of[id(each)]]
        in_order = [(each, points_of[id(each)]) for each in self._window_patience.begin(concerned, files)]
        if not in_order:
            return None
        try:
            self._window = Window(chosen, in_order, self._put_in_window, seconds, self.hits, only)
        except BaseException:
            self.lacking = [attachment for attachment, _ in in_order]
            for attachment in self.lacking:
                self._count_unanswered(attachment)
            raise
        return self._window

    def _put_in_window(self, attachment: Attachment, name: str, points: list[tuple[int, int]]) -> list[int]:
        if not self._window_patience.has_turn(attachment):
            raise NotPutError(TimeoutError(errno.ETIMEDOUT, "its user has taken much time"), lambda: 0)
        return put_in_time(attachment, self._making(attachment, name, points), self._window_patience)

    def settle_window(self, window: Window) -> None:
        """Takes note of files that lack their probes in a window that has begun, or ended: each is counted, once. To be
        called by the thread that looks after those that were late."""
        if not window.unsettled:
            return
        window.unsettled = False
        window.came = [each for each in self.attachments if window.lacks(each, self._pulse)]
        for attachment, note in window.late:
            before = attachment.unanswered
            self.unanswered += note()
            if attachment.unanswered == before:
                self._count_unanswered(attachment)

    def _count_unanswered(self, attachment: Attachment) -> None:
        attachment.unanswered += 1
        self.unanswered += 1

    @property
    def window_goes(self) -> bool:
        """Whether the last window is not over, or its probes go: none is opened before."""
        return self._window is not None and not self._window.gone()

    def wait_for_window(self) -> None:
        """Another window is due: its last one's probes are waited for at the expense of who maps the files."""
        if self._window is not None:
            self._window.gone(self._window_patience, self._patience.alone(self.attachments))

    # --- prices

    def prices_of(self, attachments: Iterable[Attachment]) -> CallPrices:
        """What calls cost a process that maps these files."""
        return CallPrices.of(attachments, self._by_entry)

    def _by_entry(self, call: int) -> bool:
        """Whether a call's entry alone is probed: so it is, of subjects that are probed in windows, too."""
        kind = subject_of(calls.CALLS[call])
        return kind is not None and (kind not in self.probed or kind in self.entries_only)

    def write_prices(self, new: Sequence[Attachment] | None = None) -> None:
        """Has the kernel know what calls cost, of all files, or of new ones."""
        self._trap_prices.write(new)

    def end_windows(self) -> None:
        """Takes away what is probed in windows, and the pulse."""
        if self._window is not None:
            self._window.close()
            self.settle_window(self._window)
        self.set_pulse(())

    def close(self) -> None:
        """Takes every probe away and frees the maps."""
        with self._lock:
            self.closed = True
        self._end_follow_forks()
        self.detach()
        deadline = time.monotonic() + PATIENCE_S
        for closing in self._closing:
            closing.wait(max(deadline - time.monotonic(), 0.0))
        for ring in self.rings().values():
            ring.close()
        os.close(self._at_exit)
        self._module.close()


def _trap_prices_of(
    module: Module, attachments: Callable[[], Iterable[Attachment]], entries: Callable[[int], bool]
) -> TrapPrices:
    return TrapPrices(module["trap_prices"], module["shared_prices"], attachments, entries)


def _load(module: Module, backend: Backend | None, refused: dict[str, str]) -> Backend:
    """Loads the programs. Returns the way to attach that the kernel has.

    Args:
        backend: Force one.
        refused: Takes the optional subjects whose programs the kernel refuses, and why.

    Raises:
        ArgusError: The kernel refuses one that is needed.
    """
    choices: list[Backend] = [backend] if backend else ["multi", "perf"]
    if backend is None and kernel_version() < (6, 6):
        choices = ["perf"]
    failure: ArgusError | None = None
    for choice in choices:
        expected = TRACE_UPROBE_MULTI if choice == "multi" else 0
        refused.clear()
        try:
            for name, kind in PROGRAMS.items():
                if name in _ON_DEMAND:
                    continue
                try:
                    module.load(name, kind, expected if kind == KPROBE else 0)
                except LoadError as reason:
                    subjects = _OPTIONAL_PROGRAMS.get(name.partition("_")[0], ())
                    if not subjects:
                        raise
                    why = load_failure(f"load the program {name}", reason.log, reason).message
                    refused.update(dict.fromkeys(subjects, why))
            return choice
        except LoadError as reason:
            failure = load_failure("load the BPF programs", reason.log, reason)
            module.unload()
    assert failure is not None
    raise failure


def _fresh_target(numbers: tuple[int, int], before: NDArray[np.void] | None) -> NDArray[np.void]:
    """A process whose owner and user have these numbers. Of what it was before, its entries are still there."""
    target = np.zeros(1, records.TARGET)
    target["owner"], target["user"] = numbers
    if before is not None:
        target["held"], target["granted"] = before["held"], before["granted"]
    return target


def _entry_offsets(by_program: dict[str, list[tuple[int, int]]]) -> list[int]:
    """File offsets of entries."""
    return [offset for name, points in by_program.items() if name.endswith("_enter") for offset, _ in points]


def _probed_places(attachment: Attachment) -> list[int]:
    """File offsets of entries that are probed."""
    optional = attachment.optional_points
    return attachment.places + [
        offset
        for subject, (entries, _) in attachment.optional_links.items()
        for name, points in (optional.get(subject, {}).items() if entries else ())
        if name.endswith("_enter")
        for offset, _ in points
    ]


def flags(launch_ring_bytes: int) -> list[str]:
    """What the programs are compiled with: sizes of rings, budgets, shares."""
    return [
        "-D__BPF__",
        f"-DARGUS_LAUNCH_PAGES={launch_ring_bytes // _BCC_PAGE}",
        f"-DARGUS_COLLECTIVE_PAGES={COLLECTIVE_RING_BYTES // _BCC_PAGE}",
        f"-DARGUS_CONTROL_PAGES={CONTROL_RING_BYTES // _BCC_PAGE}",
        f"-DARGUS_MARK_PAGES={MARK_RING_BYTES // _BCC_PAGE}",
        f"-DARGUS_MATH_PAGES={MATH_RING_BYTES // _BCC_PAGE}",
        f"-DARGUS_SHARES={SHARES}",
        *(f"-D{name}={value}" for name, value in _budgets(launch_ring_bytes).items()),
        "-Wno-address-of-packed-member",
    ]


def _budgets(launch_ring_bytes: int) -> dict[str, str]:
    """What one process may write into each ring, as the programs have it."""
    rings = {
        "LAUNCHES": (launch_ring_bytes, records.LAUNCH, RECORDS_S, BURST),
        "COLLECTIVES": (COLLECTIVE_RING_BYTES, records.COLLECTIVE, RECORDS_S, BURST),
        "CONTROL": (CONTROL_RING_BYTES, records.CONTROL, RECORDS_S, NAMES_BURST),
        "MARKS": (MARK_RING_BYTES, records.MARK, RECORDS_S, BURST),
        "MATH": (MATH_RING_BYTES, records.MATH, RECORDS_S, BURST),
    }
    definitions = {}
    for name, (size, dtype, rate, burst) in rings.items():
        cost_ns = 1_000_000_000 // rate
        definitions[f"ARGUS_{name}_COST_NS"] = f"{cost_ns}ull"
        definitions[f"ARGUS_{name}_BURST_NS"] = f"{int(burst * size / (dtype.itemsize + HEADER_BYTES)) * cost_ns}ull"
        definitions[f"ARGUS_{name}_BYTES"] = f"{size}ull"
        definitions[f"ARGUS_{name}_SHARED_BYTES"] = f"{int(SHARED * size)}"
    return definitions


def _exits_first(programs: Iterable[str]) -> list[str]:
    """The order to attach in: an entry whose exit is not hooked yet would be reported as never finished."""
    return sorted(programs, key=lambda program: not program.endswith("_exit"))


def _attach_failure(library: Library, pid: int | None, reason: OSError) -> ArgusError:
    where = f"{library.path}" + (f" in process {pid}" if pid is not None else "")
    if reason.errno in (errno.EPERM, errno.EACCES):
        return ArgusError(f"no permission to probe {where}", "Run Argus with sudo", EXIT_UNAVAILABLE)
    if reason.errno == errno.ESRCH:
        return ArgusError(f"process {pid} ended while Argus attached to it", "", EXIT_UNAVAILABLE)
    if reason.errno == errno.EMFILE:
        return ArgusError(f"too many descriptors to probe {where}", "Raise the limit: ulimit -n", EXIT_UNAVAILABLE)
    if reason.errno == errno.ENOENT:
        return ArgusError(f"{where} cannot be reached any more", "Its process has ended", EXIT_UNAVAILABLE)
    if reason.errno == errno.EINVAL:
        # Seen with bcc 0.26's own attach_uprobe, which passes a random reference counter offset; dmesg then says
        # "ref_ctr_offset mismatch".
        return ArgusError(
            f"the kernel refuses to probe {where}",
            "Another tracer seems to probe the same functions: end it first",
            EXIT_UNAVAILABLE,
        )
    why = reason.strerror
    if reason.errno == _ENOTSUPP:
        why = "a function begins with an instruction on which no probe can stand"
    return ArgusError(f"the kernel refuses to probe {where}: {why}", "`argus check` says more", EXIT_UNAVAILABLE)


def module(text: str, flags: list[str], what: str) -> Module:
    """Sources as maps in the kernel, and programs that can be loaded.

    Raises:
        ArgusError: They do not compile, the kernel refuses, or permission is lacking.
    """
    try:
        return Module(compiled(text, flags))
    except (CompileError, OSError) as reason:
        raise load_failure(what, str(reason), reason) from reason


def load_failure(what: str, log: str, reason: Exception) -> ArgusError:
    # Whatever it refuses, the verifier ends with what it did. To refuse is EACCES for it too, but then it says why.
    done = ("processed ", "verification time", "stack depth", "insns processed")
    lines = [text for line in log.splitlines() if (text := line.strip()) and not text.startswith(done)]
    refused = getattr(reason, "errno", 0) in (errno.EPERM, errno.EACCES) and not lines
    if refused or "not permitted" in log or lacking():
        return ArgusError(
            f"no permission to {what}",
            f"Run Argus with sudo (or with {', '.join(f'CAP_{name}' for name in needed())})",
            EXIT_UNAVAILABLE,
        )
    message = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else str(reason))
    return ArgusError(f"cannot {what}: {message}", "`argus check` says more", EXIT_UNAVAILABLE)
