"""F5-TTS 1.1.6 gives the padding mask to attention in training: it is made whole for each head."""

import pytest
import torch

PACKAGE = "f5-tts"
GOOD = "1.1.5"
BAD = "1.1.9"
RELEASE = "1.1.6"
WITH = ("torch==2.8.0", "torchaudio==2.8.0", "pyarrow<20")
REPORTED = "out of memory in attention, 984 MiB asked for"
LINKS = ("SWivid/F5-TTS#1192",)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-40GB")
def test_training_step():
    from f5_tts.model.backbones.unett import UNetT
    from f5_tts.model.cfm import CFM

    backbone = UNetT(
        dim=768, depth=4, heads=12, ff_mult=4, text_num_embeds=256, mel_dim=100, pe_attn_head=1
    )
    model = CFM(transformer=backbone, mel_spec_kwargs={"n_mel_channels": 100}).cuda()
    mel = torch.randn(16, 1200, 100, device="cuda")
    text = torch.randint(0, 256, (16, 120), device="cuda")
    lengths = torch.full((16,), 1200, device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss, _, _ = model(mel, text=text, lens=lengths)
    loss.backward()
