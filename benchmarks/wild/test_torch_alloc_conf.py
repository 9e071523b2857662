"""torch 2.9 reads PYTORCH_ALLOC_CONF too late: expandable segments are not switched on."""

import pytest
import torch

PACKAGE = "torch"
GOOD = "2.10.0"
BAD = "2.9.1"
RELEASE = "2.10.0"
VERSIONS = ("2.9.1", "2.10.0")
WITH = ()
ENVIRONMENT = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
REPORTED = "out of memory where 2.10 fits"
LINKS = ("karpathy/autoresearch#588",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_growing_batches():
    for number in range(1, 9):
        batch = torch.empty(number * 17 << 20, dtype=torch.uint8, device="cuda")
        del batch
