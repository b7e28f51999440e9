"""Exchange values between ranks through the store of torch.distributed, so that no GPU waits."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..core.waits import LOSSES, WORD, WaitTimes
from ..errors import ConfigError, warn
from . import patience
from .gloo import GlooGroup
from .networks import NetworkAddresses, explain_unreachable
from .patience import WaitBudget
from .peers import WarningElection
from .run_store import RunStore

T = TypeVar("T")
#: longest time in seconds that a rank waits until monitors have started on all ranks
START = 120.0

_instances = itertools.count()


class MonitoredRanks:
    """The ranks of a run that have a monitor. The first of these ranks writes the record."""

    def __init__(self, waits: WaitTimes | None = None) -> None:
        """
        Args:
            waits: adds up the training thread's waiting times.
        """
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.world = dist.get_world_size() if there else 1
        # The prefix is the same on all ranks, because they start their monitors in the same order.
        self._prefix = f"nemo_fp8_debug/{next(_instances) if self.world > 1 else 'alone'}"
        self._run_store = RunStore()
        #: limits waits of the training thread for other ranks
        self.patience = WaitBudget(waits or WaitTimes())
        self._peers: WarningElection | None = None
        self._words = 0
        self._totals = ScalarReducer(self.patience)

    @property
    def writes_record(self) -> bool:
        """True on the rank that writes the record."""
        return self.rank == 0

    def require_same_value(self, name: str, value: Any) -> None:
        """Check that all ranks have the same value.

        Args:
            value: a plain value.

        Raises:
            ConfigError: another rank has a different value.
        """
        if self.world == 1:
            return
        try:
            other = value if self.publish_if_absent(name, value) else self.await_value(name)
        except TimeoutError as error:
            self.continue_single_rank(error)
            return
        if json.dumps(other) != json.dumps(json.loads(json.dumps(value))):
            raise ConfigError(f"ranks differ in their {name}: rank {self.rank} has {value}, another rank has {other}")

    def await_all_monitors(self, word: dict[str, Any] | None, fault: Exception | None = None) -> dict[str, Any]:
        """Wait until every rank's monitor has started or failed. Return the first rank's `word`.

        Args:
            word: a plain value from the first rank.
            fault: the error because of which this rank cannot start, or None.

        Raises:
            ConfigError: another rank failed with a ConfigError.
            RuntimeError: another rank failed with another error.
        """
        if self.world > 1:
            try:
                return self._start(word, fault)
            except TimeoutError as error:
                self.continue_single_rank(error)
        return word or {}

    def continue_single_rank(self, error: Exception) -> None:
        """Continue without other ranks, because this rank cannot reach them before training. Only the first rank is
        monitored.
        """
        self.world = 1
        warn(f"ranks cannot reach each other, so only the first rank is monitored: {error}")

    def _start(self, word: dict[str, Any] | None, fault: Exception | None) -> dict[str, Any]:
        if fault is not None:
            self.publish_value("fault", {"config": isinstance(fault, ConfigError), "message": str(fault)})
        elif self.writes_record:
            self.publish_value("word", word)
        if self._ask(lambda store: store.add(self._key("started"), 1)) == self.world:
            self.publish_if_absent("together", True)
        if fault is not None:
            return {}
        # Decide once for all ranks, so that a late rank does not wait for ranks that continue alone.
        all_there = self._ask(
            lambda store: self._waits_for(store, "together", START), START + patience.compute_store_grace_seconds()
        )
        if not all_there and self.publish_if_absent("together", False):
            warn(f"not all ranks have started a monitor within {START:.0f} s, so only the first rank is monitored")
        if not self.await_value("together"):
            self.world = 1
            return word or {}
        if self.is_published("fault"):
            refused = self.await_value("fault")
            raise (ConfigError if refused["config"] else RuntimeError)(refused["message"])
        result: dict[str, Any] = self.await_value("word")
        return result

    def publish_value(self, name: str, value: Any) -> None:
        """Publish a plain value for other ranks."""
        self._ask(lambda store: store.set(self._key(name), json.dumps(value)))

    def await_value(self, name: str, seconds: float | None = None) -> Any:
        """Wait for a published value, and return it.

        Raises:
            TimeoutError: no rank publishes the value in time.
        """
        limit = patience.LONGEST if seconds is None else seconds

        def published(store: Any) -> str | None:
            return store.get(self._key(name)) if self._waits_for(store, name, limit) else None

        if (found := self._ask(published, limit + patience.compute_store_grace_seconds())) is None:
            raise TimeoutError(f"no rank published {name} within {limit:.0f} s")
        return json.loads(found)

    def read_values_of_all_ranks(self, name: str) -> list[Any]:
        """Return the value that each rank published under `NAME/RANK` before `start` returned."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world)]
        return [json.loads(value) for value in self._ask(lambda store: store.multi_get(keys))]

    def make_gloo_group(self, name: str, members: Sequence[int], seconds: float, limit: float | None = None) -> GlooGroup:
        """Make a gloo group of some ranks, including this rank. All of these ranks call this.

        Args:
            seconds: longest time that one rank waits for another.
            limit: longest time for making the group, in seconds.

        Raises:
            RuntimeError: gloo cannot be used here, or other ranks do not arrive.
        """

        def made(store: Any) -> GlooGroup:
            return GlooGroup(dist.distributed_c10d.PrefixStore(self._key(name), store), self.rank, members, seconds)

        return self._ask(made, limit)

    def publish_if_absent(self, name: str, value: Any, seconds: float | None = None) -> bool:
        """Publish a plain value, unless another rank has published the name. Return whether this rank has published its
        value.
        """

        def said(store: Any) -> bool:
            if store.add(self._key(f"{name}/by"), 1) > 1:
                return False
            store.set(self._key(name), json.dumps(value))
            return True

        return self._ask(said, seconds)

    def is_published(self, name: str) -> bool:
        """Return whether any rank has published a value under this name."""
        return self.world > 1 and self._ask(lambda store: bool(store.check([self._key(name)])))

    def broadcast_value(self, value: Any) -> Any:
        """Return the first rank's value. All ranks call this at the same steps.

        Args:
            value: a plain value on the first rank.

        Raises:
            TimeoutError: the first rank does not send the value in time.
        """
        if self.world == 1:
            return value
        self._words += 1
        if not self.writes_record:
            with self.patience.spend_wait(WORD) as seconds:
                value = self.await_value(self._word, seconds)
        else:
            with self.patience.spend_wait(WORD) as seconds:
                self._ask(lambda store: self._tell(store, json.dumps(value)), seconds)
        self.patience.refill_budget()
        return value

    def _tell(self, store: Any, word: str) -> None:
        store.set(self._key(self._word), word)
        # All ranks have read the value from two samples ago, because training has synchronized them since. So delete it.
        store.delete_key(self._key(f"word-{self._words - 2}"))

    def await_late_value(self) -> Any:
        """Return a value that the first rank sent too late for `broadcast_value`.

        Raises:
            TimeoutError: the value still has not arrived.
        """

        def published(store: Any) -> str | None:
            return store.get(self._key(self._word)) if store.check([self._key(self._word)]) else None

        with self.patience.spend_wait(WORD, reserve=True) as seconds:
            if (found := self._ask(published, seconds)) is None:
                raise TimeoutError("the first rank has not answered")
        self.patience.refill_budget()
        return json.loads(found)

    def describe_unresponsive_store(self) -> str | None:
        """Return a message if the store does not answer, or None if we see no problem."""
        return self._run_store.describe_unresponsive_store()

    @property
    def _word(self) -> str:
        return f"word-{self._words}"

    def sum_over_ranks(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `ScalarReducer.sum_over_ranks`."""

        def connect(limit: float) -> GlooGroup:
            return self.make_gloo_group("everyone", range(self.world), patience.LONGEST, limit)

        return self._totals.sum_over_ranks(values, self.world, connect)

    @property
    def reduction_device(self) -> torch.device:
        """The device on which the ranks' process group can add up tensors."""
        if self.world > 1 and "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def publish_address(self) -> None:
        """Publish this rank's address. Call this before `start`."""
        network, port = NetworkAddresses.find_own_addresses(self._run_store.address()), None
        with contextlib.suppress(OSError):
            self._peers = WarningElection(self.rank, network)
            port = self._peers.port
        self.publish_value(f"network/{self.rank}", {"network": network.to_plain_values(), "port": port})

    def exchange_addresses(self) -> None:
        """Read the addresses of other ranks. All ranks call this after `publish_address`.

        Raises:
            RuntimeError: gloo cannot connect the ranks' hosts. The message names the setting to change.
        """
        if self.writes_record:
            found = self.read_values_of_all_ranks("network")
            networks = [NetworkAddresses(**one["network"]) for one in found]
            peers = {rank: found[rank] for rank in WarningElection.choose_contact_ranks(networks) if found[rank]["port"]}
            self.publish_value(
                "networks", {"peers": peers, "token": secrets.token_hex(16), "fault": explain_unreachable(networks)}
            )
        met = self.await_value("networks")
        if self._peers:
            peers = {int(rank): (NetworkAddresses(**one["network"]), one["port"]) for rank, one in met["peers"].items()}
            self._peers.exchange_addresses(met["token"], peers, (self._run_store.address() or (None,))[0])
        if met["fault"]:
            raise RuntimeError(met["fault"])

    def listen_for_out_of_sync(self, told: Callable[[int, str], None]) -> None:
        """Call `told` when another rank detects that ranks are out of sync.

        Args:
            told: a method that is called in the background with a step and a reason.
        """
        if self._peers:
            self._peers.answer_messages(told)

    def elect_warner(self, step: int, why: str) -> bool:
        """Inform all ranks that they are out of sync since a step. Return whether this rank must warn.

        The lowest rank that is alive warns. If ranks cannot be reached directly, the first rank that marks this in the store
        warns. If the store does not answer either, this rank is cut off and warns itself. This takes some seconds in the
        background.
        """
        first = self._peers is None or self._peers.elect_warner(step, why)
        with contextlib.suppress(Exception):  # the run may have destroyed the store with its process group
            first = first and self.publish_if_absent("over", step, seconds=patience.compute_background_wait())
        if first and self._peers:
            self._peers.note_warning()
        return first

    def close(self, in_sync: bool = True) -> None:
        """Leave the run's store and groups.

        Args:
            in_sync: whether all ranks leave at the same time.
        """
        if self._peers:
            self._peers.close()
        self._totals.close(in_sync)
        self._run_store.close()

    def _ask(self, question: Callable[[Any], T], seconds: float | None = None) -> T:
        return self._run_store.call_with_timeout(question, patience.LONGEST if seconds is None else seconds)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _waits_for(self, store: Any, name: str, seconds: float) -> bool:
        try:
            store.wait([self._key(name)], timedelta(seconds=seconds))
        except (RuntimeError, dist.DistError):
            return False
        return True


class ScalarReducer:
    """Adds up scalars at each step. On GPUs we use the run's own process group, and on CPUs a gloo group of our own."""

    def __init__(self, waits: WaitBudget) -> None:
        """
        Args:
            waits: limits the waiting times of the training thread.
        """
        self._patience = waits
        self._everyone: GlooGroup | None = None
        self._apart = False

    def sum_over_ranks(
        self, values: Sequence[torch.Tensor], world: int, connect: Callable[[float], GlooGroup]
    ) -> torch.Tensor:
        """Return sums over all ranks, float64, on the run's device. All ranks call this at the same steps.

        On a GPU, the result may not be computed yet.

        Args:
            values: scalar tensors.
            world: number of ranks that take part.
            connect: function that makes a gloo group of these ranks. Its argument is the limit in seconds.

        Raises:
            TimeoutError: a rank does not take part in time.
        """
        sums = torch.stack([value.double() for value in values])
        if world > 1 and sums.device.type != "cpu":
            # Use the run's own group. All ranks must call this, because a missing call would be matched with the run's next
            # collective.
            dist.all_reduce(sums)
        elif world > 1 and not self._apart:
            try:
                self._add_up(sums, connect)
            except Exception as error:
                self._apart = True
                raise TimeoutError(f"not all ranks reported their loss: {error}") from error
        return sums

    def _add_up(self, sums: torch.Tensor, connect: Callable[[float], GlooGroup]) -> None:
        if self._everyone is None:
            with self._patience.spend_wait(LOSSES) as seconds:
                self._everyone = connect(seconds)
        with self._patience.spend_wait(LOSSES) as seconds:
            self._everyone.reduce_sum(sums, seconds)
        self._patience.refill_budget()

    def close(self, in_sync: bool) -> None:
        """Leave the group.

        Args:
            in_sync: whether all ranks leave at the same time.
        """
        if self._everyone:
            self._everyone.close(in_sync)
