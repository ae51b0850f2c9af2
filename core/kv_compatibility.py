"""Which differences between two workers KV may cross: one rule for router, P and D.

Every worker describes itself as a map of names to values. Fields must be equal, but for those
whose difference the hand-over bridges; these have a rule of their own.
"""

from collections.abc import Callable, Mapping


def _one_divides_the_other(ours: str, theirs: str) -> bool:
    small, large = sorted((int(ours), int(theirs)))
    return small > 0 and large % small == 0


def _is_a_degree(ours: str, theirs: str) -> bool:
    """Heads are sliced as needed; that a degree suits the model is checked where it is used."""
    return int(ours) > 0 and int(theirs) > 0


_RULES: dict[str, Callable[[str, str], bool]] = {
    "block_size": _one_divides_the_other,
    "tensor_parallel_size": _is_a_degree,
}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Names of the fields that keep KV from passing, in order; none: the two can be a pair. A
    field that only one side has is a difference."""
    return [name for name in sorted({*ours, *theirs}) if not _agree(name, ours, theirs)]


def _agree(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> bool:
    a, b = ours.get(name), theirs.get(name)
    if a == b:
        return True
    if a is None or b is None or name not in _RULES:
        return False
    try:
        return _RULES[name](a, b)
    except ValueError:
        return False
