"""`autotune cache`."""

from __future__ import annotations

import shutil

import click

from autotune.io.terminal import shown


@click.command(epilog="Example: autotune cache --clear")
@click.option("--clear", is_flag=True, help="Forget everything.")
def command(clear: bool) -> None:
    """Show or empty the store of compile results.

    Sweeps of one user share it: a program compiled once with the same versions of jax, jaxlib, libtpu and
    the kernel is not compiled again, whatever results folder it is for. On a TPU host it also has the
    programs that JAX compiled in processes that hold a chip. Deleting it costs compiles, no rows.
    """
    from autotune.compile.cache import Store, default_path
    from autotune.timing.device_process import programs_folder

    store = Store(default_path())
    programs = programs_folder()
    if clear:
        store.clear()
        shutil.rmtree(programs, ignore_errors=True)
        click.echo(f"{shown(store.path)}: empty")
        return
    if programs.is_dir():
        sizes = [path.stat().st_size for path in programs.iterdir() if path.is_file()]
        click.echo(f"{shown(programs)}: {len(sizes)} files, {sum(sizes) / 2**20:.0f} MiB")
    lines = store.lines()
    if store.broken:
        click.echo(
            f"{shown(store.path)} cannot be used ({store.broken}): `autotune cache --clear` makes a new one"
        )
        return
    click.echo(f"{shown(store.path)}: {sum(line.verdicts for line in lines)} compile results")
    for line in lines:
        click.echo(f"{line.target}: {line.verdicts}, {line.compile_seconds:.0f} s of compiling, {line.tools}")
