"""Run the module that the first word names, as `python -m` does, in a process that has the pretend device."""

from tests import pretend

pretend.load()

from tests.pretend import device, tensors  # noqa: E402

device.install()
tensors.run_module()
