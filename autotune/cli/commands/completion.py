"""`autotune completion`."""

from __future__ import annotations

import click

from autotune.cli.completing import COMPLETE_VARIABLE


@click.command(epilog="Example: autotune completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def command(shell: str) -> None:
    """Print the script by which a shell completes autotune's words.

    Commands, options, generations, presets, workloads, tables and files complete. To install it, for good:

    \b
    bash  autotune completion bash >> ~/.bashrc
    zsh   autotune completion zsh >> ~/.zshrc
    fish  autotune completion fish > ~/.config/fish/completions/autotune.fish

    then start a new shell. In bash, for this shell only: `eval "$(autotune completion bash)"`. bash must be
    4.4 or newer; in zsh, `autoload -Uz compinit && compinit` must come before.
    """
    from click.shell_completion import get_completion_class

    program = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind  # click has all three
    click.echo(kind(program, {}, "autotune", COMPLETE_VARIABLE).source())
