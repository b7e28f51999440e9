"""Many independent jobs at once, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import joblib

from ...errors import ConfigError

_J = TypeVar("_J")
_R = TypeVar("_R")

#: fewer jobs than this take longer to hand out than to do
_FEW = 16


def map_in_parallel(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str | None = None) -> list[_R]:
    """Results of `call` for each job, in their order.

    Args:
        cluster: None: processes on this machine, where there are many jobs; `ray`: the Ray cluster that this machine belongs
            to; `ray://HOST:PORT`: another; `tcp://HOST:PORT`: the scheduler of a Dask cluster.

    Raises:
        ConfigError: the cluster cannot be reached, or its package is not installed.
    """
    if cluster is None:
        if len(jobs) < _FEW:
            return [call(job) for job in jobs]
        return _run(call, jobs)
    try:
        if cluster.partition(":")[0] == "ray":
            return _on_ray(call, jobs, cluster)
        if "://" in cluster:
            return _on_dask(call, jobs, cluster)
    except (ImportError, OSError, ConnectionError, RuntimeError) as error:
        raise ConfigError(f"the cluster {cluster} cannot be used: {type(error).__name__}: {error}") from None
    raise ConfigError(f"cluster is {cluster!r}; use ray, ray://HOST:PORT, or tcp://HOST:PORT for Dask")


def _run(call: Callable[[_J], _R], jobs: Sequence[_J]) -> list[_R]:
    results: list[_R] = joblib.Parallel(n_jobs=-1)(joblib.delayed(call)(job) for job in jobs)
    return results


def _on_ray(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str) -> list[_R]:
    import ray
    from ray.util.joblib import register_ray

    if not ray.is_initialized():
        ray.init(cluster if cluster != "ray" else None, log_to_driver=False)
    register_ray()
    with joblib.parallel_config("ray"):
        return _run(call, jobs)


def _on_dask(call: Callable[[_J], _R], jobs: Sequence[_J], cluster: str) -> list[_R]:
    from distributed import Client

    with Client(cluster) as client, joblib.parallel_config("dask", client=client):
        return _run(call, jobs)
