"""torchtitan's Llama 3 8B with the data of torchtitan's tests, as the usual data is downloaded."""

from dataclasses import replace
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama3 import config_registry


def llama3_8b() -> Any:  # noqa: ANN401 - a configuration of torchtitan's
    """Return torchtitan's configuration with this name, with the other data."""
    config = config_registry.llama3_8b()
    packed = replace(config.dataloader.dataset, dataset=DATASETS["c4_test"])
    config.dataloader = replace(config.dataloader, dataset=packed)
    config.hf_assets_path = "./tests/assets/tokenizer"
    return config
