"""What the ranks of a run tell each other: through the store that they met at, which no GPU has to wait for."""

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

from ..core.waits import LOSSES, WORD, Waits
from ..errors import ConfigError, warn
from . import patience
from .gloo import Group
from .networks import Network, explain_unreachable
from .patience import Patience
from .peers import Peers
from .run_store import RunStore

T = TypeVar("T")
#: seconds that a rank waits for the others to start their monitors
START = 120.0

_instances = itertools.count()


class Ranks:
    """The ranks of a run that carry a monitor each; the first of them writes."""

    def __init__(self, waits: Waits | None = None) -> None:
        """
        Args:
            waits: where those of the training thread are added up.
        """
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.world = dist.get_world_size() if there else 1
        # The same on all ranks, which start their monitors in the same order.
        self._prefix = f"nemo_fp8_debug/{next(_instances) if self.world > 1 else 'alone'}"
        self._run_store = RunStore()
        #: of the training thread, with other ranks
        self.patience = Patience(waits or Waits())
        self._peers: Peers | None = None
        self._words = 0
        self._totals = Totals(self.patience)

    @property
    def writes(self) -> bool:
        """Whether this rank keeps the record."""
        return self.rank == 0

    def agree(self, name: str, value: Any) -> None:
        """Make sure that all ranks have the same.

        Args:
            value: plain.

        Raises:
            ConfigError: another rank has something else.
        """
        if self.world == 1:
            return
        try:
            other = value if self.set_if_absent(name, value) else self.read(name)
        except TimeoutError as error:
            self.go_alone(error)
            return
        if json.dumps(other) != json.dumps(json.loads(json.dumps(value))):
            raise ConfigError(f"ranks differ in their {name}: rank {self.rank} has {value}, another one {other}")

    def start(self, word: dict[str, Any] | None, fault: Exception | None = None) -> dict[str, Any]:
        """Every rank's monitor has started, or failed to; returns the word of the first rank.

        Args:
            word: what the first rank has to say; plain values.
            fault: what keeps this rank from starting.

        Raises:
            ConfigError: that is the fault on another rank.
            RuntimeError: another rank has another fault.
        """
        if self.world > 1:
            try:
                return self._start(word, fault)
            except TimeoutError as error:
                self.go_alone(error)
        return word or {}

    def go_alone(self, error: Exception) -> None:
        """Before training: other ranks cannot be reached. The first rank is looked at alone, and any other not at all."""
        self.world = 1
        warn(f"ranks cannot reach each other, so only the first rank is monitored: {error}")

    def _start(self, word: dict[str, Any] | None, fault: Exception | None) -> dict[str, Any]:
        if fault is not None:
            self.publish("fault", {"config": isinstance(fault, ConfigError), "message": str(fault)})
        elif self.writes:
            self.publish("word", word)
        if self._ask(lambda store: store.add(self._key("started"), 1)) == self.world:
            self.set_if_absent("together", True)
        if fault is not None:
            return {}
        # Said once and for all: a rank that comes later must not take those who went alone for companions.
        all_there = self._ask(lambda store: self._waits_for(store, "together", START), START + patience.compute_grace())
        if not all_there and self.set_if_absent("together", False):
            warn(f"not all ranks have started a monitor within {START:.0f} s, so only the first rank is monitored")
        if not self.read("together"):
            self.world = 1
            return word or {}
        if self.is_set("fault"):
            refused = self.read("fault")
            raise (ConfigError if refused["config"] else RuntimeError)(refused["message"])
        result: dict[str, Any] = self.read("word")
        return result

    def publish(self, name: str, value: Any) -> None:
        """Let other ranks read a plain value."""
        self._ask(lambda store: store.set(self._key(name), json.dumps(value)))

    def read(self, name: str, seconds: float | None = None) -> Any:
        """What was published; waits for it.

        Raises:
            TimeoutError: nobody publishes it.
        """
        limit = patience.LONGEST if seconds is None else seconds

        def published(store: Any) -> str | None:
            return store.get(self._key(name)) if self._waits_for(store, name, limit) else None

        if (found := self._ask(published, limit + patience.compute_grace())) is None:
            raise TimeoutError(f"no rank said within {limit:.0f} s what {name} is")
        return json.loads(found)

    def read_of_all(self, name: str) -> list[Any]:
        """What each rank published under `NAME/RANK`, before all had started."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self.world)]
        return [json.loads(value) for value in self._ask(lambda store: store.multi_get(keys))]

    def group(self, name: str, members: Sequence[int], seconds: float, limit: float | None = None) -> Group:
        """Gloo among some ranks, this one too; called on all of them.

        Args:
            seconds: that one rank waits for another.
            limit: seconds that making it may take.

        Raises:
            RuntimeError: gloo cannot be used here, or the others do not come.
        """

        def made(store: Any) -> Group:
            return Group(dist.distributed_c10d.PrefixStore(self._key(name), store), self.rank, members, seconds)

        return self._ask(made, limit)

    def set_if_absent(self, name: str, value: Any, seconds: float | None = None) -> bool:
        """Publish a plain value, unless another rank has; whether this one did."""

        def said(store: Any) -> bool:
            if store.add(self._key(f"{name}/by"), 1) > 1:
                return False
            store.set(self._key(name), json.dumps(value))
            return True

        return self._ask(said, seconds)

    def is_set(self, name: str) -> bool:
        """Whether any rank has published this."""
        return self.world > 1 and self._ask(lambda store: bool(store.check([self._key(name)])))

    def share(self, value: Any) -> Any:
        """What the first rank says; called on all ranks, at the same steps.

        Args:
            value: on the first rank, plain.

        Raises:
            TimeoutError: it does not say it.
        """
        if self.world == 1:
            return value
        self._words += 1
        if not self.writes:
            with self.patience.spending(WORD) as seconds:
                value = self.read(self._word, seconds)
        else:
            with self.patience.spending(WORD) as seconds:
                self._ask(lambda store: self._tell(store, json.dumps(value)), seconds)
        self.patience.renew()
        return value

    def _tell(self, store: Any, word: str) -> None:
        store.set(self._key(self._word), word)
        # Training itself has kept the ranks together since the sample before the last.
        store.delete_key(self._key(f"word-{self._words - 2}"))

    def shared_late(self) -> Any:
        """What the first rank had not said in time.

        Raises:
            TimeoutError: it still has not.
        """

        def published(store: Any) -> str | None:
            return store.get(self._key(self._word)) if store.check([self._key(self._word)]) else None

        with self.patience.spending(WORD, reserve=True) as seconds:
            if (found := self._ask(published, seconds)) is None:
                raise TimeoutError("the first rank has said nothing")
        self.patience.renew()
        return json.loads(found)

    def silence(self) -> str | None:
        """In words, that the store does not answer; None: it does, as far as is known."""
        return self._run_store.silence()

    @property
    def _word(self) -> str:
        return f"word-{self._words}"

    def total(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Totals.of`."""

        def connect(limit: float) -> Group:
            return self.group("everyone", range(self.world), patience.LONGEST, limit)

        return self._totals.of(values, self.world, connect)

    @property
    def device(self) -> torch.device:
        """Where the ranks can add up tensors."""
        if self.world > 1 and "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def introduce(self) -> None:
        """Let other ranks know where this one is; called before all have started."""
        network, port = Network.here(self._run_store.address()), None
        with contextlib.suppress(OSError):
            self._peers = Peers(self.rank, network)
            port = self._peers.port
        self.publish(f"network/{self.rank}", {"network": network.plain(), "port": port})

    def exchange_addresses(self) -> None:
        """Know where others are; called on all ranks, which have introduced themselves.

        Raises:
            RuntimeError: gloo cannot connect their hosts; says what to set.
        """
        if self.writes:
            found = self.read_of_all("network")
            networks = [Network(**one["network"]) for one in found]
            peers = {rank: found[rank] for rank in Peers.chosen(networks) if found[rank]["port"]}
            self.publish(
                "networks", {"peers": peers, "token": secrets.token_hex(16), "fault": explain_unreachable(networks)}
            )
        met = self.read("networks")
        if self._peers:
            peers = {int(rank): (Network(**one["network"]), one["port"]) for rank, one in met["peers"].items()}
            self._peers.exchange_addresses(met["token"], peers, (self._run_store.address() or (None,))[0])
        if met["fault"]:
            raise RuntimeError(met["fault"])

    def listen(self, told: Callable[[int, str], None]) -> None:
        """Hear when another rank finds that ranks are out of sync.

        Args:
            told: a method, called in the background with a step and a reason.
        """
        if self._peers:
            self._peers.listen(told)

    def warns_first(self, step: int, why: str) -> bool:
        """Tell all ranks that they are out of sync since a step; whether this rank is to warn of it.

        That is the lowest rank that is alive. If ranks cannot be asked directly, the store tells who was first; if that
        does not answer either, this rank is cut off, and on its own. Takes some seconds; called in the background.
        """
        first = self._peers is None or self._peers.warns_first(step, why)
        with contextlib.suppress(Exception):  # the run may have ended the store with its process group
            first = first and self.set_if_absent("over", step, seconds=patience.compute_short_wait())
        if first and self._peers:
            self._peers.has_warned()
        return first

    def close(self, in_sync: bool = True) -> None:
        """Part.

        Args:
            in_sync: all ranks have done the same.
        """
        if self._peers:
            self._peers.close()
        self._totals.close(in_sync)
        self._run_store.close()

    def _ask(self, question: Callable[[Any], T], seconds: float | None = None) -> T:
        return self._run_store.ask(question, patience.LONGEST if seconds is None else seconds)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _waits_for(self, store: Any, name: str, seconds: float) -> bool:
        try:
            store.wait([self._key(name)], timedelta(seconds=seconds))
        except (RuntimeError, dist.DistError):
            return False
        return True


