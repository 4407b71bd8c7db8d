"""docs/cli.md, written from the commands: `python -m autotune.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from autotune.cli.main import COMMANDS, cli

HEADER = """# Command line

Written from the commands by `make docs`; a test fails when it is stale.
Each command also prints its own help: `autotune sweep --help`.

Exit codes: 0 done; 1 differences found, or checks failed; 2 wrong usage; 3 this
machine cannot do it (no TPU, no libtpu); 130 interrupted, with what to type to go on.
"""


def reference() -> str:
    """The page: every command's help, 80 columns wide."""
    parts = [HEADER]
    # Named here as when it runs: a command keeps the help option of the first context that it is in.
    names = cli.context_settings["help_option_names"]
    top = click.Context(
        cli, info_name="autotune", terminal_width=80, max_content_width=80, help_option_names=names
    )
    parts.append(f"## autotune\n\n```\n{cli.get_help(top)}\n```\n")
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command
        parts += _of(command, name, top)
    return "\n".join(parts)


def _of(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    """A command's section, and those of the commands inside it."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=80, max_content_width=80)
    yield f"## {context.command_path}\n\n```\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found
            yield from _of(found, inner, context)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
