"""What each kind of finding means, for people: ``argus explain``, the man pages and the table of docs/diagnose.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """One kind of finding, or one verdict.

    Attributes:
        name: As in the contract (``verdict.FINDING_KINDS``).
        means: What is going on, in a sentence.
        detected: By which measurement, and from what size on.
        evidence: A line of evidence as a report has it.
        do: What to do next.
        owner: Who has to act: one of :data:`OWNERS`.
    """

    name: str
    means: str
    detected: str
    evidence: str
    do: str
    owner: str


OWNERS = {
    "infrastructure": "GPUs, links and hosts",
    "platform": "launchers, CPUs, storage, NCCL's settings",
    "data": "data loading and batches",
    "model": "training code and parallel layout",
}
"""Who has to act on a finding, and what they own."""

EXPLANATIONS = (
    Explanation(
        "compute_straggler",
        "A rank's GPU, or on CPUs the rank's own computing, is slow, and the others wait for it in every step.",
        "The rank comes last to collectives in 60 % of the newest steps, at a cost of 5 % of the step (--threshold), "
        "and its CPU does not explain it; with GPU times, its kernels take 8 % longer than those of ranks with the "
        "same work.",
        "kernels of its GPU compute for 40.3 ms in backward against 20.0 ms (2.01x) a step",
        "Check clocks, temperature and ECC of that GPU (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,ECC), and move "
        "the rank. On CPUs: argus export svg --rank R --diff rank=others -o diff.svg shows what it does more of.",
        "infrastructure",
    ),
    Explanation(
        "masked_compute_straggler",
        "A GPU is slow, but pipeline bubbles or other work hide it: no step is longer yet, and no slack is left.",
        "GPU times show the excess of a compute_straggler, below the threshold of what it costs the step.",
        "its GPU computes for 61.2 ms a step, the others of its stage 55.0 ms; the step does not wait for it yet",
        "Plan to move the rank or check its GPU: the next change of the batch or the layout may make it cost time.",
        "infrastructure",
    ),
    Explanation(
        "link_degradation",
        "A network, NVLink or PCIe connection is slow: the collectives over it take longer, also where computing hides "
        "that, or a rank's copies between host and GPU.",
        "Times of the rank that comes last to a collective, which waits for nobody, are 20 % above those of like "
        "communicators, or above the first steps. Copies of as many bytes as the others' take half of the lateness.",
        "AllReduce of 25.2 MB in communicator dp takes 3.12 ms, in others 1.21 ms",
        "Run NVIDIA's nccl-tests between the nodes that the action names; look at argus health report and link errors. "
        "Copies: the PCIe link's width and speed, the process's NUMA node, pinned memory.",
        "infrastructure",
    ),
    Explanation(
        "pipeline_bubble",
        "Pipeline stages wait for one another more than the number of micro-batches allows.",
        "GPU times: stages wait for one another as long as with 1.5 micro-batches a stage, or longer.",
        "GPUs wait for other stages for 31 % of the step; with 2 micro-batches on 4 stages 60 % is the least",
        "Use more micro-batches a step, or more model chunks a stage (virtual pipeline).",
        "model",
    ),
    Explanation(
        "stage_imbalance",
        "One pipeline stage has more work than the others, and all wait for it.",
        "All ranks of a stage compute 8 % longer than the median stage, and their kernels are not slower.",
        "stage 3 computes for 58.1 ms a step, the median stage 49.0 ms",
        "Move layers from that stage to the others; first and last stages have the embedding and the loss besides.",
        "model",
    ),
    Explanation(
        "sequence_imbalance",
        "Batches differ in work (longer sequences), another rank's each time, and all wait for the longest.",
        "Forward and backward of the longest batch of a step cost 5.5 % of it (1.7 % in pipelines), and go together.",
        "the longest batch of a step costs 7.31 ms, of another rank each time",
        "Balance batches by tokens instead of by samples: sort or pack sequences by length.",
        "data",
    ),
    Explanation(
        "jit_stall",
        "A rank compiles or loads GPU code in the middle of training, and the others wait.",
        "Its CPU spends half of the lateness or more in loading modules or compiling.",
        "12.4 ms a step more than the others loading or compiling GPU code",
        "Find shapes that change from step to step; share one compile cache on a fast disk; compile before training.",
        "model",
    ),
    Explanation(
        "kernel_issue_stall",
        "A rank's CPU launches kernels too slowly, and its GPU runs dry.",
        "Its CPU spends half of the lateness between launches, or its GPU is idle while issue latencies fall.",
        "its GPU is idle for 9.72 ms a step longer than those with the same work",
        "argus export svg --rank R --diff rank=others shows what its Python does more of; CUDA graphs or larger "
        "kernels take the CPU off the path.",
        "model",
    ),
    Explanation(
        "data_loading",
        "A rank waits for its next batch longer than the others.",
        "Half of the lateness or more lies before the copy of the batch, in PyTorch's data-loading phase, or in copies "
        "of more bytes than the others'.",
        "it spends 24.1 ms a step in data loading, the others 1.23 ms",
        "Look at the line that the evidence names; more or faster data-loader workers; a faster or nearer disk.",
        "data",
    ),
    Explanation(
        "gc_pause",
        "Python's garbage collector stops a rank, at other times than the others.",
        "Stack samples that hit a collecting thread amount to half of the lateness, or of the time lost in long steps.",
        "garbage collection takes 11.8 ms a step, on the others 104 µs: 14 pauses were seen",
        "Call gc.freeze() after set-up, disable automatic collection, and collect on all ranks at the same step.",
        "model",
    ),
    Explanation(
        "host_contention",
        "A rank's threads wait for a free CPU, a disk or memory, since something else on the node uses it.",
        "The kernel's own run-queue or I/O delay of its threads exceeds the others' by half of the lateness.",
        "its busiest thread waits 8.91 ms a step for a free CPU, those of the others 312 µs",
        "Find what else runs on that node (top, argus health -v); pin ranks to CPUs; give data-loader workers fewer "
        "threads.",
        "platform",
    ),
    Explanation(
        "regression",
        "All ranks became slower at a step and stayed so, with no straggler to explain it; or all steps are slower "
        "than those of earlier healthy runs.",
        "Steps became 10 % longer for good (5 % where nearly all GPUs compute longer), and not because of more work; "
        "or they are 2.5 % longer than the baseline, and longer than a new run of it would be expected to be.",
        "a step takes 61.0 ms since step 812, 52.4 ms before (1.16x)",
        "See what changed at that step: batch or sequence length, a checkpoint, other load on the nodes, the network.",
        "model",
    ),
    Explanation(
        "jitter",
        "Now and then a step is far longer, and one rank is behind it more often than chance allows.",
        "Steps over 1.5 times the typical one cost 5 % of the time or more, and are one rank's.",
        "rank 3 was behind 9 of 11 long steps, by chance in 1 of 10,000 jobs",
        "Look at what that rank and its node do then: argus stacks --rank R --steps N, argus health -v.",
        "platform",
    ),
    Explanation(
        "hang",
        "No rank makes progress any more although the processes run.",
        "No call for 20 s (--hang-after) before Argus last looked; a rank's process gone: 5 s.",
        "2 ranks called AllReduce 1032 of their communicator; rank 1 did not come",
        "argus stacks shows which rank is elsewhere, and in which line; argus dump shows it as it is now.",
        "model",
    ),
)
"""Every kind of finding, in the order of ``verdict.FINDING_KINDS``."""

STATUSES = {
    "healthy": "No rank holds up the others, all ranks of the job were seen, and nothing that matters was lost.",
    "degraded": "The job runs slower than it could; each finding names the ranks, since when, and the cost.",
    "hung": "The job makes no progress; the finding names the ranks that are missing from a collective.",
    "inconclusive": "There is too little data for a verdict; the reason names what is missing.",
}
"""What each verdict means."""


def explanation(name: str) -> Explanation | None:
    """The kind of that name, however it is spelled: ``data_loading``, ``data-loading``, ``Data loading``."""
    wanted = name.strip().lower().replace("-", "_").replace(" ", "_")
    return next((one for one in EXPLANATIONS if one.name == wanted), None)
