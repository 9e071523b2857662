"""torchmetrics: metrics that are updated and computed on the GPU."""

import pytest
import torch
import torchmetrics


@pytest.mark.gpu_memory(card="T4")
def test_metrics_of_a_classifier():
    metrics = torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassAccuracy(num_classes=100),
            torchmetrics.classification.MulticlassConfusionMatrix(num_classes=100),
            torchmetrics.classification.MulticlassAUROC(num_classes=100, thresholds=50),
        ]
    ).cuda()
    for _ in range(3):
        scores = torch.randn(256, 100, device="cuda").softmax(-1)
        metrics.update(scores, torch.zeros(256, dtype=torch.long, device="cuda"))
    metrics.compute()
