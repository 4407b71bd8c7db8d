"""`autotune calibrate`."""

from __future__ import annotations

import click

from autotune.cli.options import NamedFolder
from autotune.errors import UsageError
from autotune.io.folders import Folder
from autotune.io.terminal import shown


@click.command(epilog="Example: autotune calibrate results/measured")
@click.argument("folder", type=NamedFolder())
@click.option(
    "--device-kind", help="Only rows of this device, as JAX spells it. [default: each in the folder]"
)
@click.option("--dry-run", is_flag=True, help="Say what would be stored, and stop.")
def command(folder: Folder, device_kind: str | None, dry_run: bool) -> None:
    """Fit the cost model to the measured rows of a results folder.

    The constants are stored with their origin and error in the user's configuration folder; a sweep for that
    device predicts with them from then on. Rows that were modelled before keep their values and their model's
    name.
    """
    from autotune.model import calibrate
    from autotune.model.cost import CALIBRATIONS
    from autotune.results import dataset, schema
    from autotune.tpu import generations

    frame = dataset.read(folder)
    measured = frame[(frame["source"] == schema.MEASURED) & (frame["status"] == "ok")]
    kinds = sorted(measured["device_kind"].dropna().unique())
    if device_kind is not None and device_kind not in kinds:
        raise UsageError(
            f"{str(folder)!r} has no measured rows of {device_kind!r}: it has "
            + (", ".join(map(repr, kinds)) or "none of any device")
        )
    if not kinds:
        raise UsageError(f"{str(folder)!r} has no measured rows: they are made by a sweep on a TPU")
    for kind in [device_kind] if device_kind else kinds:
        found, unusable = calibrate.samples(frame, kind)
        if unusable:
            click.echo(
                f"{kind}: {unusable} measured rows left out: their schedule is in no row, or their batch "
                "cannot be made again",
                err=True,
            )
        versions = ", ".join(
            sorted({str(v) for v in measured.loc[measured["device_kind"] == kind, "libtpu"]})
        )
        default = CALIBRATIONS[generations.by_device_kind(kind).name]
        origin = f"fitted to {len(found)} measured rows of {kind}, libtpu {versions}"
        fitted = calibrate.fit(found, origin, default)
        click.echo(f"{kind}: {fitted.rows} rows of {fitted.programs} programs")
        for name, deviation in fitted.uncertainty.items():
            value, built_in = getattr(fitted.calibration, name), getattr(default, name)
            click.echo(f"  {name:20} {value:10.3g} +- {deviation:.1g}   (built in: {built_in:.3g})")
        click.echo(
            f"  error on programs left out of the fit: median {fitted.error:.1%}, p90 {fitted.error_p90:.1%} "
            f"(built in: median {fitted.before:.1%})"
        )
        if not dry_run:
            calibrate.store(kind, fitted)
    if not dry_run:
        click.echo(
            f"stored in {shown(calibrate.path())}; sweeps for this device use it from now on", err=True
        )
