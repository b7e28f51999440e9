"""What the ranks of a run tell each other: through the store that they met at, which no GPU has to wait for."""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError, warn

#: seconds that a rank waits for the others to start their monitors
START = 120.0
#: seconds that a rank waits for the first one's word on a sampled step
WORD = 60.0

_instances = itertools.count()


class Ranks:
    """The ranks of a run that carry a monitor each; the first of them writes."""

    def __init__(self) -> None:
        there = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.world = dist.get_world_size() if there else 1
        # The same on all ranks, which start their monitors in the same order.
        self._prefix = f"nemo_fp8_debug/{next(_instances) if self.world > 1 else 'alone'}"
        # Kept alive by us, it would keep its port and its connections from the run's next one.
        self._met = weakref.ref(dist.group.WORLD) if there else lambda: None
        self._words = 0

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
        if self.world > 1 and not self.first_to_say(name, value):
            other = self.read(name)
            if other != json.loads(json.dumps(value)):
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
        if self.world == 1:
            return word or {}
        if fault is not None:
            self.publish("fault", {"config": isinstance(fault, ConfigError), "message": str(fault)})
        elif self.writes:
            self.publish("word", word)
        if self._store.add(self._key("started"), 1) == self.world:
            self.first_to_say("together", True)
        if fault is not None:
            return {}
        # Said once and for all: a rank that comes later must not take those who went alone for companions.
        if not self._waits_for("together", START) and self.first_to_say("together", False):
            warn(f"not all ranks have started a monitor within {START:.0f} s; the first rank alone is looked at")
        if not self.read("together"):
            self.world = 1
            return word or {}
        if self.said("fault"):
            refused = self.read("fault")
            raise (ConfigError if refused["config"] else RuntimeError)(refused["message"])
        result: dict[str, Any] = self.read("word")
        return result

    def publish(self, name: str, value: Any) -> None:
        """Let other ranks read a plain value."""
        self._store.set(self._key(name), json.dumps(value))

    def read(self, name: str) -> Any:
        """What was published; waits for it.

        Raises:
            TimeoutError: nobody publishes it.
        """
        if not self._waits_for(name, WORD):
            raise TimeoutError(f"no rank said within {WORD:.0f} s what {name} is")
        return json.loads(self._store.get(self._key(name)))

    def read_of_all(self, name: str) -> list[Any]:
        """What each rank published under `NAME/RANK`, before all had started."""
        return [json.loads(v) for v in self._store.multi_get([self._key(f"{name}/{rank}") for rank in range(self.world)])]

    def store_for(self, name: str) -> Any:
        """A corner of the store."""
        return dist.distributed_c10d.PrefixStore(self._key(name), self._store)

    def first_to_say(self, name: str, value: Any) -> bool:
        """Publish a plain value, unless another rank has; whether this one did."""
        if self._store.add(self._key(f"{name}/by"), 1) > 1:
            return False
        self.publish(name, value)
        return True

    def said(self, name: str) -> bool:
        """Whether any rank has published this."""
        return self.world > 1 and bool(self._store.check([self._key(name)]))

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
            return self.read(self._word)
        self.publish(self._word, value)
        # Training itself has kept the ranks together since the sample before the last.
        self._store.delete_key(self._key(f"word-{self._words - 2}"))
        return value

    def shared_late(self) -> Any:
        """What the first rank had not said in time.

        Raises:
            TimeoutError: it still has not.
        """
        if not self.said(self._word):
            raise TimeoutError("the first rank has said nothing")
        return self.read(self._word)

    @property
    def _word(self) -> str:
        return f"word-{self._words}"

    def total(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sums over all ranks, float64 on the device of the run, not yet waited for; called on all ranks, at the same steps.

        Args:
            values: scalar tensors.
        """
        sums = torch.stack([value.double() for value in values])
        if self.world > 1:
            dist.all_reduce(sums)
        return sums

    @property
    def device(self) -> torch.device:
        """Where the ranks can add up tensors."""
        if self.world > 1 and "nccl" in dist.get_backend():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def _store(self) -> Any:
        if self._met() is not dist.group.WORLD:
            raise RuntimeError("the process group in which the ranks met is gone")
        return dist.distributed_c10d._get_default_store()

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _waits_for(self, name: str, seconds: float) -> bool:
        try:
            self._store.wait([self._key(name)], timedelta(seconds=seconds))
        except (RuntimeError, dist.DistError):
            return False
        return True
