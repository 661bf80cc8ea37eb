"""What ranks tell one another: small texts and whole run files, on the TCPStore that torchrun's agent serves.

No collective is used. A rank that is gone makes a gather of gloo or NCCL wait (gloo connects lazily and ignores the
time-out then, pytorch/gloo 520), and what is gathered here is some hundred KB a rank, once. Nothing here waits for a
rank: every read answers at once, and the store is served by torchrun's agent, which outlives the ranks of its host.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from dieplace.binding.ranks import Launched
from dieplace.errors import BackendError

PIECE_BYTES = 1 << 20  # torch's libuv store refuses a value over 8 MiB and drops the connection
ANSWER_S = 20.0
T = TypeVar("T")


class StoreGone(BackendError):
    """The store does not answer: torchrun itself was killed, or the host that serves it is down."""

    word = "store-gone"


class Board:
    """The notices of one launch; every restart by torchrun begins with an empty one."""

    def __init__(self, launched: Launched) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a store that goes away prints a C++ backtrace a call
        from torch.distributed import PrefixStore, TCPStore

        self._where = f"{launched.address}:{launched.port}"
        serve = launched.rank == 0 and not launched.served
        wait = timedelta(seconds=ANSWER_S)
        store = self._asked(
            lambda: TCPStore(launched.address, launched.port, None, serve, timeout=wait, wait_for_workers=False)
        )
        self._store: Any = PrefixStore(f"dieplace/{launched.run_id}/{launched.attempt}", store)

    def agree(self, key: str, mine: str) -> str:
        """What stands under `key`: `mine` where nobody was there before."""
        return str(self._asked(lambda: self._store.compare_set(key, "", mine)), "utf-8")

    def tell(self, key: str, notice: Any) -> None:
        """Put up plain data, in place of what stood there."""
        text = json.dumps(notice, allow_nan=False)
        self._asked(lambda: self._store.set(key, text))

    def seen(self, key: str) -> Any:
        """The data under `key`, None where there is none."""
        found = self._asked(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if found is None else json.loads(found)

    def send(self, key: str, text: str) -> None:
        """Put up a long text, in pieces; whole once `fetch` finds it."""
        packed = zlib.compress(text.encode())
        pieces = [packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self._asked(lambda n=number, p=piece: self._store.set(f"{key}/{n}", p))  # type: ignore[misc]
        self.tell(key, len(pieces))

    def fetch(self, key: str) -> str | None:
        """A text that was sent whole, else None."""
        count = self.seen(key)
        if count is None:
            return None
        pieces = [self._asked(lambda n=number: self._store.get(f"{key}/{n}")) for number in range(count)]  # type: ignore[misc]
        return zlib.decompress(b"".join(pieces)).decode()

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (
            RuntimeError
        ) as error:  # torch.distributed's DistNetworkError, DistStoreError and others are RuntimeErrors
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise StoreGone(
                f"torchrun's store at {self._where} does not answer: {first}",
                hint="was torchrun ended? Start it again; what ranks have saved stays in their folders",
            ) from error
