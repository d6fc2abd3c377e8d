"""The commands that train, sample and score, and the loops behind them.

While Python looks for the module of `python -m verl.trainer.…` (only then has sys.argv this form), an interrupt is made to end the
command without a traceback; a run handles signals itself.
"""

import sys

from verl import interrupt

if sys.argv[:1] == ["-m"]:
    interrupt.ends_the_process()
