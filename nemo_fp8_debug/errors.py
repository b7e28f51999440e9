"""The two ways this package speaks up."""


class ConfigError(ValueError):
    """The user asked for something that cannot be done; says what was wrong and what to do.

    Raised when the configuration is read or the run starts, never after the first training step.
    """


class RecordError(ValueError):
    """A recorded run cannot be read; names the file and says what is wrong with it."""


class FP8DebugWarning(UserWarning):
    """A fault of the monitor, or something it cannot see; the run goes on."""
