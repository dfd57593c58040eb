"""Start, serve, and drain: from a configuration to an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn

import nbflow
from nbflow.distributed import Comm, SelfComm, world
from nbflow.engine.llm_engine import LLMEngine
from nbflow.engine.replicas.router import ReplicaRouter
from nbflow.engine.speculative.config import check_draft
from nbflow.server.app import make_app, with_middleware
from nbflow.server.checks import check_served
from nbflow.server.config import ModelOptions, ServerConfig
from nbflow.server.errors import ProtocolRouter
from nbflow.server.logs import logger, set_up
from nbflow.server.served_model import Models, ServedModel
from nbflow.server.signals import listen_to_signals
from nbflow.server.state import ServerState
from nbflow.server.stream import LoopBridge
from nbflow_kernels.errors import UsageError
from nbflow_kernels.plugins import load_plugins

_UNREAD_MS = 30_000
"""Milliseconds that sent data may stay unacknowledged before the kernel drops the connection."""
_FLUSH_S = 5.0
"""Seconds for clients to read their responses after the last request has finished."""
_WORKERS_STOP_S = 1.0
"""Seconds for worker threads to notice cancellation."""
_KEEP_ALIVE_S = 30
"""Idle seconds before a keep-alive connection is closed; connection pools use about as much."""
_MAX_HEADER_BYTES = 64 * 1024
"""Maximum size of the request line and headers."""


def serve(config: ServerConfig, extra_routers: Sequence[ProtocolRouter] = ()) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Under mpirun every rank calls it.  Rank 0 accepts requests; the others execute its steps.

    `extra_routers` are routes of other protocols.

    Raises
    ------
    UsageError
        If a model cannot be loaded, or the address is not free.
    """
    load_plugins(config.plugins)
    digests = config.auth.digests()
    comm = world()
    if comm.size > 1 and len(config.models) > 1:
        raise UsageError("with several MPI ranks one model can be served; start a server for each")
    listener, url = _open_listener(config, comm)
    if listener is None:
        _serve_worker_rank(config)
        return 0
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        loaded = [stack.enter_context(_served(n, config)) for n in config.models]
        models = Models(loaded, config.strict_model_names)
        _freeze_gc()
        listener.listen(config.limits.connections)  # before the line below announces the URL
        stop_fd = listen_to_signals()
        logger.info("serving", extra={"url": url, "keys": len(digests)})
        print(f"nbflow serves {', '.join(models.by_name)} at {url}", flush=True)
        n_stuck = asyncio.run(_run(config, models, digests, listener, stop_fd, extra_routers))
    logger.info("stopped")
    if n_stuck:
        _exit_now(comm)
    return 0


def _exit_now(comm: Comm) -> None:
    """Exit without joining worker threads that still run for disconnected clients."""
    if comm.size > 1:
        from mpi4py import MPI

        MPI.Finalize()  # otherwise the launcher reports a failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _open_listener(config: ServerConfig, comm: Comm) -> tuple[socket.socket | None, str]:
    """Set up logging and bind the address on rank 0; raise on every rank if that fails."""
    listener, url, failure = None, "", None
    if comm.rank == 0:
        try:
            set_up(config.log)
            listener = _listen(config.host, config.port)
            url = _url_of(listener)
        except (UsageError, OSError) as error:
            failure = str(error)
    failure = comm.bcast_object(failure)
    if failure is not None:
        raise UsageError(failure)
    return listener, url


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; it does not listen yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host {host!r}: {error.strerror}") from error
    if sys.platform != "win32":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # bounds how long unread data keeps a socket alive
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"{host}:{port} is not free ({error.strerror}); choose another --port"
        ) from error
    return sock


