"""The `autotune` command: commands are loaded when they are asked for, and errors become one line.

Importing jax or pandas costs a second, so neither this module nor those of the commands import them before a
command runs; help texts and usage errors are there at once.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import importlib
import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

import click
from click.shell_completion import shell_complete

from autotune import __version__
from autotune.cli.completing import COMPLETE_VARIABLE
from autotune.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_USAGE, AutotuneError, did_you_mean
from autotune.io.terminal import INTERRUPTS, closed, unfailing
from autotune.tpu import environment

# In the order of `autotune --help`: as one meets them.
COMMANDS = {
    "sweep": "Try block sizes on a TPU, or for one that is not here, and record every result.",
    "show": "Print the winners of a results folder.",
    "report": "Write a page about results folders that opens in a browser.",
    "emit": "Write the Python table of tuned block sizes.",
    "results": "List, export, merge or compact results folders.",
    "calibrate": "Fit the cost model to measured rows of a device.",
    "keys": "Print the keys that models and shapes stand for.",
    "lookup": "Explain what block sizes a call gets, and why.",
    "check": "Check a table: keys no call finds, entries that do not fit or are slow.",
    "diff": "Compare tables, and say what each one's choices cost.",
    "cache": "Show or empty the store of compile results.",
    "confirm": "Check on a TPU, in ten minutes, what was never run on one.",
    "doctor": "Say what works on this machine, what does not, and what to type.",
    "completion": "Print the script by which a shell completes autotune's words.",
}


class _Commands(click.Group):
    """Loads a command's module when it is asked for; lists them without loading any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"autotune.cli.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not (name in COMMANDS or name.startswith("-") or ctx.resilient_parsing):
            ctx.fail(f"No such command {name!r}.{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: autotune sweep --target v6e --preset smoke --out results/first",
)
@click.version_option(__version__, prog_name="autotune")
def cli() -> None:
    """Find block sizes for JAX's ragged paged attention kernel on TPUs, and publish them as a table.

    A sweep records rows to parquet; tables are made from rows. With a --target, the real TPU compiler and a
    cost model over its schedule stand in for the TPU, and every row and table says so.
    """


def main() -> NoReturn:
    """Run the command line, and end this process."""
    # Importing jax and pandas makes many objects, and all of them stay: collecting took 7% of a look-up.
    gc.set_threshold(100_000, 50, 50)
    if code := run():
        _leave(code)
    sys.exit(0)


def run() -> int:
    """Run the command line; exit codes: 0 done, 1 differences or failed checks, 2 wrong usage, 3 this machine
    cannot do it, 130 interrupted."""
    _listen()
    environment.set_aside()
    sys.unraisablehook = _unraisable
    _open_standard_streams()
    try:
        if instruction := os.environ.get(COMPLETE_VARIABLE):
            sys.exit(shell_complete(cli, {}, "autotune", COMPLETE_VARIABLE, instruction))
        # Not cli.main, which answers a closed pipe with 1.
        try:
            with cli.make_context("autotune", sys.argv[1:]) as context:
                code: Any = cli.invoke(context)
        except click.exceptions.Exit as done:
            code = done.exit_code
        sys.stdout.flush()
        _deafen()  # what was asked for is done
    except (KeyboardInterrupt, click.exceptions.Abort):
        _deafen()  # it is leaving already
        click.echo("interrupted", err=True)
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except AutotuneError as error:
        click.echo(f"Error: {error}", err=True)
        code = error.exit_code
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        _forget_standard_output()
        code = 0
    except OSError as error:  # the machine's own refusals, such as of a folder that is not the user's
        _forget_standard_output()
        where = f"{str(error.filename)!r}: " if error.filename else ""
        click.echo(f"Error: {where}{error.strerror or error}", err=True)
        code = EXIT_USAGE
    except Exception as error:  # a defect, unless jax is not one that this can work with
        if (why := _unfit(error)) is None:
            raise
        click.echo(f"Error: {why}: `autotune doctor` says what to type", err=True)
        code = EXIT_MACHINE
    finally:
        _deafen()  # it is leaving, if need be by SystemExit: Python's own exit would die of a Ctrl-C
    return code if isinstance(code, int) else 0


def _leave(code: int) -> NoReturn:
    """End here and now: where a Ctrl-C broke off an import of jax, Python's own ending can crash, and threads
    of C++ that an error left running can abort it."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _unfit(error: Exception) -> str | None:
    """Why the installed packages are to blame for an error, in one line; None if they are not known to be."""
    from autotune.io import installed

    if why := installed.misfit():
        return why
    if isinstance(error, ImportError) and not (error.name or "autotune").startswith("autotune"):
        return f"{error.name} cannot be imported ({str(error).splitlines()[0]})"
    return None


def _unraisable(unraisable: Any) -> None:
    """Deliver a Ctrl-C anew that came where Python cannot raise it, such as in a callback of its gc."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGINT, _interrupt)  # which has deafened itself
        _interrupt_soon(signal.SIGINT)
    else:
        sys.__unraisablehook__(unraisable)


def _open_standard_streams() -> None:
    """Put /dev/null in place of closed standard streams, or other files would take their numbers.

    What is said to a closed standard error is lost, and work goes on. To print to a closed standard output is
    an error, as what was asked for is lost. Characters that its encoding does not have are escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = closed(1)
    elif sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    replaced = sys.stderr is not sys.__stderr__  # as by redirect_stderr
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if not replaced:
        sys.stderr = unfailing(sys.stderr)


def _forget_standard_output() -> None:
    """Keep Python from trying, as it exits, to write what cannot be written."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _listen() -> None:
    """Leave as for Ctrl-C, with everything recorded, when a preempted host sends SIGTERM, a terminal is
    closed, or on Ctrl-\\. What is ignored, as under nohup, stays ignored."""
    for number in INTERRUPTS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)


def _deafen() -> None:
    """Ignore Ctrl-C and the like from here on."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Leave, once: a further Ctrl-C would break off the ending of workers and of files."""
    if _importing(frame):
        _interrupt_soon(signum)
        return
    _deafen()
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported: jaxlib aborts the process if it is interrupted in that."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _interrupt_soon(signum: int) -> None:
    # From a thread, and a little later: at once, it would be raised in the same place again.
    threading.Timer(0.05, _thread.interrupt_main, [signum]).start()
