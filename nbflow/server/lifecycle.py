"""From a configuration to a server that runs, and to its end without losing what it accepted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn

import nbflow
from nbflow.distributed import Comm, SelfComm, world
from nbflow.engine.llm_engine import LLMEngine
from nbflow.engine.replicas.router import ReplicaRouter
from nbflow.engine.speculative.config import check_draft
from nbflow.server.addresses import listen, url_of
from nbflow.server.app import around, make_app
from nbflow.server.config import ModelOptions, ServerConfig
from nbflow.server.logs import logger, set_up
from nbflow.server.served_model import Models, ServedModel
from nbflow.server.signals import listen as listen_to_signals
from nbflow.server.state import ServerState
from nbflow.server.stream import LoopBridge
from nbflow_kernels import load_formats
from nbflow_kernels.errors import UsageError

_LAST_S = 5.0
"""Seconds for connections to take what has been sent, after the last request has ended."""
_WORKERS_END_S = 1.0
"""Seconds for threads to see that what they prepare is not wanted any more."""
_KEEP_ALIVE_S = 30
"""Seconds a connection is kept between requests; clients pool theirs for about as long."""
_HEAD_BYTES = 64 * 1024
"""Longest head of a request."""


def serve(config: ServerConfig) -> int:
    """Serve until a signal says to stop; return the exit code.

    Under mpirun every rank calls it.  Rank 0 takes the requests; the others do its steps.

    Parameters
    ----------
    config : ServerConfig
        What to serve and how.

    Raises
    ------
    UsageError
        If a model cannot be loaded, or the address is not free.
    """
    for file in config.formats:
        load_formats(file)
    digests = config.auth.digests()
    comm = world()
    if comm.size > 1 and len(config.models) > 1:
        raise UsageError("with several MPI ranks one model can be served; start a server for each")
    listener, url = _begin(config, comm)
    if listener is None:
        _follow(config)
        return 0
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        models = Models([stack.enter_context(_served(n, config)) for n in config.models])
        _spare_collector()
        listener.listen(config.limits.connections)  # who reads the next line can connect
        told = listen_to_signals()
        logger.info("serving", extra={"url": url, "keys": len(digests)})
        print(f"nbflow serves {', '.join(models.by_name)} at {url}", flush=True)
        n_stuck = asyncio.run(_run(config, models, digests, listener, told))
    logger.info("stopped")
    if n_stuck:
        _leave(comm)
    return 0


def _leave(comm: Comm) -> None:
    """End the process without its threads: some are still at work for clients that are gone."""
    if comm.size > 1:
        from mpi4py import MPI

        MPI.Finalize()  # as at an ordinary end, or the launcher takes this for a failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _begin(config: ServerConfig, comm: Comm) -> tuple[socket.socket | None, str]:
    """Open the log and take the address, on rank 0; raise on every rank if that fails."""
    listener, url, failure = None, "", None
    if comm.rank == 0:
        try:
            set_up(config.log)
            listener = listen(config.host, config.port)
            url = url_of(listener)
        except (UsageError, OSError) as error:
            failure = str(error)
    failure = comm.bcast_object(failure)
    if failure is not None:
        raise UsageError(failure)
    return listener, url


@contextlib.contextmanager
def _served(name: str, config: ServerConfig) -> Iterator[ServedModel]:
    """Load a model and start its engine."""
    options = config.models[name]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(nbflow.load(options.path, options.load_options()))
        _check_ranks(model)
        draft = stack.enter_context(_draft(options, model))
        engine = LLMEngine(model, options.engine.options())
        engine.start()
        try:
            served = ServedModel(name, options, model, engine, draft)
            loaded = time.monotonic()
            if config.warmup and served.generates:
                _warm_up(served)
            logger.info(
                "model ready",
                extra={
                    "model": name,
                    "load_s": round(loaded - started, 3),
                    "warmup_s": round(time.monotonic() - loaded, 3),
                },
            )
            yield served
        finally:
            engine.close()


@contextlib.contextmanager
def _draft(options: ModelOptions, model: nbflow.LLM) -> Iterator[nbflow.LLM | str | None]:
    """Load the model that proposes tokens, if there is one, in this process alone."""
    if options.draft is None or options.draft == "ngram":
        yield options.draft
        return
    with nbflow.load(
        options.draft,
        weights=options.draft_weights,
        kv=options.kv,
        activations=options.activations,
        device=options.device.split(",")[0],  # this rank's
        threads=model.threads,
        comm=SelfComm(),
    ) as draft:
        check_draft(draft, model, options.draft_verify)
        yield draft


def _spare_collector() -> None:
    """Keep Python's garbage collector from going through what was loaded, which stays.

    These are some 300,000 objects, and all requests would wait for it for a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def _warm_up(served: ServedModel) -> None:
    """Let everything that most requests need be compiled."""
    prompt = [0, 0]
    greedy = served.model.make_request(
        prompt, 4, "greedy", 0, True, draft=served.draft, n_draft=served.options.n_draft
    )
    drawn = served.model.make_request(prompt, 2, "filters", 0, True, top_p=0.9)
    told = served.model.make_request(prompt, 2, "greedy", 0, True)
    told.n_top_logprobs = told.prompt_logprobs = 1
    for request in (greedy, drawn, told):
        served.engine.submit(request).result()


