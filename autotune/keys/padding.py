"""Heads that do not tile: the layouts that do, what each costs, and what serving must do to have it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autotune.errors import UsageError
from autotune.kernel.jax_rpa.tiling import HeadLayout, heads_per_blk, supported_layouts, sweep_key, why_not
from autotune.kernel.problem import Problem, TableKey, next_power_of_2
from autotune.keys.estimates import Estimate, Estimates


@dataclasses.dataclass(frozen=True)
class Option:
    """A layout that can be swept in place of a call's own.

    kv_ratio: bytes of the KV cache over those of the call's own layout, exact. q_ratio: query heads over the
    call's own. estimate: of its key; None where no program of it was compiled. target: the generation.
    """

    layout: HeadLayout
    key: TableKey
    kv_ratio: float
    q_ratio: float
    estimate: Estimate | None
    target: str | None

    @property
    def turns(self) -> int:
        """Blocks of heads, which the kernel runs one after the other; a key is of one of them."""
        return max(1, self.layout.num_kv_heads // self.key.num_kv_heads_per_blk)

    def time(self) -> str:
        """What a call takes with this layout, modelled; with its own there is no time, as it cannot run."""
        if self.target is None:
            return "its time: `autotune keys --target v6e ...`"
        if self.estimate is None:
            return (
                f"its time on {self.target} is not known: `autotune keys --target {self.target} ...` "
                "compiles for it"
            )
        blocks, seconds, origin = self.estimate
        return (
            f"modelled {self.turns * seconds * 1e6:.4g} us a call on {self.target} with {tuple(blocks)}, by "
            f"{origin}"
        )

    def cost(self) -> str:
        """Memory and time in a few words."""
        cache = "the same KV cache" if self.kv_ratio == 1 else f"{self.kv_ratio:.3g} times the KV cache"
        heads = "" if self.q_ratio == 1 else f", {self.q_ratio:.3g} times the query heads"
        return f"{cache}{heads}; {self.time()}"

    def advice(self, problem: Problem) -> str:
        """One line: what serving has to do to call the kernel with this layout in place of its own."""
        q, kv, layout = problem.num_q_heads, problem.num_kv_heads, self.layout
        if layout.num_q_heads == q:
            do = f"keep each KV head {layout.num_kv_heads // kv} times, so {layout.num_kv_heads} in all"
        else:
            do = f"pad q to {layout.num_q_heads} heads and KV pages to {layout.num_kv_heads} KV heads"
            group, wide = q // kv, layout.num_q_heads // layout.num_kv_heads
            if wide != group:
                do += f", {wide} query heads for each KV head in place of {group}"
            do += f", and drop the output of the added {layout.num_q_heads - q}"
        tiled = heads_per_blk(q, kv, problem.q_dtype, problem.kv_dtype) is not None
        why = "have a key that no padded shape has" if tiled else "do not tile"
        return f"{q} query and {kv} KV heads {why}; serving must {do}: {self.cost()}"


def head_dim_padding(problem: Problem) -> str:
    """What serving must do where head_dim is no multiple of 128, and what that costs; '' where it is one.

    The kernel repeats running sums of 128 lanes over head_dim, and asserts that they divide it.
    """
    padded = -(-problem.head_dim // 128) * 128
    if padded == problem.head_dim:
        return ""
    return (
        f"head_dim {problem.head_dim}: the kernel takes multiples of 128, so serving must pad q and KV pages "
        f"to {padded}, which makes the KV cache {padded / problem.head_dim:.3g} times as large"
    )


def options(problem: Problem, estimates: Estimates | None = None) -> list[Option]:
    """The layouts that can be swept in place of the problem's own, the cheapest in memory first; never none.

    Of a layout that tiles but has no key that a padded shape has too, the powers of two above it.
    """
    near = [HeadLayout(problem.num_q_heads, problem.num_kv_heads, "padded"), *supported_layouts(problem)]
    layouts = near[1:] + [_powers_of_2(layout) for layout in near if layout.how == "padded"]
    found: dict[TableKey, Option] = {}
    for layout in sorted(layouts, key=lambda layout: (layout.num_kv_heads, layout.num_q_heads)):
        key = _key(problem, layout)
        if key is not None and key not in found:
            found[key] = Option(
                layout,
                key,
                kv_ratio=layout.num_kv_heads / problem.num_kv_heads,
                q_ratio=layout.num_q_heads / problem.num_q_heads,
                estimate=estimates.best(key) if estimates else None,
                target=estimates.generation.name if estimates else None,
            )
    return list(found.values())


def _powers_of_2(layout: HeadLayout) -> HeadLayout:
    kv_heads = next_power_of_2(layout.num_kv_heads)
    group = next_power_of_2(layout.num_q_heads // layout.num_kv_heads)
    return HeadLayout(group * kv_heads, kv_heads, "padded")


def _key(problem: Problem, layout: HeadLayout) -> TableKey | None:
    """The key of the problem with another layout; None where it does not tile, or no padded shape has it."""
    q_heads, kv_heads = layout.num_q_heads, layout.num_kv_heads
    try:
        return sweep_key(dataclasses.replace(problem, num_q_heads=q_heads, num_kv_heads=kv_heads))
    except UsageError:
        return None


def nearest(choices: Sequence[Option]) -> Option:
    """The one that --pad-heads takes: the least KV cache, then the fewest query heads."""
    return choices[0]


def refusal(problem: Problem, choices: Sequence[Option], free: Sequence[tuple[int, int, int]] = ()) -> str:
    """Why no key can be tuned for these heads, and a line for each way out with what it would cost.

    free: (chips, query heads, KV heads) of divisions among other numbers of chips, which cost nothing.
    """
    lines = [f"{why_not(problem)}. What would do:"]
    if free:
        tp, q_heads, kv_heads = free[0]
        lines.append(
            f"--tp {','.join(str(chips) for chips, *_ in free)}, with nothing padded (--tp {tp}: {q_heads} "
            f"query and {kv_heads} KV heads on a chip)"
        )
    for option in choices:
        lines.append(
            f"{option.layout.num_kv_heads} KV and {option.layout.num_q_heads} query heads "
            f"({option.layout.how}: {option.cost()})"
            + ("; --pad-heads sweeps this" if option == nearest(choices) else "")
        )
    return "\n  ".join(lines)
