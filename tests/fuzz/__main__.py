"""python -m tests.fuzz: many inputs for each target, what they found, and how to see it again."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from tests.fuzz import child, listings
from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS


@click.command(epilog="Example: python -m tests.fuzz --target table --inputs 100000 --jobs 2")
@click.option("--target", "names", type=click.Choice(list(TARGETS)), multiple=True, help="[default: all]")
@click.option(
    "--inputs", type=click.IntRange(min=1), default=100_000, show_default=True, help="For each target."
)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--jobs", type=click.IntRange(1, 64), default=1, show_default=True, help="Processes side by side."
)
@click.option(
    "--replay", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Run one kept input."
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/fuzz"),
    help="Where finds go.",
)
def main(names: tuple[str, ...], inputs: int, seed: int, jobs: int, replay: Path | None, out: Path) -> None:
    """Give readers of others' files hostile inputs; exit code 1 if any is answered wrongly."""
    if replay is not None:
        [name] = names or (replay.parent.name,)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            found = child.one(TARGETS[name], replay.read_bytes(), Path(folder), None)
        click.echo(f"{replay}: {found or 'answered as it should be'}")
        sys.exit(1 if found else 0)
    listings.prepare()
    total = 0
    click.echo(f"{'target':12} {'inputs':>8} {'seconds':>8} {'finds':>6}")
    for name in names or TARGETS:
        outcome = run(name, inputs, seed, jobs)
        total += len(outcome.finds)
        click.echo(f"{name:12} {inputs:>8} {outcome.seconds:>8.0f} {len(outcome.finds):>6}")
        make = TARGETS[name].inputs()
        for numbers in outcome.kinds().values():
            said = dict(outcome.finds)[numbers[0]]
            path = out / name / f"{seed}-{numbers[0]}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(make(seed, numbers[0]))
            click.echo(f"  {len(numbers)} times {said}")
            click.echo(f"    python -m tests.fuzz --replay {path}")
        sys.stdout.flush()
    sys.exit(1 if total else 0)


if __name__ == "__main__":
    main()
