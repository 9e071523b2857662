"""lightning: a module that a Trainer trains, as its users write it."""

import lightning
import pytest
import torch


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1))

    def training_step(self, batch, _index):
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.gpu_memory(card="T4")
def test_a_trainer_s_steps(tmp_path):
    dataset = torch.utils.data.TensorDataset(torch.randn(64, 1024))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    trainer = lightning.Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Regression(), loader)
