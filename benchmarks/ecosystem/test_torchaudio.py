"""torchaudio: spectrograms on the GPU, and a step of a Conformer over them."""

import pytest
import torch
import torchaudio


@pytest.mark.gpu_memory(card="T4")
def test_a_training_step():
    spectrograms = torchaudio.transforms.MelSpectrogram(16000, n_mels=80).cuda()
    model = torchaudio.models.Conformer(80, 4, 256, 2, 31).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = torch.full((4,), 401, device="cuda")
    for _ in range(2):
        frames = spectrograms(torch.randn(4, 80000, device="cuda")).transpose(1, 2)
        model(frames, lengths)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
