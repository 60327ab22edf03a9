"""Importing this module registers every decoder."""

from . import alu, copies, cvt, memops, syncops, warpops, wgmma  # noqa: F401
