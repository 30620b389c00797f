"""Shows a built view on the terminal, as ``argus trace`` does, until it is to end.

    live_screen.py [fail|interrupt]

Ends by itself with "q"; "x" raises an error where ``fail`` is given.
"""

from __future__ import annotations

import sys

from rich.console import Console

from argus.cli.live import Scene, frame
from argus.cli.screen import Screen, is_possible, stdin_fd
from tests.builders.live_views import a_view, degraded

console = Console()
if not is_possible(console):
    print("plain lines")
    raise SystemExit
scene = Scene()
view, standings = a_view(ranks=16, slow=11), degraded(11)
drawn = 0
with Screen(console, stdin_fd()) as screen:
    stopping: list[int] = []
    while not scene.quit:
        screen.draw(frame(view, standings, scene, *screen.size))
        drawn += 1
        for key in screen.keys(0.2, stopping):
            if key == "x" and "fail" in sys.argv:
                raise RuntimeError("a defect amid the picture")
            scene.press(key, screen.size[1])
print(f"the end after {min(drawn, 1)}")
