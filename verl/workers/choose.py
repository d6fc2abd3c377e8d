"""In this process or on a cluster: which controller a configuration asks for."""

from __future__ import annotations

import importlib.util
from typing import Any

from verl.config.devices import ray_address
from verl.errors import UserError
from verl.platform.network import check_reachable
from verl.tracking.hooks import RunHooks
from verl.workers.roles import Roles


def wants_ray(config: Any) -> bool:
    """True for more than one device, and where a cluster's address is given."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    many = trainer.nnodes * trainer.n_gpus_per_node > 1 or rollout.nnodes > 0
    return many or bool(ray_address(config))


def check_cluster(config: Any) -> None:
    """UserError if a cluster's address was given and nobody listens there; Ray itself would try for five minutes."""
    address = ray_address(config)
    try:
        check_reachable(address)
    except ConnectionError as error:
        raise no_cluster(address, error) from error


def no_cluster(address: str, error: Exception) -> UserError:
    """What to say when a cluster does not answer."""
    return UserError(
        f"no Ray cluster answers at {address} (RAY_ADDRESS or ray_kwargs.ray_init.address): {error}. Start one "
        "with examples/ray_start.sh, or unset the address to use this machine alone"
    )


def build_roles(config: Any, tokenizer: Any, total_steps: int, report: RunHooks) -> Roles:
    """The roles of a run, wherever they belong. UserError for what cannot be had."""
    if not wants_ray(config):
        from verl.workers.local import build_roles as local

        return local(config, tokenizer, total_steps)
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "more than one device, or a cluster's address, needs Ray, which is not installed here: "
            "pip install 'verl[ray]', or set trainer.nnodes=1 trainer.n_gpus_per_node=1 and unset RAY_ADDRESS"
        )
    from verl.workers.ray import build_roles as remote

    return remote(config, tokenizer, total_steps, report)
