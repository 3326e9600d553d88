"""The text of one request as it comes."""

from __future__ import annotations

from collections.abc import Iterator

from dsc.runtime.errors import DscError
from dsc.runtime.loop import Loop
from dsc.runtime.request import Output, Request


class Stream:
    """The text of one request as it comes: pieces of whole characters, never the beginning of a stop string.

    `output` is there once it ended; `close` (or dropping the stream) lets the request go.
    """

    def __init__(self, loop: Loop, request: Request) -> None:
        self._loop, self._request = loop, request
        self._given = 0
        loop.submit(request)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while True:
            if self._given < len(self._request.pieces):
                self._given += 1
                return self._request.pieces[self._given - 1]
            if self._request.finished:
                if self._request.error:
                    raise DscError(self._request.error)
                raise StopIteration
            self._loop.drive(self._request)

    @property
    def output(self) -> Output:
        """The whole result of a stream that ended. Raises DscError before that."""
        if not self._request.finished:
            raise DscError("the stream has not ended", try_="iterate over it, or close it")
        return self._request.output()

    def close(self) -> None:
        """Stop generating."""
        self._loop.cancel(self._request)

    def __del__(self) -> None:
        self.close()
