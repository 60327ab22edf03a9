"""Importing this module registers every decoder."""

from . import alu, alu_float, copies, cvt, logic, memops, mma, moves, syncops, tcgen05, warpops, wgmma  # noqa: F401
