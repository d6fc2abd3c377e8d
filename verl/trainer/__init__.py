"""The commands that train, sample and score, and the loops behind them.

While Python looks for the module of `python -m verl.trainer.…` (only then does sys.argv have this form), an interrupt
ends the command without a traceback; a run handles signals itself.
"""

import os
import sys
from pathlib import Path

if getattr(sys.modules["verl"], "__file__", None) is None:
    # A folder `verl` where the command was started, such as a clone, hides an editable installation of the package.
    _root = str(Path(__file__).resolve().parents[2])
    sys.path.append(_root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _root)))
    del sys.modules["verl"]

from verl import interrupt

if sys.argv[:1] == ["-m"]:
    interrupt.ends_the_process()
