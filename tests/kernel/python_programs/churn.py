"""Code that lives for a moment, so that the next has its address; and who ran when: ``churn.py LOG``.

``LOG.churn_lines``, ``LOG.churn_same`` and ``LOG.phases`` are diaries (announce.Diary): generations of code, phases.
"""

import sys

from announce import STARTED, Diary, announce, say, start

sys.setswitchinterval(0.0007)

SOURCE = """
def leaf_{0}(n):
    total = 0
    for i in range(n):
        total += i
    return total
def top_{0}(n):
    return leaf_{0}(n) + 1
top_{0}(900)
"""


def churn_lines():  # depth 2
    diary = Diary(sys.argv[1] + ".churn_lines", 1 << 25)
    generation = 0
    while True:
        generation += 1
        diary.note(generation)  # -> Diary.note
        text = "\n" * (generation % 40) + SOURCE.format(f"{generation:06d}")
        code = compile(text, f"<churn {generation:06d}>", "exec")
        exec(code, {})
        del code, text


def churn_same():  # depth 2
    diary = Diary(sys.argv[1] + ".churn_same", 1 << 25)
    generation = 0
    while True:
        generation += 1
        diary.note(generation)  # -> Diary.note
        exec(compile(SOURCE.format(f"{generation:06d}"), f"<churn {generation:06d}>", "exec"), {})


def phases():  # depth 2
    diary = Diary(sys.argv[1] + ".phases", 1 << 25)
    number = 0
    while True:
        number = (number + 1) % 4
        diary.note(number)  # -> Diary.note
        PHASES[number](3)  # -> phase_0 phase_1 phase_2 phase_3


def phase_0(n):  # depth 3-6
    if n:
        phase_0(n - 1)  # -> phase_0
    else:
        burn()  # -> burn


def phase_1(n):  # depth 3-6
    if n:
        phase_1(n - 1)  # -> phase_1
    else:
        burn()  # -> burn


def phase_2(n):  # depth 3-6
    if n:
        phase_2(n - 1)  # -> phase_2
    else:
        burn()  # -> burn


def phase_3(n):  # depth 3-6
    if n:
        phase_3(n - 1)  # -> phase_3
    else:
        burn()  # -> burn


def burn():  # depth 7
    total = 0
    for i in range(3000):
        total += i


PHASES = [phase_0, phase_1, phase_2, phase_3]


if __name__ == "__main__":
    announce("main:phases")  # -> announce
    start("churn_lines", churn_lines)  # -> start
    start("churn_same", churn_same)  # -> start
    say("ready", len(STARTED) + 1)  # -> say
    phases()  # -> phases
