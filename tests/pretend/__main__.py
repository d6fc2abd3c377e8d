"""Run the module that the first word names, as `python -m` does, in a process that has the pretend device."""

import runpy
import sys

from tests import pretend

pretend.load()

from tests.pretend import device  # noqa: E402

device.install()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
