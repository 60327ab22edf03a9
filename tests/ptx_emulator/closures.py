"""The closures most instructions become: a numpy call over lane vectors, written straight into the destination."""

from __future__ import annotations

import numpy as np


def ufunc(f, d: int, *s: int):
    """A closure for a numpy ufunc that writes straight into the destination view."""
    if len(s) == 1:
        (a,) = s

        def one(w, R, m):
            if m is None:
                f(R[a], out=R[d])
            else:
                f(R[a], out=R[d], where=m)

        return one
    a, b = s

    def two(w, R, m):
        if m is None:
            f(R[a], R[b], out=R[d])
        else:
            f(R[a], R[b], out=R[d], where=m)

    return two


def function(f, d: int, *s: int):
    """A closure for any function of lane vectors."""
    if len(s) == 1:
        (a,) = s

        def one(w, R, m):
            np.copyto(R[d], f(R[a]), where=True if m is None else m)

        return one
    if len(s) == 2:
        a, b = s

        def two(w, R, m):
            np.copyto(R[d], f(R[a], R[b]), where=True if m is None else m)

        return two
    a, b, c = s

    def three(w, R, m):
        np.copyto(R[d], f(R[a], R[b], R[c]), where=True if m is None else m)

    return three
