"""What a real PyTorch attends to, read in its tensors: against the sizes that the program has, and by definition."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter as Tally
from pathlib import Path

import numpy as np
import pytest

from argus.capture.probes import Probes
from argus.capture.process.targets import find_libraries
from argus.model.calls import CALLS, Shape
from argus.model.records import LOSS_COUNTERS
from argus.model.records import Counter as Kernel
from argus.semantics.gpu.flops import launched_by
from argus.semantics.gpu.products import Products

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="pip install torch (ARGUS_WITH_TORCH=1)"),
]

PROGRAM = Path(__file__).with_name("programs") / "attention.py"
ATTENTION = {call.id for call in CALLS if call.shape is Shape.ATTENTION}
TIMES, IN_IT = 37, 1
DENSE = "aten::_scaled_dot_product_"
SAME, MIXED, STRIDED = "1 x 2 x 16 x 16 x 8 causal", "2 x 4 x 16 x 32 x 8 causal", "3 x 2 x 24 x 24 x 8"
MIXED_PAIRS, STRIDED_FLOPS = 2 * 4 * 16 * 32, 4 * 3 * 2 * 24 * 24 * 8
MIXED_FORWARD, MIXED_BACKWARD = MIXED_PAIRS * (8 + 16), MIXED_PAIRS * (3 * 8 + 2 * 16)
EXPECTED = {
    (f"{DENSE}flash_attention_for_cpu", "float", SAME): 4 * 2 * 16 * 16 * 8 / 2,
    (f"{DENSE}flash_attention_for_cpu_backward", "float", SAME): 2.5 * 4 * 2 * 16 * 16 * 8 / 2,
    (f"{DENSE}flash_attention_for_cpu", "half", STRIDED): STRIDED_FLOPS,
    (f"{DENSE}flash_attention", "bfloat16", MIXED): MIXED_FORWARD,
    (f"{DENSE}flash_attention_backward", "bfloat16", MIXED): MIXED_BACKWARD,
    (f"{DENSE}flash_attention", "half", STRIDED): STRIDED_FLOPS,
    (f"{DENSE}efficient_attention", "bfloat16", MIXED.removesuffix(" causal")): 2 * MIXED_FORWARD,
    (f"{DENSE}efficient_attention_backward", "bfloat16", MIXED.removesuffix(" causal")): 2 * MIXED_BACKWARD,
    (f"{DENSE}efficient_attention", "half", f"{STRIDED} causal"): STRIDED_FLOPS / 2,
    (f"{DENSE}cudnn_attention", "bfloat16", MIXED): MIXED_FORWARD,
    (f"{DENSE}cudnn_attention_backward", "bfloat16", MIXED): MIXED_BACKWARD,
}
"""Operations of each that ``programs/attention.py`` does once a time."""


def test_calls_operations_and_kernels_are_the_program_s(fakegpu: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, str(PROGRAM), str(TIMES), str(fakegpu)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdin is not None
    assert program.stdout is not None
    probes = Probes()
    try:
        assert program.stdout.readline() == "ready\n"
        probes.add_target(program.pid)
        libraries = find_libraries(program.pid)
        probes.layouts.set(program.pid, {each.key: each.layout for each in libraries if each.layout})
        for library in libraries:
            prices = probes.attach(library, program.pid).prices
            assert all(price < probes.prices.cheap for call, price in prices.items() if call in ATTENTION)
        assert probes.attach_optional("math") == 0
        program.stdin.write("\n")
        program.stdin.flush()
        # The newest call of a thread is reported when it has ended.
        assert program.wait(60) == 0
        found, launches = probes.math.drain(), probes.launches.drain()
        counters = probes.counters()
    finally:
        probes.close()
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()
    products = Products()
    works = products.take(found)
    calls = Tally(products.texts[text] for text in works["text"].tolist())
    assert calls == {("attention", *key): TIMES for key in EXPECTED}
    flops = {products.texts[text][1:]: flops for text, flops in zip(works["text"], works["flops"], strict=True)}
    assert flops == EXPECTED
    assert products.unknown == 0
    # The kernel that an operator launches is its, the next one is not.
    launches = launches[launches["grid"][:, 0] > 0]
    kernels = np.zeros(len(launches), [("launch_ns", "<i8"), ("launch_tid", "<u4")])
    kernels["launch_ns"], kernels["launch_tid"] = launches["ts_ns"], launches["tid"]
    owner = launched_by(works, kernels)
    assert ((owner >= 0) == (launches["grid"][:, 0] == IN_IT)).all()
    assert Tally(products.texts[works["text"][place]] for place in owner[owner >= 0].tolist()) == {
        ("attention", *key): TIMES for key in EXPECTED if "for_cpu" not in key[0]
    }
    assert not {counter: value for counter, value in counters.items() if value and counter in LOSS_COUNTERS}
    assert counters[Kernel.NESTED] == 0
