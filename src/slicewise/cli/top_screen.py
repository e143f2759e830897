"""The screen of `slicewise top`: totals, rates, free capacity by profile, each GPU as a strip."""

from __future__ import annotations

from collections import Counter, deque
from datetime import datetime
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slicewise.cli.formatting import holds_of, short

if TYPE_CHECKING:
    from slicewise.api.cluster import ClusterView
    from slicewise.api.nodes import GpuView, NodeView
    from slicewise.api.policy import PolicyStatus

DETAILED_GPUS = 1024
"""More GPUs than this are shown node by node."""
_WINDOW_SECONDS = 10.0
_CANDIDATES = 2
"""The best tables of a rehearsal that are listed."""
_COUNTED = {"allocated": "placed", "served": "placed", "ended": "ended", "rejected": "rejected"}
_COLOURS = {"1": "cyan", "2": "green", "3": "yellow", "4": "magenta", "7": "blue"}
_MARKS = {
    "foreign": ("x", "bright_black"),
    "stray": ("x", "bright_black"),
    "releasing": ("-", "bright_black"),
    "quarantined": ("!", "red"),
}
"""By phase of an instance: the mark shown in place of its profile's letter."""
_SIGNS = ("▏", "░", "█")
_PLAIN_SIGNS = ("|", ".", "=")


class EventRates:
    """Events per second over a sliding window."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._seen: deque[tuple[float, str]] = deque()
        self.stalled = False
        """Whether the event stream is disconnected."""

    def count(self, now: float, kind: str) -> None:
        """Count an event."""
        self.stalled = False
        if kind in _COUNTED:
            self._seen.append((now, _COUNTED[kind]))

    def rates(self, now: float) -> dict[str, float]:
        """Return events per second by outcome."""
        while self._seen and self._seen[0][0] < now - _WINDOW_SECONDS:
            self._seen.popleft()
        span = min(max(now - self._begin, 1.0), _WINDOW_SECONDS)
        counts = Counter(kind for _, kind in self._seen)
        return {kind: counts[kind] / span for kind in ("placed", "ended", "rejected")}


def screen(
    view: ClusterView,
    console: Console,
    rates: dict[str, float] | None = None,
    trouble: str = "",
    policy: PolicyStatus | None = None,
) -> RenderableType:
    """Lay out the overview; a terminal shows as many nodes as fit."""
    signs = _SIGNS if (console.encoding or "").startswith("utf") else _PLAIN_SIGNS
    used = view.slices - view.free_slices
    share = used / view.slices if view.slices else 0
    facts = [
        f"slicewise {datetime.now():%H:%M:%S}",
        f"{view.active_gpus} of {view.gpus} GPUs in use",
        f"{used}/{view.slices} slices ({share:.0%})",
        f"{view.instances} instances",
        f"{view.waiting} waiting",
        f"F {view.fragmentation.partial:.2f}",
        *(f"{rate:.1f}/s {kind}" for kind, rate in (rates or {}).items()),
        f"by {view.policy}",
        *_table_facts(policy),
    ]
    head = _flow(facts, console.width)
    if trouble:
        head.append("\n" + trouble, "bold red")
    left = Table(box=None, pad_edge=False)
    left.add_column("Model", no_wrap=True)
    left.add_column("Free", justify="right", no_wrap=True)
    left.add_column("Room for, by profile: GPUs that could take one")
    for model in view.models:
        # A profile with a plus is a variant of another one, with nearly the same figure.
        fits = (f"{name} {gpus}" for name, gpus in model.fits.items() if "+" not in name)
        free = f"{model.free_slices}/{model.slices}"
        left.add_row(Text(model.model), free, _flow(list(fits), console.width - 30))
    rows = _nodes(view, console.width, signs)
    expected = _expected(policy)
    top = Group(head, Text(), left, *expected, Text())
    if console.is_terminal:
        room = console.height - len(console.render_lines(top)) - 1
        rows = _fitting(rows, max(room, 1))
    return Group(top, *(row for _, row in rows))


def _table_facts(policy: PolicyStatus | None) -> list[str]:
    """Name the table that places requests, since when, and the rejections since then."""
    if policy is None or policy.table is None:
        return []
    words = [f"table {policy.table}" + (f" since {short(policy.since)}" if policy.since else "")]
    if policy.seen is not None and policy.seen.requests:
        words.append(f"{policy.seen.rejected / policy.seen.requests:.2%} rejected since then")
    return words


def _expected(policy: PolicyStatus | None) -> list[RenderableType]:
    """List the best tables of the last rehearsal, and the one in use, by expected rejections."""
    if policy is None or policy.rehearsal is None:
        return []
    candidates = sorted(policy.rehearsal.candidates, key=lambda one: one.rejected.value)
    kept = [
        one
        for place, one in enumerate(candidates)
        if place < _CANDIDATES or one.in_use or one.table == "least-lost"
    ]
    table = Table(box=None, pad_edge=False)
    table.add_column("Table", no_wrap=True)
    table.add_column("Expected to reject", justify="right", no_wrap=True)
    table.add_column("95% interval", no_wrap=True)
    for one in kept:
        figure = one.rejected
        table.add_row(
            Text(one.table, "bold" if one.in_use else ""),
            f"{figure.value:.3%}",
            f"{figure.low:.3%} to {figure.high:.3%}" + ("  in use" if one.in_use else ""),
        )
    return [Text(), table]


def _flow(parts: list[str], width: int) -> Text:
    """Lay out parts in lines; never break inside a part."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]}   {part}" if lines[-1] else part
        if len(longer) <= max(width, 1) or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return Text("\n".join(lines))


