"""liger-kernel: its fused loss takes less than the logits that it never makes."""

import pytest
import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

HIDDEN, VOCABULARY, TOKENS = 512, 32000, 4096


@pytest.mark.gpu_memory(card="L4")
def test_the_fused_loss_takes_less(gpu_memory):
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda")
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda", requires_grad=True)
    labels = torch.zeros(TOKENS, dtype=torch.long, device="cuda")
    with gpu_memory.measure("logits") as logits:
        torch.nn.functional.cross_entropy(head(hidden), labels).backward()
    head.weight.grad = hidden.grad = None
    with gpu_memory.measure("fused", less_than=logits):
        LigerFusedLinearCrossEntropyLoss()(head.weight, hidden, labels).backward()
