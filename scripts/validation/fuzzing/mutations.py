"""Strategies of hypothesis: bytes and texts that were valid before, and JSON of any form."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

#: what parsers stumble over
TEXTS = (
    *("", "0", "-1", "1e400", "NaN", "null", "true", "[" * 200, "{" * 200, "&a [*a]", "!!python/name:os.system", "12:30:45"),
    *("..", "../../etc/passwd", "/etc/passwd", "re:(a+)+$", "\x00", "\ud800", "\u202e", "a" * 3000, "*", "%00", "\r\nX: y"),
)
BYTES = (
    *(b"\x00" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x00\x00\x00\x80", b"PK\x03\x04", b"PK\x05\x06", b"PAR1"),
    *(b"cos\nsystem\n", b"\x80\x04\x95", b"h\x00", b'":{"', b"[[[[[[[[", b"999999999999999999", b"-9223372036854775808"),
)

_edits = st.lists(
    st.tuples(
        st.sampled_from(("flip", "insert", "delete", "repeat", "cut", "replace")),
        st.floats(0, 1),
        st.integers(1, 64),
        st.one_of(st.sampled_from(BYTES), st.binary(min_size=1, max_size=16)),
    ),
    max_size=8,
)


def mutated(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """A seed with a few edits, or two of them put together, or bytes of any kind."""
    edited = st.builds(_edited, st.sampled_from(list(seeds)), _edits)
    joined = st.builds(_joined, st.sampled_from(list(seeds)), st.sampled_from(list(seeds)), st.floats(0, 1), st.floats(0, 1))
    return st.one_of(edited, edited, edited, joined, st.binary(max_size=200))


def _edited(seed: bytes, edits: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    content = bytearray(seed)
    for how, where, length, given in edits:
        at = min(int(where * len(content)), max(len(content) - 1, 0))
        if how == "flip" and content:
            content[at] ^= 1 << (length % 8)
        elif how == "insert":
            content[at:at] = given
        elif how == "delete":
            del content[at : at + length]
        elif how == "repeat":
            content[at:at] = content[at : at + length] * min(length, 20)
        elif how == "cut":
            del content[at:]
        elif how == "replace":
            content[at : at + len(given)] = given
    return bytes(content)


def _joined(first: bytes, second: bytes, end: float, begin: float) -> bytes:
    return first[: int(end * len(first))] + second[int(begin * len(second)) :]


def words(known: Sequence[str]) -> st.SearchStrategy[str]:
    """A known word as a rule, else what is hostile."""
    usual = st.sampled_from(list(known))
    return st.one_of(usual, usual, st.sampled_from(TEXTS), st.text(max_size=30))


def json_values(known: Sequence[str] = ("a",)) -> st.SearchStrategy[object]:
    """What JSON can say, with known names as keys."""
    numbers = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 1e308]))
    plain = st.one_of(st.none(), st.booleans(), numbers, words(known))

    def within(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
        return st.one_of(st.lists(inner, max_size=4), st.dictionaries(words(known), inner, max_size=4))

    return st.recursive(plain, within, max_leaves=12)
