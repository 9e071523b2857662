"""unsloth 2025.8.5 computes the loss in parts as large as half of the free memory allows."""

import pytest
import torch

PACKAGE = "unsloth"
GOOD = "2025.8.1"
BAD = "2025.10.1"
RELEASE = "2025.8.5"
WITH = ("torch==2.8.0", "transformers==4.55.4", "trl==0.21.0")
AS_OF = ("unsloth_zoo", "torchao", "peft", "bitsandbytes")
REPORTED = "3 to 4 GB more than 2025.5.8"
LINKS = ("unslothai/unsloth#3418",)

VOCABULARY = 32_000


def save_small_llama(folder):
    """Save a Llama of two layers and a tokenizer, as a hub would have them."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<unk>"}
    names = sorted(set(special.values())) + [f"w{number}" for number in range(VOCABULARY - 3)]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special["unk"]))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": text for name, text in special.items()}
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.filterwarnings("ignore")  # of what it imports
@pytest.mark.gpu_memory(card="A100-80GB")
def test_three_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from unsloth import FastLanguageModel

    save_small_llama(tmp_path)
    model, _ = FastLanguageModel.from_pretrained(
        str(tmp_path), max_seq_length=2048, dtype=torch.bfloat16, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=["q_proj", "v_proj"],
        use_gradient_checkpointing="unsloth",
    )
    model.train()
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad])
    for _ in range(3):
        ids = torch.randint(VOCABULARY - 3, (8, 1024), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
