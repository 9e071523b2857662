"""torch_geometric: a step of a graph convolution."""

import pytest
import torch
from torch_geometric.nn import GATConv, GCNConv


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.parametrize("convolution", [GCNConv, GATConv])
def test_a_graph_convolution_s_step(convolution):
    layer = convolution(64, 64).cuda()
    nodes = torch.randn(1000, 64, device="cuda")
    edges = torch.stack([torch.arange(5000) % 1000, torch.arange(5000) % 997]).cuda()
    layer(nodes, edges).sum().backward()
