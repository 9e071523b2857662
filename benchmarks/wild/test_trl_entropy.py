"""trl 0.22.0 computes the entropy of all logits in each SFT step."""

import pytest
import torch

PACKAGE = "trl"
GOOD = "0.19.1"
BAD = "0.22.2"
RELEASE = "0.22.0"
WITH = ("transformers==4.56.2",)
REPORTED = "an 80 GB card is full"
LINKS = ("huggingface/trl#4013",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_sft(tmp_path):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(100)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        eos_token="w1",
        pad_token="w2",
    )
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=32000,
        use_cache=False,
    )
    rows = [{"input_ids": [3] * 8192, "labels": [3] * 8192} for _ in range(16)]
    arguments = SFTConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        bf16=False,
        gradient_checkpointing=False,  # the default of newer releases is another
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config).to(torch.bfloat16),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
