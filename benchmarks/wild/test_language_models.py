"""Regressions of language models: transformers, trl, peft, unsloth; regressions.toml says of which.

Releases are old, and import what they need in their own way: each test imports its library itself.
"""

import pytest
import torch

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.gpu_memory(card="A100-80GB")]


def llama(width, inner, layers, heads, vocabulary, **more):
    """Make a Llama with these sizes, on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        **more,
    )
    return LlamaForCausalLM(config)


def tokenizer(size=100, *, splits=True, **more):
    """Make a tokenizer of the words w0, w1 ..., the first of which are special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    if splits:
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2", **more)


def tokens(vocabulary, *shape):
    return torch.randint(0, vocabulary, shape, device="cuda")


def train(model, steps, *ids_of):
    """Run steps with AdamW, each on new tokens."""
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad])
    for _ in range(steps):
        ids = tokens(*ids_of)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# -- transformers --


def test_llama_in_bfloat16():
    model = llama(512, 1024, 2, 8, 32000, use_cache=False).to(torch.bfloat16).cuda()
    ids = tokens(32000, 4, 512)
    model(ids, labels=ids).loss.backward()


def test_llama_with_16384_positions():
    more = {"max_position_embeddings": 16384, "use_cache": False}
    model = llama(256, 512, 2, 4, 1000, **more).cuda()
    ids = tokens(1000, 1, 512)
    model(ids, labels=ids).loss.backward()


def test_checkpointed_llama():
    model = llama(512, 1024, 24, 8, 1000).cuda()
    model.gradient_checkpointing_enable()
    ids = tokens(1000, 16, 256)
    model.train()(ids, labels=ids).loss.backward()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_llama_in_training(checkpointed):
    model = llama(512, 1024, 24, 8, 1000).cuda().bfloat16().train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    train(model, 2, 1000, 16, 256)


def test_generate_from_a_prompt_of_4096_tokens():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=50257, n_positions=8192)
    model = GPT2LMHeadModel(config).cuda()
    model.generate(tokens(50257, 2, 4096), max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_mixture_of_128_experts():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=1000,
        output_router_logits=True,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config).cuda()
    ids = tokens(1000, 1, 4096)
    model(ids, labels=ids).loss.backward()


def test_loading_in_4_bits(tmp_path):
    from transformers import BitsAndBytesConfig, Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        n_routed_experts=64,
        vocab_size=1000,
    )
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    quantized = BitsAndBytesConfig(load_in_4bit=True)
    Glm4MoeForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantized, device_map={"": 0}, dtype=torch.bfloat16
    )


# -- peft and unsloth --


def test_lora_of_a_bfloat16_model():
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=64, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"])
    model = llama(1024, 2816, 8, 16, 8000, use_cache=False).to(torch.bfloat16)
    train(get_peft_model(model, lora).cuda(), 2, 8000, 4, 512)


def test_unsloth(tmp_path, monkeypatch):
    """unsloth loads the model and the tokenizer from a folder like one of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from unsloth import FastLanguageModel

    size = 32_000
    tokenizer(size, splits=False, bos_token="w3", unk_token="w0").save_pretrained(tmp_path)
    more = {"num_key_value_heads": 8, "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}
    llama(512, 1376, 2, 8, size, **more).to(torch.bfloat16).save_pretrained(tmp_path)
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
    train(model, 3, size - 3, 8, 1024)


# -- trl --


def arguments(kind, folder, **more):
    return kind(output_dir=str(folder), report_to=[], save_strategy="no", **more)


def test_sft_with_lora(tmp_path):
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainingArguments
    from trl import SFTTrainer

    model = llama(512, 1408, 8, 8, 1000, use_cache=False)
    model.is_loaded_in_8bit = True  # trl checks only this: the layers need not be quantized
    options = {"per_device_train_batch_size": 4, "max_steps": 2}
    SFTTrainer(
        model=model,
        args=arguments(TrainingArguments, tmp_path, **options),
        train_dataset=Dataset.from_dict({"text": ["w5 " * 512] * 16}),
        dataset_text_field="text",
        max_seq_length=512,
        tokenizer=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    ).train()


def test_sft(tmp_path):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = {"per_device_train_batch_size": 1, "max_steps": 2, "bf16": False}
    options["gradient_checkpointing"] = False  # newer releases have another default
    options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    rows = [{"input_ids": [3] * 8192, "labels": [3] * 8192} for _ in range(16)]
    SFTTrainer(
        model=llama(256, 512, 2, 4, 32000, use_cache=False).to(torch.bfloat16),
        args=arguments(SFTConfig, tmp_path, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(splits=False),
    ).train()


def test_grpo_with_accumulated_gradients(tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16}
    options |= {"num_generations": 4, "max_prompt_length": 512, "max_completion_length": 4}
    GRPOTrainer(
        model=llama(256, 512, 4, 4, 1000).to(torch.bfloat16),
        reward_funcs=lambda completions, **others: [float(len(text)) for text in completions],
        args=arguments(GRPOConfig, tmp_path, max_steps=1, bf16=False, **options),
        train_dataset=Dataset.from_dict({"prompt": ["w5 " * 512] * 64}),
        processing_class=tokenizer(padding_side="left"),
    ).train()
