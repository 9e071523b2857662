"""sentence-transformers: a step with a contrastive loss; model and tokenizer are made here."""

import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers import losses


@pytest.fixture
def folder(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    vocabulary = {word: index for index, word in enumerate(words)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.gpu_memory(card="T4")
def test_a_contrastive_step(folder):
    model = sentence_transformers.SentenceTransformer(str(folder), device="cuda")
    loss = losses.MultipleNegativesRankingLoss(model)
    optimizer = torch.optim.AdamW(model.parameters())
    sides = [["a b c"] * 8, ["c b a"] * 8]
    for _ in range(2):
        features = [
            {
                name: value.cuda()
                for name, value in model.tokenize(side).items()
                if name != "modality"
            }
            for side in sides
        ]
        loss(features, None).backward()
        optimizer.step()
        optimizer.zero_grad()
