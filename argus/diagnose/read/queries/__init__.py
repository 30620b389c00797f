"""The queries behind a verdict, by name; each file has those of one subject."""

# ruff: noqa: F403 (a hundred names, each defined once: a list of them would only be out of date)
from __future__ import annotations

from argus.diagnose.read.queries.arrivals import *
from argus.diagnose.read.queries.breakdown import *
from argus.diagnose.read.queries.clocks import *
from argus.diagnose.read.queries.dumps import *
from argus.diagnose.read.queries.gpus import *
from argus.diagnose.read.queries.hangs import *
from argus.diagnose.read.queries.paths import *
from argus.diagnose.read.queries.phases import *
from argus.diagnose.read.queries.recordings import *
from argus.diagnose.read.queries.runs import *
from argus.diagnose.read.queries.steps import *
from argus.diagnose.read.queries.threads import *
from argus.diagnose.read.queries.traces import *
from argus.diagnose.read.queries.transfers import *
