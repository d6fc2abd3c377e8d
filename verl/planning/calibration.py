"""The constants of the predictions, and what each was fitted to (docs/planning.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants.

    Memory of a training step:
        layer        bytes kept of a token in one layer, relative to 40 a hidden unit, 16 an intermediate one and 24 an
                     attention one, where layers compute in half precision throughout
        routed       copies of a token's hidden state that an expert layer keeps, for each expert that is chosen
        gathered     layers whose gathered weights are there at once, in the compute type
        root         copies of embedding and head, in the compute type
        logit        bytes of one logit where logits are written out

    Time: shares of the peak that products (dense), products of experts (expert) and attention reach; traffic: passes
    over a layer's activations through memory (adapters: more of them, for an adapter); launch: seconds of one layer
    for one micro-batch, whatever its size.

    Sampling (assumed, nothing was measured on a device): the share of the memory's bandwidth that decoding reaches
    (stream), seconds of a layer for a step of decoding (decode).
    """

    layer: float = 0.430
    routed: float = 11.1
    gathered: float = 2.46
    root: float = 2.46
    logit: float = 17.7
    dense: float = 0.335
    expert: float = 0.322
    attention: float = 0.503
    traffic: float = 0.210
    adapters: float = 3.39
    launch: float = 5.1e-4
    stream: float = 0.6
    decode: float = 1e-5


CALIBRATED = Calibration()
HOST = replace(CALIBRATED, dense=0.75, attention=0.4, traffic=2.0, launch=1e-3, decode=5e-4)
"""Of a processor: fitted to this project's own benchmarks."""


def fitted_to(on_host: bool) -> Calibration:
    """The constants of a kind of device."""
    return HOST if on_host else CALIBRATED
