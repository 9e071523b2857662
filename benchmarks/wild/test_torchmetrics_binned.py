"""torchmetrics 0.10.0 compares all predictions with all thresholds at once."""

import pytest
import torch

PACKAGE = "torchmetrics"
GOOD = "0.8.2"
BAD = "0.10.3"
RELEASE = "0.10.0"
WITH = ("numpy<2", "setuptools<80")
REPORTED = "extremely slow and memory-consuming with many samples"
LINKS = ("Lightning-AI/torchmetrics#1492",)


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_average_precision_of_pixels():
    try:
        from torchmetrics.classification import BinaryAveragePrecision
    except ImportError:
        from torchmetrics import BinnedAveragePrecision

        metric = BinnedAveragePrecision(num_classes=1, thresholds=200).cuda()
    else:
        metric = BinaryAveragePrecision(thresholds=200).cuda()
    with torch.no_grad():
        metric.update(
            torch.rand(128 * 1024, device="cuda"),
            torch.randint(0, 2, (128 * 1024,), device="cuda"),
        )
