"""Rows of the tables, given to requests."""


class Rows:
    """Gives rows to requests. A request is known by its first block, which it keeps as long as it lives.

    vLLM does not tell a backend when a request ends. It schedules all running requests before it admits a new one, so
    the row that has not been used for the longest time is free as soon as there are more rows than running requests.

    Args:
        count: number of rows, more than requests that run at once.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._rows: dict[int, int] = {}  # by key, least recently used first

    def of(self, key: int, begins: bool) -> int:
        """The row of a request.

        Raises:
            RuntimeError: it does not begin, and has none.
        """
        row = self._rows.pop(key, None)
        if row is None:
            if not begins:
                raise RuntimeError(
                    "paged_eviction: a request goes on that has not been seen from its beginning. Was it moved here by "
                    "a feature that loads blocks? Leave that feature out."
                )
            if not self._free:
                self._free.append(self._rows.pop(next(iter(self._rows))))
            row = self._free.pop()
        self._rows[key] = row
        return row
