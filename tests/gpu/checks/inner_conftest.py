"""The conftest file of the checks' sessions: writes each verdict and report as a JSON line."""

import json
import os
import sys
from pathlib import Path

if os.environ.get("CHECK_NO_NVML"):
    sys.modules["pynvml"] = None  # as where nvidia-ml-py is not installed


def note(**fields):
    with Path(os.environ["CHECK_RECORDS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields, default=str) + "\n")


def peaks(values):
    return [[p.allocated, p.reserved, p.pinned] for p in values]


def pytest_gpumem_judged(item, result):
    m, fields = result.measurement, {}
    if m is not None:
        oom = m.out_of_memory
        fields = {
            "peaks": peaks(m.peaks),
            "held": peaks(m.held),
            "retained": peaks(m.retained),
            "retries": m.alloc_retries,
            "notes": list(m.note_texts),
            "host": m.host,
            "hints": [str(getattr(hint, "text", hint)) for hint in m.hints],
            "use": [
                [u.peak, u.besides, u.outside, u.others, u.processes, u.source]
                for u in m.device_use
            ],
            "oom": oom
            and {
                "requested": oom.requested,
                "allocated": oom.allocated,
                "reserved": oom.reserved,
                "site": oom.site,
                "needed": oom.needed and [oom.needed.allocated, oom.needed.reserved],
            },
            "breakdown": [a.breakdown.categories for a in m.attributions],
            "attribution_hints": [
                str(getattr(h, "text", h)) for a in m.attributions for h in a.hints
            ],
            "pinned_count": m.pinned_count,
            "device": m.device.key,
            "driver": m.provenance.driver,
            "cudnn": m.provenance.cudnn,
        }
    note(
        kind="judged",
        test=item.name,
        part=result.part,
        word=result.word,
        failed=result.verdict.failed,
        **fields,
    )


def pytest_runtest_logreport(report):
    note(
        kind="report",
        test=report.nodeid.rpartition("::")[2],
        when=report.when,
        outcome=report.outcome,
        text=report.longreprtext[-1500:] if report.failed else "",
        seconds=report.duration,
    )