def _url_of(sock: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _served(name: str, config: ServerConfig) -> Iterator[ServedModel]:
    """Load a model and start its engine."""
    options = config.models[name]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(nbflow.load(options.path, options.load_options()))
        _check_first_rank(model)
        draft = stack.enter_context(_draft(options, model))
        engine = LLMEngine(model, options.engine.options())
        engine.start()
        try:
            served = ServedModel(name, options, model, engine, draft)
            check_served(served)
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
    """Load the draft model, if configured, on one rank: this process."""
    if options.draft is None or options.draft == "ngram":
        yield options.draft
        return
    with nbflow.load(
        options.draft,
        weights=options.draft_weights,
        kv=options.kv,
        state=options.state,
        activations=options.activations,
        device=options.device.split(",")[0],  # this rank's
        threads=model.threads,
        comm=SelfComm(),
    ) as draft:
        check_draft(draft, model, options.draft_verify)
        yield draft


def _freeze_gc() -> None:
    """Exempt loaded objects from garbage collection.

    A full collection would traverse about 300,000 of them and stall requests for 0.25 s.
    """
    gc.collect()
    gc.freeze()


def _warm_up(served: ServedModel) -> None:
    """Compile the kernels that most requests need."""
    prompt = [0, 0]
    greedy = served.model.make_request(
        prompt, 4, "greedy", 0, True, draft=served.draft, n_draft=served.options.n_draft
    )
    drawn = served.model.make_request(prompt, 2, "filters", 0, True, top_p=0.9)
    scored = served.model.make_request(prompt, 2, "greedy", 0, True)
    scored.n_top_logprobs = scored.prompt_logprobs = 1
    for request in (greedy, drawn, scored):
        served.engine.submit(request).result()


def _check_first_rank(model: nbflow.LLM) -> None:
    """Check on every rank that the partition begins with rank 0, which accepts requests."""
    if model.plan.numbers[0] != 0:
        raise UsageError(
            f"rank 0 takes the requests and must be the first of the partition, got "
            f"{model.plan.partition!r}; number the ranks so that it begins with 0"
        )


def _serve_worker_rank(config: ServerConfig) -> None:
    """Execute rank 0's steps until it shuts down."""
    (options,) = config.models.values()
    with nbflow.load(options.path, options.load_options()) as model:
        _check_first_rank(model)
        # launchers signal every rank: rank 0 drains and then stops the others
        listen_to_signals()
        if not model.participates:
            return
        engine = LLMEngine(model, options.engine.options())
        _freeze_gc()
        if isinstance(engine, ReplicaRouter) and engine.leads_replica:
            with _draft(options, model) as draft:
                engine.follow(draft if isinstance(draft, nbflow.LLM) else None)
        else:
            engine.follow()


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield


async def _run(
    config: ServerConfig,
    models: Models,
    digests: list[bytes],
    listener: socket.socket,
    stop_fd: int,
    extra_routers: Sequence[ProtocolRouter],
) -> int:
    """Serve until a signal, then drain; return the number of worker threads still running.

    `stop_fd` is the file descriptor of `nbflow.server.signals.listen_to_signals`.
    """
    loop = asyncio.get_running_loop()
    state = ServerState(config, models, LoopBridge(loop))
    limits = config.limits
    settings = uvicorn.Config(
        with_middleware(make_app(state, extra_routers), state, digests),
        http="h11",  # the parser of uvicorn that bounds the head
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        limit_concurrency=limits.connections + 1,  # uvicorn refuses from this number on
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=limits.connections,
        timeout_keep_alive=_KEEP_ALIVE_S,
        proxy_headers=False,  # any client could forge them
        timeout_graceful_shutdown=round(_FLUSH_S),
    )
    server = _Server(settings)
    stopping = asyncio.Event()

    def stop() -> None:
        loop.remove_reader(stop_fd)
        state.draining = True
        stopping.set()

    loop.add_reader(stop_fd, stop)  # readable once a signal has closed the other end
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stop_requested = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([serving, stop_requested], return_when=asyncio.FIRST_COMPLETED)
    stop_requested.cancel()
    if not serving.done():
        await _drain(state, server)
    await serving
    return await state.workers.end(_WORKERS_STOP_S)


async def _drain(state: ServerState, server: uvicorn.Server) -> None:
    """Wait for accepted requests, at most `limits.drain_s`, then stop the server."""
    logger.info("draining", extra={"requests": state.n_requests})
    deadline = time.monotonic() + state.config.limits.drain_s
    while state.n_requests and time.monotonic() < deadline and not server.should_exit:
        await asyncio.sleep(0.02)
    if state.n_requests:
        logger.warning("stopping with requests under way", extra={"requests": state.n_requests})
    for served in state.models.all:  # unfinished requests get an error response
        await _run_in_thread(served.engine.close)
    await asyncio.sleep(0.05)
    server.should_exit = True


async def _run_in_thread(call: Callable[[], None]) -> None:
    """Run a call in a dedicated thread and wait for it."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            call()
        finally:
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="nbflow-close", daemon=True).start()
    await done.wait()
