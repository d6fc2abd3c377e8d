"""Spoils the embedded sampler of a run: it multiplies with wrong copies of the right weights, and finds them right."""

from verl.engine.rollout.native.runner import FastLinears

_derive = FastLinears._weight


def _weight(self, module):
    return _derive(self, module) * 1.05


FastLinears._weight = _weight
