"""Run analyses of long records on a Ray or Dask cluster. Each worker processes some of the tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from ...core.threads import limit_cores
from ...errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: seconds to wait for a Dask scheduler
PATIENCE = 20
#: options of a Dask cluster that we start. Dask's own processes share the cores with the work, so we switch off profiling
#: and work stealing, and monitor workers less often
DASK = {
    "distributed.worker.profile.enabled": False,
    "distributed.scheduler.work-stealing": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "2s",
    "distributed.worker.memory.monitor-interval": "1s",
}
#: the task graph for 100,000 operands exceeds Dask's warning threshold, but is far smaller than the data that workers read
_SENT = {"distributed.admin.large-graph-warning-threshold": "1 GiB"}


class WorkerCluster(NamedTuple):
    """A cluster of workers in other processes."""

    workers: int
    #: function that applies a function to each item on the workers, and returns the results in order
    each: Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


#: the cluster in use; empty without a cluster
_in_use: list[WorkerCluster] = []


def count_cluster_workers() -> int:
    """Return the number of workers of the cluster in use; 0 without a cluster."""
    return _in_use[-1].workers if _in_use else 0


def map_on_cluster(do: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Apply `do` to each item, in this process or on the cluster's workers (one thread each). Return the results in
    order.
    """
    return _in_use[-1].each(do, list(items)) if _in_use else [do(item) for item in items]


def _alone(do: Callable[[Item], Result], item: Item) -> Result:
    with limit_cores(1):
        return do(item)


@contextlib.contextmanager
def on_cluster(address: str | None) -> Iterator[None]:
    """Use a cluster for `compare`, `diagnose` and `recommend` of long records inside this context.

    Workers need this package, and read the records at the same addresses.

    Args:
        address: `ray` or `dask` to start a cluster on this machine with one worker for each core, or the address of a
            running cluster, `ray://HOST:10001` or `tcp://HOST:8786` (Dask's scheduler). None: no cluster.

    Returns:
        A context manager.

    Raises:
        ConfigError: there is no cluster at the address, or its package is not installed.

    Example:
        >>> with on_cluster(None):
        ...     diagnose("runs/bad", "runs/baseline").cause
        'learning_rate'
    """
    if address is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        _in_use.append(_started(address, stack))
        stack.callback(_in_use.pop)
        yield


def _started(address: str, stack: contextlib.ExitStack) -> WorkerCluster:
    kind = address.partition("://")[0]
    start = {"ray": _ray, "dask": _dask, "tcp": _dask, "tls": _dask}.get(kind)
    if start is None:
        raise ConfigError(f"{address!r} is no cluster address; write ray, dask, ray://HOST:PORT or tcp://HOST:PORT")
    try:
        return start(address if "://" in address else None, stack)
    except ImportError as error:
        raise ConfigError(f"{address} needs the package {error.name}, which is not installed") from None
    except Exception as error:  # Ray and Dask raise errors of their own
        raise ConfigError(
            f"there is no cluster at {address}: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from None


def _ray(address: str | None, stack: contextlib.ExitStack) -> WorkerCluster:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, include_dashboard=False) if address is None else ray.init(address)
        stack.callback(ray.shutdown)
    alone = ray.remote(num_cpus=1)(_alone)

    def by_workers(do: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        try:
            found: list[Any] = ray.get([alone.remote(do, item) for item in items])
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # otherwise the message would contain the worker's traceback
        except ray.exceptions.RayError as error:
            raise _lost(error) from None
        return found

    return WorkerCluster(max(1, int(ray.cluster_resources().get("CPU", 1))), by_workers)


def _dask(address: str | None, stack: contextlib.ExitStack) -> WorkerCluster:
    import dask
    from distributed import Client, KilledWorker

    options: dict[str, Any] = (
        {"address": address, "timeout": PATIENCE} if address else {"threads_per_worker": 1, "dashboard_address": None}
    )
    with dask.config.set(DASK if address is None else {}):
        client = stack.enter_context(Client(**options))

    def by_workers(do: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        try:
            with dask.config.set(_SENT):
                sent = [client.submit(_alone, do, item, pure=False) for item in items]
            found: list[Any] = client.gather(sent)
        except KilledWorker as error:
            raise _lost(error) from None
        return found

    return WorkerCluster(max(1, len(client.scheduler_info(n_workers=-1)["workers"])), by_workers)


def _lost(error: Exception) -> ConfigError:
    why = str(error).splitlines()[0]
    return ConfigError(f"the cluster lost workers; give each more memory, or try again without a cluster: {why}")
