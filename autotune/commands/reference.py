"""docs/cli.md, written from the commands: `python -m autotune.commands.reference > docs/cli.md`."""

from __future__ import annotations

import click

from autotune.cli import COMMANDS, cli

HEADER = """# Command line

Written from the commands by `make docs`; a test fails when it is stale.
Each command also prints its own help: `autotune sweep --help`.

Exit codes: 0 done; 1 differences found, or checks failed; 2 wrong usage; 3 this
machine cannot do it (no TPU, no libtpu); 130 interrupted, with what to type to go on.
"""


def reference() -> str:
    """The page: every command's help, 80 columns wide."""
    parts = [HEADER]
    top = click.Context(cli, info_name="autotune", terminal_width=80, max_content_width=80)
    parts.append(f"## autotune\n\n```\n{cli.get_help(top)}\n```\n")
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command
        context = click.Context(command, info_name=name, parent=top, terminal_width=80, max_content_width=80)
        parts.append(f"## autotune {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    click.echo(reference(), nl=False)
