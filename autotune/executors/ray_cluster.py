"""A Ray cluster, as a sweep uses it: found or started, what it offers, and left again.

Ray is the extra [ray], and is imported inside functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import MachineError, UsageError, first_line
from autotune.io.terminal import INTERRUPTS

CONNECT_SECONDS = 10.0


def require_ray() -> None:
    """Raises MachineError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise MachineError("--executor ray needs Ray: pip install 'tpu-autotune[ray]'")


@contextlib.contextmanager
def connected(address: str) -> Iterator[str]:
    """Join a cluster, or start one; gives its address.

    address: auto, for the cluster that this machine is a node of; local, for one that is started here and
    ends with this process; or HOST:PORT of a cluster's head, of which this machine must be a node.

    Raises:
      MachineError: Ray is not installed, or there is no such cluster.
      UsageError: the address is none.
    """
    require_ray()
    if address not in ("auto", "local"):
        _require_answer(address)
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a thread that is late must not start a cluster of its own
    # Nothing is reported to Ray's makers of a cluster that this starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.CRITICAL}
    if address == "local":
        os.environ.update(_for_this_user_alone(os.environ))
        options["include_dashboard"] = False
    import ray

    try:
        with signals_held():
            try:
                ray.init(**options)
            except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
                raise MachineError(_no_cluster(address, error)) from None
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


_holding = False


def _for_this_user_alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables, to be set before Ray is imported, by which a cluster that is started here is nobody else's.

    Ray takes 127.0.0.1 for this machine's address in a network and listens on all, unless it is told that
    there are no clusters, as is the rule on Windows (ray/_private/services.py, get_node_ip_address). A token
    in the environment is in no file: Ray would leave one behind in the home folder that all may read
    (ray/_private/authentication/authentication_token_setup.py).
    """
    alone = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    if not any(name in environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        alone |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return alone


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Answer a Ctrl-C and the like only once a block is through, by the handlers of before.

    Ray's handlers leave at once, with an exit code of their own, and those of its C++ abort. Threads that are
    started meanwhile never get these signals; processes do, but are a group of their own, so that what is
    sent to this process's group does not end a cluster that is half started.
    """
    global _holding
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _mind_children()
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    _holding = True
    try:
        yield
    finally:
        _holding = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # raises what the handler of a held one raises


@functools.cache
def _mind_children() -> None:
    os.register_at_fork(after_in_child=_as_child)


def _as_child() -> None:
    if _holding:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def cpus() -> int:
    """The CPUs of the cluster, over all its nodes."""
    import ray

    return int(ray.cluster_resources().get("CPU", 0))


def answers(address: str, seconds: float = 2.0) -> bool:
    """Whether something listens at an address HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError:
        return False
    return True


def _require_answer(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or "/" in address:
        raise UsageError(f"--ray-address {address!r} is not auto, local or the head's HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise MachineError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


def _no_cluster(address: str, error: Exception) -> str:
    if address == "auto" and isinstance(error, ConnectionError):
        return (
            "this machine is not a node of a Ray cluster: start one (ray start --head), join one "
            "(ray start --address HEAD:6379), or take --ray-address local"
        )
    return f"the Ray cluster ({address}) cannot be joined from this machine: {first_line(error)[:300]}"
