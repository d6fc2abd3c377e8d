"""A plug-in module (`model.external_lib`) that gives each process of a run the pretend Ascend device."""

from tests import pretend_npu

if not pretend_npu.installed():
    pretend_npu.install()
