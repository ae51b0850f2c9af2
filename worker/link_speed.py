"""How fast this worker pulls KV from each peer."""

from collections import OrderedDict

_DECAY = 0.8  # of what came before, with each pull
_MAX_PEERS = 256


class LinkSpeeds:
    """Moving bytes a second by the peer's incarnation; the peers pulled from last are kept."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def note(self, incarnation: str, num_bytes: int, seconds: float) -> None:
        """One pull. Those of no time or no bytes say nothing."""
        if num_bytes <= 0 or seconds <= 0:
            return
        old_bytes, old_seconds = self._sums.pop(incarnation, (0.0, 0.0))
        self._sums[incarnation] = (
            _DECAY * old_bytes + num_bytes,
            _DECAY * old_seconds + seconds,
        )
        if len(self._sums) > _MAX_PEERS:
            self._sums.popitem(last=False)

    def items(self) -> list[tuple[str, float]]:
        return [(name, size / seconds) for name, (size, seconds) in self._sums.items()]