def _fitting(rows: list[tuple[str, Text]], room: int) -> list[tuple[str, Text]]:
    if len(rows) <= room:
        return rows
    shown = rows[: room - 1]
    hidden = {name for name, _ in rows[room - 1 :]}
    return [*shown, ("", Text(f"... and {len(hidden)} more nodes"))]


def _nodes(view: ClusterView, width: int, signs: tuple[str, str, str]) -> list[tuple[str, Text]]:
    """Draw the nodes: GPUs slice by slice, or a usage bar per node if there are too many."""
    widest = max((len(node.name) for node in view.nodes), default=0)
    if view.devices is None or view.gpus > DETAILED_GPUS:
        return [(node.name, _bar(node, widest, signs)) for node in view.nodes]
    by_node: dict[str, list[GpuView]] = {node.name: [] for node in view.nodes}
    for device in view.devices:
        by_node[device.node].append(device)
    rows = []
    for node in view.nodes:
        gpus = by_node[node.name]
        each = len(gpus[0].mask) + 1
        most = max((width - widest - 1) // each, 1)
        lines = -(-len(gpus) // most)
        a_line = -(-len(gpus) // lines)  # equal lines, instead of a short last one
        for begin in range(0, len(gpus), a_line):
            label = "" if begin else node.name
            line = Text(label.ljust(widest + 1), no_wrap=True)
            for gpu in gpus[begin : begin + a_line]:
                line.append(_strip(gpu, signs))
            if len(line) < width:
                line.append(signs[0])
            if not begin:
                line.append(_node_state(node), "bold")
            rows.append((node.name, line))
    return rows


def _bar(node: NodeView, widest: int, signs: tuple[str, str, str]) -> Text:
    edge, free, taken = signs
    cells = 32
    full = round(cells * (1 - node.free_slices / node.slices))
    line = Text(f"{node.name.ljust(widest)} {edge}", no_wrap=True)
    line.append(taken * full, "cyan")
    line.append(free * (cells - full), "dim")
    line.append(f"{edge} {node.free_slices}/{node.slices} free")
    line.append(_node_state(node), "bold")
    return line


def _node_state(node: NodeView) -> str:
    """Describe the state of a node that is not simply ready."""
    held = holds_of(node)
    return (f" {node.state}" if node.state != "ready" else "") + (f" held: {held}" if held else "")


def _strip(gpu: GpuView, signs: tuple[str, str, str]) -> Text:
    """A GPU: each instance begins with the first letter of its profile."""
    edge, free, taken = signs
    cells = [(free, "dim")] * len(gpu.mask)
    for instance in gpu.instances:
        letter = instance.profile[0]
        # Instances of other tenants show no details.
        colour = _COLOURS.get(letter, "red") if instance.allocation is not None else "bright_black"
        if instance.phase in _MARKS:
            letter, colour = _MARKS[instance.phase]
        for at in range(instance.start, instance.start + instance.size):
            cells[at] = (letter if at == instance.start else taken, colour)
    strip = Text(edge)
    for cell, style in cells:
        strip.append(cell, style)
    return strip
