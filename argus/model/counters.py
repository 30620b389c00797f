"""Loss counters in words: what was lost, and what to do about it, for summaries and coverage lines."""

from __future__ import annotations

import re
from collections.abc import Mapping

_STARVED = "a busy node may starve Argus of CPU"
_REPORT = "please report it"
_BUDGET = "--max-overhead raises the budget"

SENTENCES = {
    "launches_dropped": "{n} CUDA call[s] lost: their ring was full (--buffer-mb makes it larger)",
    "collectives_dropped": f"{{n}} NCCL call[s] lost: their ring was full; {_REPORT}",
    "control_dropped": "{n} kernel name[s] or communicator[s] lost: their ring was full (attach after `import torch`)",
    "marks_dropped": f"{{n}} range[s] of PyTorch or NVTX lost: {_STARVED}",
    "math_dropped": f"{{n}} matrix product[s] lost: {_STARVED}",
    "pending_full": "{n} call[s] without a duration: too many calls were under way",
    "exit_missed": "{n} call[s] without a duration: their return was not seen",
    "read_fault": "{n} call[s] with an argument that could not be read",
    "layout_unknown": "{n} call[s] of PyTorch without sizes: [its|their] process's libraries had not been read yet",
    "seq_full": "{n} collective[s] without a number: too many communicators",
    "init_all_cut": "{n} communicator[s] beyond the first 16 of one ncclCommInitAll",
    "launches_ring_discarded": f"{{n}} CUDA call[s] discarded by the kernel; {_REPORT}",
    "collectives_ring_discarded": f"{{n}} NCCL call[s] discarded by the kernel; {_REPORT}",
    "control_ring_discarded": f"{{n}} record[s] of names or communicators discarded by the kernel; {_REPORT}",
    "marks_ring_discarded": f"{{n}} range[s] discarded by the kernel; {_REPORT}",
    "math_ring_discarded": f"{{n}} matrix product[s] discarded by the kernel; {_REPORT}",
    "calls_before_follow": "{n} call[s] of children made before they were followed",
    "processes_probed_late": "{n} process[es] probed after [its|their] first calls",
    "records_without_rank": "{n} record[s] of processes that ended before their rank was known",
    "fork_events_missed": "{n} fork[s] missed: the kernel dropped the events",
    "follow_failed": "{n} child process[es] could not be followed",
    "attach_failed": "{n} librar[y|ies] could not be probed",
    "mapped_files_unread": "{n} mapped file[s] not searched for functions: too many new ones at once",
    "batches_in_part": "{n} batch[es] of rows stored in part and sent again: some rows may be there twice",
    "batches_rolled_up_twice": "{n} batch[es] counted twice in the rollups (`iterations` is right)",
    "spill_files_damaged": "{n} file[s] of waiting rows [was|were] damaged",
    "spill_files_refused": "{n} file[s] of waiting rows refused by the store",
    "math_probes_detached": f"matrix products not observed for some of the time, since it cost too much ({_BUDGET})",
    "gpu_ops_without_rank": "{n} GPU operation[s] of processes that ended before their rank was known",
    "gpu_ops_of_no_device": f"{{n}} GPU operation[s] of devices that no node has; {_REPORT}",
    "gpu_ops_over_share": "{n} GPU record[s] in no second or step: too many of [its|their] process or user waited",
    "gpu_steps_late": "{n} step[s] without GPU times: [it|they] came when those of [its|their] process were stored",
    "gpu_launches_unanswered": "{n} launch[es] whose GPU times were lost when [its|their] process was killed",
    "gpu_processes_missed": "{n} armed process[es] ended before GPU times were on",
    "cupti_buffers_refused": "{n} buffer[s] of GPU times refused: all were full",
    "cupti_records_dropped": "{n} GPU time[s] dropped by CUPTI",
    "cupti_bytes_unknown": f"{{n}} byte[s] of GPU times could not be read; {_REPORT}, with CUPTI's version",
    "cupti_kinds_refused": "{n} kind[s] of GPU times refused by CUPTI",
    "cupti_names_lost": "{n} kernel name[s] lost: no room",
    "cupti_interruptions": "GPU times were off {n} time[s], since Argus did not answer",
    "cupti_records_unfinished": "{n} kernel[s] without times: still running at the end",
    "cupti_rejected_start_zero": "{n} GPU time[s] rejected: without a start",
    "cupti_rejected_end_before_start": "{n} GPU time[s] rejected: the end before the start",
    "cupti_rejected_impossible_time": "{n} GPU time[s] rejected: impossible",
    "cupti_rejected_bad_offset": f"{{n}} GPU record[s] rejected: malformed; {_REPORT}",
    "cupti_rejected_unknown_kind": f"{{n}} GPU record[s] rejected: of an unknown kind; {_REPORT}",
    "stack_samples_dropped": f"{{n}} stack sample[s] lost ({_STARVED})",
    "stack_pauses_dropped": "{n} garbage collection[s] lost: their ring was full",
    "stack_threads_full": "{n} sample[s] or switch[es] of threads that are not followed: there are more than 32,768",
    "stack_threads_over_share": "{n} sample[s] or switch[es] of threads that are not followed: [its|their] process has "
    "more than 4,096, or its user more than its share",
    "lines_unreadable": "{n} line[s] of a log could not be read",
    "records_over_budget": "{n} record[s] not taken: [its|their] process wrote more than its share",
    "records_over_share": "{n} record[s] not taken: the processes of one user or container wrote more than their share",
    "pending_over_share": "{n} call[s] without a duration: [its|their] process or user had too many under way",
    "seq_over_share": "{n} collective[s] without a number: [its|their] process or user has too many communicators",
    "file_slots_full": "{n} librar[y|ies] whose probes may cost more: [its|their] user's or container's share of slots "
    "for files is used up",
    "instructions_unread": "instructions of {n} librar[y|ies] not read: [its|their] probes may cost more",
    "processes_ignored": "{n} process[es] ignored: [it|they] took more than [its|their] share from other jobs",
    "processes_changed_owner": "{n} process[es] no longer traced: [it runs|they run] as another user now",
    "stack_samples_over_share": "{n} stack sample[s] of one user or container without a stack: too many were new",
    "stack_rows_over_share": "{n} stack sample[s] or wait[s] of one user or container not counted: more than its share",
    "stack_processes_of_others": "{n} process[es] that ranks started not sampled: [it runs|they run] as another user",
    "stack_samples_without_stack": "{n} stack sample[s] without a stack",
    "stacks_without_rank": "{n} stack[s] of processes that ended before their rank was known",
    "stack_samples_without_rank": "{n} stack sample[s] of processes that ended before their rank was known",
    "kernels_durations_rejected": "{n} kernel duration[s] rejected: impossible",
    "range_probes_detached": "PyTorch's ranges not observed for some of the time, since it cost too much: "
    f"no phases then ({_BUDGET})",
    "nvtx_probes_detached": "NVTX's ranges not observed for some of the time, since it cost too much: "
    f"no phases then ({_BUDGET})",
    "launch_probes_detached": f"launches not observed for some of the time, since it cost too much ({_BUDGET})",
    "collective_probes_detached": "collectives counted in windows and not stored, since they cost too much "
    f"({_BUDGET})",
    "call_probes_detached": "copies, allocations or waits for the GPU observed in windows, since they cost too much "
    f"({_BUDGET})",
    "gpu_times_failed": "GPU times of {n} rank[s] failed: see the features",
    "ranges_not_probed": "PyTorch's marks could not be probed: the kernel refused the program (`argus check`)",
    "nvtx_not_probed": "NVTX's ranges could not be probed: the kernel refused the program (`argus check`)",
    "backward_not_probed": "backward passes could not be probed: the kernel refused the program (`argus check`)",
    "math_not_probed": "matrix products could not be probed: the kernel refused the program (`argus check`)",
    "stacks_not_sampled": "stacks could not be sampled (`argus check`)",
    "off_cpu_not_followed": "time off the CPU could not be followed: no waits, no data loading, no locks "
    "(`argus check`)",
    "forks_not_followed": "forks could not be followed: children are found up to 5 s late",
    "thread_ends_not_followed": "ends of threads could not be followed",
    "execs_not_followed": "executed programs could not be followed: they are found up to 5 s late",
    "python_stacks_not_read": "Python stacks of {n} process[es] could not be read: the stacks are native ones",
    "waits_not_followed": f"waits not observed for some of the time, since it cost too much ({_BUDGET})",
    "processes_quarantined": f"{{n}} process[es] left alone: what [it holds|they hold] could not be read; {_REPORT}",
    "turns_failed": f"{{n}} turn[s] of a part of Argus failed: what came of [it|them] is missing; {_REPORT}",
    "job_turns_failed": f"{{n}} turn[s] of a job could not be worked on; {_REPORT}",
    "detectors_failed": f"{{n}} part[s] of the diagnosis failed: what [it looks|they look] for is unknown; {_REPORT}",
    "look_ups_over_share": "{n} look-up[s] left out: processes of one user or container had more than their share",
    "calls_over_share": "{n} call[s] left out: those of one user or container took more time than their share",
    "communicators_over_share": "the last alignment of a job's communicators was left out: its owner's jobs take long",
    "groups_over_share": "{n} process group[s] of PyTorch that became [another|others] while in use: [its|their] "
    "process or user has too many",
    "last_steps_over_share": "the last steps of a job were left out: its owner's jobs take long",
    "environments_over_share": "the environment of {n} rank[s] not read: too many were new when [it|they] "
    "or the trace ended",
    "step_calls_over_share": "{n} call[s] in no step: ranks of one user or container had too many that were in none",
    "processes_over_share": "{n} new process[es] of one user or container not traced, or late: they came too fast",
    "files_over_share": "{n} file[s] not probed, or late: too many of one user or container had no probes yet",
    "rows_over_share": "{n} row[s] not taken: those of one user or container took more than their share",
    "rows_too_large": f"{{n}} row[s] left out: together they took more memory than all others may; {_REPORT}",
    "file_systems_hung": "{n} file system[s] under traced processes did not answer: code of [its|their] files has no "
    "names",
    "memory_hung": "the memory of {n} process[es] did not answer: [it has|they have] no Python stacks",
    "processes_unreadable": f"{{n}} process[es] not read: [it|they] exceeded the reader's limits; {_REPORT}",
    "reads_over_budget": "{n} time[s] that a process was not read: it, or others of its user, had taken more than "
    "a share of the time, or left readers hanging",
    "relief_failed": f"{{n}} time[s] that records could not be read while Argus was busy; {_REPORT}",
    "python_lists_cut": "{n} list[s] of Python's threads not followed to the end: some threads have no Python stacks",
    "rows_contradicting": "{n} row[s] of a log left out: [its|their] rank and step had another row, with other times",
    "mappings_cut": "mappings of {n} process[es] not read to the end: some files are not searched for functions",
    "files_refused": "symbols of {n} mapped file[s] not read, or not all: larger than any library's, or damaged",
    "cupti_libraries_refused": "{n} CUPTI librar[y|ies] not loaded for GPU times: other users may change "
    "[it|them], or a folder above",
    "trace_cut_off": "the trace was cut off: what it lost is not known",
}
"""Counter → sentence: ``{n}`` is its value, ``[s]`` is left out of one, ``[a|b]`` is ``a`` for one and ``b`` else."""
_FAMILIES = {"rows_dropped_": "{n} row[s] of the table {rest} lost: the store did not take [it|them]"}


def describe(name: str, value: int) -> str:
    """A counter in words; one without a sentence by its name."""
    sentence, rest = SENTENCES.get(name, ""), ""
    for prefix, of_family in _FAMILIES.items():
        if not sentence and name.startswith(prefix):
            sentence, rest = of_family, name.removeprefix(prefix)
    if not sentence:
        return f"{name} {value:,}"
    return numbered(sentence, value).replace("{rest}", rest)


def numbered(sentence: str, value: int) -> str:
    """A sentence with its number, in the singular or the plural, as :data:`SENTENCES` writes them."""

    def choose(match: re.Match[str]) -> str:
        one, _, many = match[1].rpartition("|")
        return one if value == 1 else many

    return re.sub(r"\[([^]]*)\]", choose, sentence).replace("{n}", f"{value:,}")


def describe_all(lost: Mapping[str, int]) -> str:
    """All counters in words, in order of their names."""
    return "; ".join(describe(name, value) for name, value in sorted(lost.items()))
