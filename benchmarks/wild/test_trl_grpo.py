"""trl 0.17.0 generates the completions of all accumulated batches of GRPO at once."""

import pytest
import torch

PACKAGE = "trl"
GOOD = "0.16.0"
BAD = "0.18.0"
RELEASE = "0.17.0"
WITH = ("transformers==4.51.3",)
REPORTED = "out of memory where 0.16.0 trains"
LINKS = ("huggingface/trl#3456",)


@pytest.mark.gpu_memory(card="A100-80GB")
def test_grpo_with_accumulated_gradients(tmp_path):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    vocabulary = {f"w{number}": number for number in range(100)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="w1",
        pad_token="w2",
        padding_side="left",
    )
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=1000,
    )
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=16,
        num_generations=4,
        max_prompt_length=512,
        max_completion_length=4,
        max_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
    )
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config).to(torch.bfloat16),
        reward_funcs=lambda completions, **others: [float(len(text)) for text in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w5 " * 512] * 64}),
        processing_class=tokenizer,
    )
    trainer.train()
