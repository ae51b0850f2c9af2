"""Which size of a pool would have done: what would wait at each, what was needed lately."""

from collections import defaultdict, deque

_LATE_ENOUGH = 20.0  # times what may wait
_NOTHING = 1e-6  # what rounding leaves of sums that go up and down


class VirtualQueues:
    """The prompt tokens that would wait now, had the pool had 1, 2, 3 ... workers: what arrived,
    less what so many can compute. Sizes at which nothing would wait are not kept. No queue is
    longer than some times what may wait: a size that was too small for hours is not so for hours
    after."""

    def __init__(self, most: int) -> None:
        """`most`: workers that the pool may have."""
        self._most = most
        self._tokens: list[float] = []

    def advance(self, arrived: float, each: float, may_wait: float) -> int:
        """`arrived` tokens came while a worker could compute `each`. Returns with how many workers
        at most `may_wait` tokens a worker would have waited meanwhile, on average; one more than
        may be had if those are not enough."""
        least, tokens = 1, []
        for size in range(1, self._most + 1):
            before = self._tokens[size - 1] if size <= len(self._tokens) else 0.0
            after = max(0.0, before + arrived - size * each)
            after = min(after, size * may_wait * _LATE_ENOUGH)
            if not before and not after:
                break
            tokens.append(after)
            if (before + after) / 2 > size * may_wait:
                least = size + 1
        self._tokens = tokens
        return least

    def correct(self, size: int, waiting: float) -> None:
        """So many tokens really wait at a size. With fewer workers it would not be less."""
        missing = [0.0] * (min(size, self._most) - len(self._tokens))
        self._tokens = [
            max(tokens, waiting) if index < size else tokens
            for index, tokens in enumerate(self._tokens + missing)
        ]


class RecentSizes:
    """The sizes that were needed at each look of the last `span` seconds, and whether too much
    waited then. Each look weighs as much as is given: the prompts that came, or its seconds."""

    def __init__(self, span: float) -> None:
        self.span = span
        self._looks: deque[tuple[float, int, float, bool]] = deque()
        self._weights: defaultdict[int, float] = defaultdict(float)  # by size
        self._total = self._late = 0.0

    def note(self, now: float, size: int, weight: float, is_late: bool) -> None:
        self._looks.append((now, size, weight, is_late))
        self._add(size, weight, is_late)
        while self._looks[0][0] < now - self.span:
            _, old_size, old_weight, was_late = self._looks.popleft()
            self._add(old_size, -old_weight, was_late)

    def _add(self, size: int, weight: float, is_late: bool) -> None:
        self._weights[size] += weight
        self._total += weight
        self._late += weight * is_late

    @property
    def late(self) -> float:
        """The share for which too much waited."""
        return self._late / self._total if self._total > _NOTHING else 0.0

    def least(self, share: float) -> int:
        """The size that would have done for so great a share; 0 if nothing came."""
        left = (1 - share) * self._total
        if self._total <= _NOTHING:
            return 0
        for size in sorted(self._weights, reverse=True):
            left -= self._weights[size]
            if left < -_NOTHING:
                return size
        return 0
