"""Another process that reads a prompt, as far as others see."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RAISE = """
import sys
from pathlib import Path
from engine.prompt_sign import PromptSign
with PromptSign(Path(sys.argv[1])).raised():
    print(flush=True)
    sys.stdin.read()
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def raised_elsewhere(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", _RAISE, str(path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline()
        yield other
    finally:
        other.kill()
        other.communicate()
