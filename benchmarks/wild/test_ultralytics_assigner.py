"""ultralytics' assigner of boxes to anchors took 1.7 times the memory that it needs."""

import pytest
import torch

PACKAGE = "ultralytics"
GOOD = "8.4.106"
BAD = "8.4.96"
RELEASE = "8.4.99"
WITH = ("torchvision", "opencv-python-headless")
REPORTED = "1.52 GB before the change that lowers it to 0.89 GB"
LINKS = ("ultralytics/ultralytics#25240",)
IMAGES, ANCHORS, BOXES, CLASSES = 32, 8400, 200, 80


@pytest.mark.gpu_memory(card="A100-80GB", values="off")
def test_task_aligned_assigner():
    from ultralytics.utils.tal import TaskAlignedAssigner

    assigner = TaskAlignedAssigner(topk=10, num_classes=CLASSES, alpha=0.5, beta=6.0)
    with torch.no_grad():
        assigner(
            torch.rand(IMAGES, ANCHORS, CLASSES, device="cuda"),
            torch.rand(IMAGES, ANCHORS, 4, device="cuda"),
            torch.rand(ANCHORS, 2, device="cuda"),
            torch.zeros(IMAGES, BOXES, 1, dtype=torch.long, device="cuda"),
            torch.rand(IMAGES, BOXES, 4, device="cuda"),
            torch.ones(IMAGES, BOXES, 1, dtype=torch.bool, device="cuda"),
        )
