"""A test's figures as properties."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from helpers.sample_report import T4, attribution, measured, result

from pytest_gpumem.measurement import OutOfMemory, Peak
from pytest_gpumem.report.item_properties import properties, property_lines
from pytest_gpumem.sizes import MIB

SMALL = measured(attribution(layers=1))


def test_a_test_and_its_part():
    whole, part = result("t", SMALL), result("t", SMALL, part="forward")
    peak = SMALL.peaks[0]
    assert list(properties([whole, part])) == [
        ("gpumem_device", "virtual-T4"),
        ("gpumem_batch_size", 8),
        ("gpumem_verdict", "no baseline"),
        ("gpumem_peak_allocated", peak.allocated),
        ("gpumem_peak_reserved", peak.reserved),
        ("gpumem_verdict[forward]", "no baseline"),
        ("gpumem_peak_allocated[forward]", peak.allocated),
        ("gpumem_peak_reserved[forward]", peak.reserved),
    ]


def test_a_rank_says_which():
    one = replace(result("t", SMALL), batch_size=None, world_size=64, rank=3)
    found = dict(properties([one]))
    assert (found["gpumem_world_size"], found["gpumem_rank"]) == (64, 3)
    assert "gpumem_batch_size" not in found


def test_the_fullest_device_counts():
    two = measured(attribution(layers=1), attribution(layers=2), device=T4)
    assert dict(properties([result("t", two)]))["gpumem_peak_allocated"] == two.peak_allocated


def test_what_ran_out_of_memory_says_what_it_needs():
    oom = OutOfMemory(MIB, MIB, 2 * MIB, "", 0, Peak(5 * MIB, 6 * MIB))
    found = dict(properties([result("t", measured(attribution(layers=1), out_of_memory=oom))]))
    assert found["gpumem_needed_allocated"] == 5 * MIB
    assert found["gpumem_needed_reserved"] == 6 * MIB


def test_lines_have_sizes_in_words_and_nothing_of_others():
    found = [("a", 1), ("gpumem_peak_reserved", 2 * MIB), ("gpumem_batch_size", 8)]
    assert list(property_lines(found)) == [
        "gpumem_peak_reserved: 2097152 (2.00 MiB)",
        "gpumem_batch_size: 8",
    ]


@pytest.mark.parametrize("part", ["a\0b", "\x1b[31mred", "\udcff", "\ufffe", "two\nlines", "größe"])
def test_a_parts_name_is_fit_for_xml(part):
    names = [name for name, _ in properties([result("t", SMALL, part=part)])]
    document = ET.Element("properties")
    for name in names:
        ET.SubElement(document, "property", name=name)
    read = ET.fromstring(ET.tostring(document, encoding="utf-8"))
    assert [element.get("name") for element in read] == names
