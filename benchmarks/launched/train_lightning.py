"""Lightning's command line over the demonstration model that Lightning comes with."""

import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    LightningCLI(DemoModel, BoringDataModule, save_config_callback=None)
