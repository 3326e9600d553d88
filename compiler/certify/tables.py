"""What `dsc verify` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsc.runtime.certificate import Certificate
from dsc.runtime.inspect_tables import PIPE_COLUMNS, make_table, size_text


def show(certificate: Certificate, console: Console | None = None) -> None:
    """Print a certificate."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=PIPE_COLUMNS)
    console.print(layers_table(certificate))
    console.print(facts_table(certificate))


def layers_table(certificate: Certificate) -> Table:
    """Errors of the residual stream, a row per layer."""
    rows = [
        (
            f"{item.model} {item.layer}",
            f"{item.alone.relative_error:.5f}",
            f"{item.alone.worst_row_error:.4f}",
            f"{item.reached.relative_error:.5f}",
            f"{item.reached.worst_row_error:.4f}",
            f"{item.reached.cosine:.6f}",
            f"{item.reached.worst_row_cosine:.5f}",
            f"{item.reached.largest:.4g}",
            f"{item.reached.non_finite:,}",
        )
        for item in certificate.layers
    ]
    columns = (
        "layer", "error\nalone", "worst\nrow", "error\nreached", "worst\nrow", "cosine", "worst\nrow", "largest\nvalue",
        "NaN,\ninf",
    )  # fmt: skip
    return make_table("the residual stream after each layer, against the unquantized model", columns, rows, range(1, 9))


def facts_table(certificate: Certificate) -> Table:
    """Everything else, one fact a line."""
    end, text, stored, mtp = certificate.end_to_end, certificate.text, certificate.stored, certificate.mtp
    rows = [
        ("engine", certificate.engine),
        ("checkpoint", certificate.checkpoint),
        ("text", f"{text.name}: {text.windows} windows, {text.tokens:,} tokens"),
        ("run on", certificate.device),
        ("KL", f"{end.kl:.5f} nats a token, {end.worst_kl:.3f} at worst"),
        ("top-1 agreement", f"{end.top1:.2%}"),
        ("nats a token", f"{end.nats:.4f}, unquantized {end.reference_nats:.4f}"),
        ("NaN, inf", f"{end.non_finite:,} logits"),
        ("MTP acceptance", f"{mtp.engine:.2%}, unquantized {mtp.reference:.2%}" if mtp else "no MTP"),
        ("stored tensors", f"{stored.tensors:,} compared, {size_text(stored.bytes)}" if stored.tensors else "not compared"),
        ("saturated codes", f"{stored.saturated:,}, and {stored.zero_groups:,} groups of zeros"),
    ]  # fmt: skip
    return make_table("certificate", ("", ""), rows, header=False)
