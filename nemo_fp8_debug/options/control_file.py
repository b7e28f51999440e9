"""The control file. Users write it to change the sampling and dumps of a running job.

    RUN/control.yaml

        interval: 50
        layers: [layers.3.*]
        roles: [input, grad_output]
        what_if: [current-e4m3, delayed(margin=1)]
        dump: [mlp.linear_fc2]
        steps: 5

Every key is optional. An option without a key keeps its value from the start of the run. If `steps` is N, we sample N
consecutive steps, beginning with the next step that would be sampled anyway, and dump only in these N steps. The rank that
writes the record reads the file before each sampled step. An invalid file changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from ..errors import ConfigError
from .config import Config

NAME = "control.yaml"
#: fields of Config that the file may change
FIELDS = ("interval", "layers", "roles", "what_if", "dump")
#: largest size of the file in bytes
LONGEST = 1 << 16
#: largest depth of nested lists, largest number of values, and largest number of characters in a value
_DEEPEST, _MOST, _LONGEST_VALUE = 8, 4096, 1000
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


@dataclass(frozen=True)
class ControlSettings:
    """The content of a control file."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> ControlSettings:
        """Parse the text of a control file. An empty file changes nothing.

        Raises:
            ConfigError: the file is invalid. The message names the invalid key or value.
        """
        content = _load(text)
        if content is None:
            return cls()
        if not isinstance(content, dict):
            raise ConfigError(f"{NAME} must map keys to values; it is a {type(content).__name__}")
        if unknown := [str(key) for key in content if key not in (*FIELDS, "steps")]:
            raise ConfigError(f"{NAME} has unknown keys {', '.join(unknown)}; valid keys are {', '.join(FIELDS)}, steps")
        steps = content.pop("steps", None)
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise ConfigError(f"steps in {NAME} is {steps!r}; it must be a whole number of steps, at least 1")
        lists = [content[key] for key in ("layers", "dump") if isinstance(content.get(key), list)]
        if any(str(pattern).startswith("re:") for patterns in lists for pattern in patterns):
            raise ConfigError(f"{NAME} takes globs only, because a regular expression can take forever to match")
        control = cls.from_plain_values({"changes": content, "steps": steps})
        replace(Config(), **control.changes)
        return control

    @property
    def plain_values(self) -> dict[str, Any]:
        """Return the content as plain values for JSON, which `from_plain_values` can read."""
        return {
            "changes": {key: list(v) if isinstance(v, tuple) else v for key, v in self.changes.items()},
            "steps": self.steps,
        }

    @classmethod
    def from_plain_values(cls, content: Mapping[str, Any]) -> ControlSettings:
        """Return the content that `plain_values` has stored. Another rank has already parsed and checked this content."""
        return cls({key: tuple(v) if isinstance(v, list) else v for key, v in content["changes"].items()}, content["steps"])

    def describe_settings(self) -> str:
        """Describe the content in one line. Options that it does not mention keep their values from the start of the run."""
        content = {**self.changes} | ({} if self.steps is None else {"steps": self.steps})
        shown = (f"{key} {', '.join(map(str, v)) if isinstance(v, tuple) else v}" for key, v in content.items())
        return "; ".join(shown) or "all options are as at the start of the run"

    def __str__(self) -> str:
        content = self.plain_values["changes"] | ({} if self.steps is None else {"steps": self.steps})
        return str(yaml.safe_dump(content, sort_keys=False))


def _load(text: str) -> Any:
    if len(text.encode(errors="replace")) > LONGEST:
        raise ConfigError(f"{NAME} is longer than {LONGEST >> 10} KiB")
    try:
        _check(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{NAME} is not YAML: {' '.join(str(error).split())[:300]}") from None


def _check(text: str) -> None:
    """Reject text whose parsing would take much time or memory.

    Raises:
        ConfigError: the text is rejected. The message gives the reason.
    """
    depth = 0
    for number, event in enumerate(yaml.parse(text, yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):  # with aliases, a short text can expand to more than fits in memory
            raise ConfigError(f"{NAME} uses aliases (*name), which are not supported; quote patterns that begin with *")
        if depth > _DEEPEST:
            raise ConfigError(f"{NAME} has lists that are nested more than {_DEEPEST} levels deep")
        if number > _MOST:
            raise ConfigError(f"{NAME} has more than {_MOST} values")
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and _SEXAGESIMAL.fullmatch(event.value):
            raise ConfigError(f"{NAME} has {event.value[:20]}, which YAML reads as a number in base 60; write it in digits")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_VALUE:
            raise ConfigError(f"{NAME} has a value of more than {_LONGEST_VALUE} characters")
