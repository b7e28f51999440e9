"""What the ranks of a run do together: agree, and add up what each of them holds of a tensor."""

from .family import Family
from .ranks import Ranks
from .reduction import Reduction

__all__ = ["Family", "Ranks", "Reduction"]
