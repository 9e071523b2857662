"""trl 0.7.2 no longer checkpoints the activations of a quantized model with adapters."""

import pytest

PACKAGE = "trl"
GOOD = "0.5.0"
BAD = "0.7.4"
RELEASE = "0.7.2"
WITH = (
    "transformers==4.34.1",
    "accelerate==0.23.0",
    "peft==0.5.0",
    "datasets<4",
    "numpy<2",
    "pyarrow<20",
    "bitsandbytes==0.45.5",
)
REPORTED = "10 GB, then more than 24 GB"
LINKS = ("huggingface/trl#1168", "huggingface/trl#999")


@pytest.mark.filterwarnings("ignore")  # of old releases
@pytest.mark.gpu_memory(card="A100-80GB")
def test_sft_with_lora(tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        TrainingArguments,
    )
    from trl import SFTTrainer

    vocabulary = {f"w{number}": number for number in range(100)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="w1",
        pad_token="w2",
    )
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=1000,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.is_loaded_in_8bit = True  # trl asks this alone: the layers need not be quantized
    trainer = SFTTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=2,
            report_to=[],
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"text": ["w5 " * 512] * 16}),
        dataset_text_field="text",
        max_seq_length=512,
        tokenizer=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
