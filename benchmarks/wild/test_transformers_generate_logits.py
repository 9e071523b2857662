"""transformers 4.45.0 copies the logits of the whole prompt where generate() needs the last."""

import pytest
import torch

PACKAGE = "transformers"
GOOD = "4.44.2"
BAD = "4.46.3"
RELEASE = "4.45.0"
WITH = ("numpy<2",)
REPORTED = "twice the logits in the first call of generate()"
LINKS = ("huggingface/transformers#34796",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_generate_from_a_prompt_of_4096_tokens():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=50257, n_positions=8192)
    model = GPT2LMHeadModel(config).cuda()
    ids = torch.randint(0, 50257, (2, 4096), device="cuda")
    model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
