"""A report as tables in the terminal."""

from rich.box import SIMPLE
from rich.table import Table

from tico_ssl.bench import Report
from tico_ssl.runtime.fallbacks import sentence
from tico_ssl.runtime.progress import console, say
from tico_ssl.runtime.wording import counted


def print_report(report: Report) -> None:
    """Print ceilings, measured throughput and the comparison with another library."""
    ceilings, roof = report.ceilings, report.roofline
    size = f"{report.image_size} px, batch {report.batch}, {report.precision}"
    say(f"recipe     {report.recipe}: {report.network}, {size}")
    say(f"device     {report.device}")
    say(f"images     {report.images}")
    say(
        f"ceilings   {ceilings.flops_per_second / 1e12:,.3g} TFLOP/s in matmuls, "
        f"{ceilings.bytes_per_second / 1e9:,.3g} GB/s in copies, both measured"
    )
    say(
        f"roofline   {roof.images_per_second:,.0f} images/s: a step takes {roof.gflop:.3g} GFLOP and moves "
        f"{roof.megabytes:,.3g} MB per image; {roof.limited_by_memory:.0%} of the time is memory-bound"
    )
    console.print(_steps(report))
    if report.doubt is not None:
        say(f"note       {report.doubt}")
    _say_feeding(report)
    for rival in report.against:
        console.print(_comparison(report, rival))
    if report.methods:
        console.print(_methods(report))
    for name, reason in report.methods_left_out.items():
        say(f"{name}: not measured, {reason}")
    for what, reason in report.fallbacks.items():
        say(f"warning: {sentence(what, reason)}")


def _say_feeding(report: Report) -> None:
    """How fast the user's images come, what bounds training, and what would help."""
    feeding = report.feeding
    if feeding is None or report.bound is None:
        return
    if feeding.decoded is not None and feeding.decoded_by_all is not None and feeding.cropped is not None:
        by_all = f"{feeding.decoded_by_all:,.0f} by {feeding.workers}"
        sampled = counted(feeding.sampled, "image")
        say(f"decoding   {feeding.decoded:,.0f} images/s by one process, {by_all}; {sampled} sampled")
        say(f"cropping   {feeding.cropped:,.0f} images/s by one process, from decoded pixels")
    if feeding.from_memory is not None:
        say(f"memory     {feeding.from_memory:,.0f} images/s by the loader, once images are decoded")
    shared = "; workers and step share the cores" if report.device.endswith("threads") else ""
    say(f"result     {report.bound}{shared}")
    for advice in report.helps:
        say(f"helps      {advice}")


def _steps(report: Report) -> Table:
    table = Table("", title="one training step", title_justify="left", title_style="")
    for column in ("ms", "share", "images/s", "of the roofline"):
        table.add_column(column, justify="right")
    whole = sum(report.stages.values())
    for name, seconds in report.stages.items():
        table.add_row(name, _ms(seconds), f"{seconds / whole:.0%}")
    table.add_section()
    for speed in report.speeds:
        rows = (("networks alone", speed.network_seconds), ("with views", speed.step_seconds))
        for name, seconds in (*rows, ("with views and loader", speed.training_seconds)):
            rate = report.batch / seconds
            reached = rate / report.roofline.images_per_second
            table.add_row(f"{speed.execution}, {name}", _ms(seconds), "", f"{rate:,.0f}", f"{reached:.1%}")
        if speed.peak_bytes is not None:
            table.add_row(f"{speed.execution}, memory at peak: {speed.peak_bytes / 1e9:.1f} GB")
    table.add_section()
    table.add_row("loader alone", _ms(report.loader_seconds), "", f"{report.batch / report.loader_seconds:,.0f}")
    return table


def _comparison(report: Report, rival: str) -> Table:
    """Images per second of the other library and of this one, and the speedup."""
    table = Table("", title=f"against {rival}", title_justify="left", title_style="")
    eager = [speed for speed in report.speeds if speed.execution == "eager"]
    sides = {"eager here": eager, "best here": report.speeds} if len(report.speeds) > 1 else {"here": eager}
    for column in (rival, *(text for side in sides for text in (side, "ratio"))):
        table.add_column(column, justify="right")
    for kind, name in (("network_seconds", "networks alone"), ("training_seconds", "with views and loader")):
        table.add_row(f"{name}, images/s")
        ours = [min(getattr(speed, kind) for speed in speeds) for speeds in sides.values()]
        for speed in report.against[rival]:
            theirs = getattr(speed, kind)
            cells = [text for mine in ours for text in (f"{report.batch / mine:,.0f}", f"{theirs / mine:.2f}")]
            table.add_row(f"  {speed.variant}", f"{report.batch / theirs:,.0f}", *cells)
        table.add_section()
    return table


def _methods(report: Report) -> Table:
    """Training steps of all methods, views included, relative to TiCo's."""
    title = f"every method, {report.methods[0].execution} steps with views"
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    memory = () if report.methods[0].peak_bytes is None else ("GB at peak", "x TiCo")
    for column in ("ms", "x TiCo", "images/s", "passes", *memory, "MB of state"):
        table.add_column(column, justify="right")
    for cost in report.methods:
        name = cost.method if cost.views == "2 views" else f"{cost.method}, {cost.views}"
        name += "" if cost.execution == report.methods[0].execution else f", {cost.execution}"
        milliseconds = 1000 * cost.step_seconds
        cells = [f"{milliseconds:,.{1 if milliseconds < 1000 else 0}f}"]
        cells += [f"{cost.relative_seconds:.2f}", f"{cost.images_per_second:,.0f}"]
        cells.append(f"{cost.forwards:g} + {cost.backwards:g}")
        if cost.peak_bytes is not None and cost.relative_peak is not None:
            cells += [f"{cost.peak_bytes / 1e9:.1f}", f"{cost.relative_peak:.2f}"]
        table.add_row(name, *cells, f"{cost.state_bytes / 1e6:,.2f}")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.2f}"