def _check_ranks(model: nbflow.LLM) -> None:
    """Rank 0 takes the requests: every model must begin there.  Every rank checks it."""
    if model.plan.numbers[0] != 0:
        raise UsageError(
            f"rank 0 takes the requests and must be the first of the partition, got "
            f"{model.plan.partition!r}; number the ranks so that it begins with 0"
        )


def _follow(config: ServerConfig) -> None:
    """Do the steps that rank 0 says, until it says that there are no more."""
    (options,) = config.models.values()
    with nbflow.load(options.path, options.load_options()) as model:
        _check_ranks(model)
        # launchers send signals to every rank; the first one is rank 0's to answer, which then
        # ends the others
        listen_to_signals()
        if not model.participates:
            return
        engine = LLMEngine(model, options.engine.options())
        _spare_collector()
        if isinstance(engine, ReplicaRouter) and engine.leads_replica:
            with _draft(options, model) as draft:
                engine.follow(draft if isinstance(draft, nbflow.LLM) else None)
        else:
            engine.follow()


class _Server(uvicorn.Server):
    """uvicorn's server, with signals left to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


async def _run(
    config: ServerConfig,
    models: Models,
    digests: list[bytes],
    listener: socket.socket,
    told: int,
) -> int:
    """Serve until told to stop, then finish what was accepted; return how many threads are left.

    `told` is the file descriptor of `nbflow.server.signals.listen`.
    """
    loop = asyncio.get_running_loop()
    state = ServerState(config, models, LoopBridge(loop))
    limits = config.limits
    settings = uvicorn.Config(
        around(make_app(state), state, digests),
        http="h11",  # the parser of uvicorn that bounds the head
        h11_max_incomplete_event_size=_HEAD_BYTES,
        limit_concurrency=limits.connections + 1,  # uvicorn refuses from this number on
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=limits.connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        proxy_headers=False,  # any client could send them
        timeout_graceful_shutdown=round(_LAST_S),
    )
    server = _Server(settings)
    stopping = asyncio.Event()
    _when_ended(loop, told, lambda: _stop(state, stopping))
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    told_to_stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([serving, told_to_stop], return_when=asyncio.FIRST_COMPLETED)
    told_to_stop.cancel()
    if not serving.done():
        await _drain(state, server)
    await serving
    return await state.workers.end(_WORKERS_END_S)


def _stop(state: ServerState, stopping: asyncio.Event) -> None:
    """Begin to stop."""
    state.draining = True
    stopping.set()


async def _drain(state: ServerState, server: uvicorn.Server) -> None:
    """Let accepted requests finish, then the server stop."""
    logger.info("draining", extra={"requests": state.n_requests})
    deadline = time.monotonic() + state.config.limits.drain_s
    while state.n_requests and time.monotonic() < deadline and not server.should_exit:
        await asyncio.sleep(0.02)
    if state.n_requests:
        logger.warning("stopping with requests under way", extra={"requests": state.n_requests})
    for served in state.models.all:  # what is left ends with an error that says why
        await _in_own_thread(served.engine.close)
    await asyncio.sleep(0.05)
    server.should_exit = True


async def _in_own_thread(call: Callable[[], None]) -> None:
    """Make a call in a thread that nothing else has work for."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        finally:
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="nbflow-close", daemon=True).start()
    await done.wait()


def _when_ended(loop: asyncio.AbstractEventLoop, file: int, call: Callable[[], None]) -> None:
    """Make a call on the loop when a file descriptor comes to its end."""

    def ended() -> None:
        loop.remove_reader(file)
        call()

    loop.add_reader(file, ended)