class Totals:
    """Adds up scalars at each step: over the run's own group on GPUs, and over one of the monitor's on CPUs."""

    def __init__(self, waits: Patience) -> None:
        """
        Args:
            waits: of the training thread.
        """
        self._patience = waits
        self._everyone: Group | None = None
        self._apart = False

    def of(self, values: Sequence[torch.Tensor], world: int, connect: Callable[[float], Group]) -> torch.Tensor:
        """Return sums over all ranks, float64 on the device of the run; called on all ranks, at the same steps.

        On a GPU they are not yet waited for.

        Args:
            values: scalar tensors.
            world: ranks that take part.
            connect: makes a group of them, within so many seconds.

        Raises:
            TimeoutError: a rank does not take part in time.
        """
        sums = torch.stack([value.double() for value in values])
        if world > 1 and sums.device.type != "cpu":
            # The run's own: all ranks take part in each, or the next one of the run would meet another.
            dist.all_reduce(sums)
        elif world > 1 and not self._apart:
            try:
                self._add_up(sums, connect)
            except Exception as error:
                self._apart = True
                raise TimeoutError(f"not all ranks reported their loss: {error}") from error
        return sums

    def _add_up(self, sums: torch.Tensor, connect: Callable[[float], Group]) -> None:
        if self._everyone is None:
            with self._patience.spending(LOSSES) as seconds:
                self._everyone = connect(seconds)
        with self._patience.spending(LOSSES) as seconds:
            self._everyone.add_up(sums, seconds)
        self._patience.renew()

    def close(self, in_sync: bool) -> None:
        """Part.

        Args:
            in_sync: all ranks have done the same.
        """
        if self._everyone:
            self._everyone.close(in_sync)
