"""Comparisons whose failure says where and by how much."""

from __future__ import annotations

import torch

from foscar.common.reference import attention_bf16, attention_reference, relative_error

AXES = ("request", "head", "channel")


def error_report(got: torch.Tensor, want: torch.Tensor, names: tuple[str, ...] = AXES) -> str:
    """What differs: elements that are NaN or inf in one only, and the worst element with both values.

    Args:
        got, want: tensors of one shape; compared in float64.
        names: what the dimensions are called (the first ``ndim`` are used).
    """
    if got.shape != want.shape:
        return f"shapes differ: got {list(got.shape)}, want {list(want.shape)}"
    got, want = got.detach().double().cpu(), want.detach().double().cpu()

    def at(flat: int) -> str:
        index = [int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape)]
        where = ", ".join(f"{n} {i}" for n, i in zip(names, index, strict=False)) or "scalar"
        return f"{where}: got {got.flatten()[flat].item():.9g}, want {want.flatten()[flat].item():.9g}"

    lines = [f"relative error {relative_error(got, want):.3e} over {list(got.shape)}"]
    same = (got == want) | (got.isnan() & want.isnan())
    for kind, mismatch in (
        ("NaN", got.isnan() != want.isnan()),
        ("infinity", (got.isinf() | want.isinf()) & ~same & ~got.isnan() & ~want.isnan()),
    ):
        if mismatch.any():
            lines.append(
                f"{kind} in {int(mismatch.sum())} elements of one side only, first at "
                + at(int(mismatch.flatten().nonzero()[0]))
            )
    finite = got.isfinite() & want.isfinite()
    difference = torch.where(finite, (got - want).abs(), torch.zeros_like(got))
    if difference.numel() and difference.max() > 0:
        worst = int(difference.flatten().argmax())
        lines.append(f"largest difference {difference.max().item():.3e} at {at(worst)}")
        by_head = difference.amax(tuple(i for i in range(got.ndim) if i != 1)) if got.ndim > 1 else None
        if by_head is not None:
            lines.append(f"largest per {names[1]}: " + " ".join(f"{x:.1e}" for x in by_head.tolist()[:32]))
    return "\n".join(lines)


def assert_equal(got: torch.Tensor, want: torch.Tensor, names: tuple[str, ...] = AXES) -> None:
    """Bit-for-bit values (NaN equals NaN), with a report."""
    same = got.shape == want.shape and bool(((got == want) | ((got != got) & (want != want))).all())
    assert same, error_report(got, want, names)


def assert_meets_contract(out, lse, q, cache, block_table, seq_lens, sm_scale=None) -> tuple[float, float]:
    """The numeric contract: the error of (out, lse natural) is at most that of the BF16 route.

    Returns:
        The two relative errors of out: the tested one and the BF16 route's.
    """
    want, want_lse = attention_reference(q, cache, block_table, seq_lens, sm_scale)
    base, base_lse = attention_bf16(q, cache, block_table, seq_lens, sm_scale)
    got, allowed = relative_error(out, want), relative_error(base, want)
    assert got <= allowed, f"error {got:.3e}, BF16 route {allowed:.3e}\n" + error_report(out, want)
    live = want_lse.isfinite()
    assert_equal(lse.double().cpu()[~live], want_lse[~live].cpu(), ("element",))
    got_lse = (lse.double() - want_lse)[live].abs().max().item() if live.any() else 0.0
    allowed_lse = (base_lse.double() - want_lse)[live].abs().max().item() if live.any() else 0.0
    assert got_lse <= allowed_lse, f"LSE error {got_lse:.3e}, BF16 route {allowed_lse:.3e}"
    return got, allowed
