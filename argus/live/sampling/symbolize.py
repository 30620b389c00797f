"""From the kernel's raw stacks to stacks of named functions and lines, while the code is still there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from argus.capture.blocked import assemble
from argus.capture.reader.remote import RemoteResolver, RemoteSymbols
from argus.capture.sampler import Drained, RawStack
from argus.live.sampling.dictionary import StackDictionary
from argus.live.sampling.process import SampledProcess
from argus.live.sampling.processes import SampledProcesses
from argus.live.sampling.programs import StackPrograms
from argus.live.session import Session
from argus.model.losses import Owner

DOUBTS = 8
"""So often the chain of frame pointers at a place must be found wrong, and never right, before the kernel leaves it out
there. What it holds then differs each time, and every sample would be a new stack."""
_BELIEVED = -1 << 40


class Symbolizer:
    """Names stacks as they are fetched, and lets the kernel know what it may leave out of them.

    Args:
        programs: What takes the stacks.
        processes: Whose they are.
        dictionary: Where they go.
        session: The trace: ``stacks_without_rank`` is counted there.
    """

    def __init__(
        self, programs: StackPrograms, processes: SampledProcesses, dictionary: StackDictionary, session: Session
    ) -> None:
        self._programs = programs
        self._processes = processes
        self._dictionary = dictionary
        self._session = session

    def feed(self, drained: Drained, asked_for: Callable[[], Mapping[Owner, Sequence[int]]] = dict) -> None:
        """Adds code objects and stacks that are new to the dictionary.

        Args:
            drained: What was fetched.
            asked_for: Of owners, the kernel's numbers of stacks that rows to come have (``Waits.asked_for``).
        """
        if full := self._dictionary.full(len(self._processes.by_pid)):
            self._begin_dictionary(full, self._processes.by_pid.values(), asked_for())
        for pid, record in drained.codes:
            process = self._processes.by_pid.get(pid)
            if process is not None and process.resolver is not None and not process.quarantined:
                process.resolver.learn(record)
        for raw in drained.stacks:
            pid = int(raw.head["pid"])
            process = self._processes.by_pid.get(pid)
            if not self._session.may_look_up(pid):
                continue  # its samples have no stack, and are counted
            with (
                self._processes.guard(pid, process.job if process is not None else None),
                self._session.looking_up(pid),
            ):
                self._symbolize(process, raw)

    def _begin_dictionary(
        self,
        full: Collection[Owner],
        processes: Collection[SampledProcess],
        asked_for: Mapping[Owner, Sequence[int]],
    ) -> None:
        """Begins the stacks of these owners anew."""
        for owner in full:
            self._dictionary.begin_anew(owner, asked_for.get(owner, ()))
        for process in processes:
            if process.job.owner in full:
                process.asleep.clear()
                if not process.ended:
                    self._processes.renumber(process)
        self._dictionary.forget_gone({process.job.owner for process in processes})

    def _symbolize(self, process: SampledProcess | None, raw: RawStack) -> None:
        if process is None:
            pid = int(raw.head["pid"])
            self._session.losses.count("stacks_without_rank", self._session.whom(pid))
            return
        if process.quarantined or not self._dictionary.has_room(process.job.owner):
            return  # its samples have no stack, and are counted
        flags = int(raw.head["flags"])
        if isinstance(process.symbols, RemoteSymbols):
            stack = process.symbols.assemble(raw.frames, raw.native, flags)
        else:
            assert not isinstance(process.resolver, RemoteResolver)
            stack = assemble(process.symbols, process.resolver, raw.frames, raw.native, flags)
        if len(raw.native):
            self._place(process, int(raw.native[0]))
        if len(raw.native) > 1:
            self._doubt(process, int(raw.native[0]), stack.native == "complete")
        self._dictionary.add(int(raw.head["stack"]), stack, process.job.owner)

    def _place(self, process: SampledProcess, leaf: int) -> None:
        """Lets the kernel know the function that a thread was in, so that it takes all of it for one place."""
        if leaf in process.placed or process.ended:
            return
        process.placed.add(leaf)
        function = process.symbols.function(leaf)
        if function is None or (function[0] in process.placed and function[0] != leaf):
            return
        process.placed.add(function[0])
        self._programs.probes.set_function(process.pid, *function, near=leaf)

    def _doubt(self, process: SampledProcess, leaf: int, believed: bool) -> None:
        """Lets the kernel know the places whose chains of frame pointers are worth nothing."""
        process.doubts[leaf] = _BELIEVED if believed else process.doubts[leaf] + 1
        if process.doubts[leaf] == DOUBTS and not process.ended:
            self._programs.probes.set_leaf_only(process.pid, leaf)
