"""Importing this module registers every decoder."""

from . import alu, alu_float, copies, cvt, logic, memops, moves, syncops, warpops, wgmma  # noqa: F401
