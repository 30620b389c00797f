"""Where the ``argus`` command begins: Ctrl-C is answered before anything else is imported."""

from . import interrupt

interrupt.quit_at_once()


def main() -> int:
    """Runs ``argus`` with the process's own arguments and returns its exit code."""
    from .main import main as run

    return run()
