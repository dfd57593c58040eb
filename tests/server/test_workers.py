"""Worker threads of the server."""

import asyncio
import threading

import pytest
from starlette.requests import ClientDisconnect

from nbflow.server.workers import Gone, Workers, check_wanted


async def gone():
    return {"type": "http.disconnect"}


async def waits(condition):
    while not condition():
        await asyncio.sleep(0.001)


def test_who_hangs_up_frees_his_place():
    """Queued tasks of a disconnected client are dropped; running ones can notice it."""

    async def main():
        workers, begun, done = Workers(1), threading.Event(), []

        def long():
            begun.set()
            try:
                while True:
                    check_wanted()
            except Gone:
                done.append("long")
                raise

        first = asyncio.ensure_future(workers.run(long))
        await asyncio.to_thread(begun.wait)
        others = [asyncio.ensure_future(workers.run(done.append, i)) for i in range(3)]
        await waits(lambda: workers.n_waiting == 3)
        with pytest.raises(ClientDisconnect):
            await workers.run_for(gone, done.append, "gone")
        others[1].cancel()
        await waits(lambda: workers.n_waiting == 2)
        first.cancel()
        await asyncio.gather(others[0], others[2])
        assert done == ["long", 0, 2]
        assert await workers.end(60) == 0

    asyncio.run(main())


def test_results_and_errors_come_back():
    async def main():
        workers = Workers(2)
        assert await workers.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await workers.run(divmod, 7, 0)

        class PanicException(BaseException):
            pass

        def panic():
            raise PanicException("assertion failed")

        with pytest.raises(RuntimeError, match="assertion failed"):
            await workers.run(panic)
        assert await asyncio.gather(*(workers.run(abs, -i) for i in range(100))) == list(range(100))
        assert await workers.end(60) == 0

    asyncio.run(main())


def test_the_end_waits_for_no_stuck_thread():
    async def main():
        workers, begun, never = Workers(2), threading.Event(), threading.Event()

        def stuck():
            begun.set()
            never.wait()

        task = asyncio.ensure_future(workers.run(stuck))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        assert await workers.run(abs, -1) == 1
        assert await workers.end(0.01) == 1
        never.set()
        assert await workers.end(60) == 0

    asyncio.run(main())
