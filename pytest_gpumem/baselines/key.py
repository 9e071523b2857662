"""The key of a baseline entry: device, module, test, part."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """The key of a figure: a test, or a part of it, on a device."""

    device: str
    """the device's key: "virtual-T4" """
    module: str
    """the file part of the nodeid"""
    test: str
    """the nodeid after the file"""
    part: str = ""
    """"" is the whole test"""

    @property
    def nodeid(self) -> str:
        """The test, as pytest names it."""
        return f"{self.module}::{self.test}" if self.test else self.module

    @property
    def name(self) -> str:
        """The test without its file, with its part where it has one."""
        test = self.test or self.module
        return f"{test} ({self.part})" if self.part else test
