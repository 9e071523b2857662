"""lightning: the memory of a plain loop, of one batch at a time, and after fit."""

import gc

import lightning
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

DATA = torch.utils.data.TensorDataset(torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        convolution, linear = torch.nn.Conv2d(3, 16, 5), torch.nn.Linear(16 * 14 * 14, 10)
        pool, flat = torch.nn.MaxPool2d(2), torch.nn.Flatten()
        self.layers = torch.nn.Sequential(convolution, torch.nn.ReLU(), pool, flat, linear)

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, _index=0):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(DATA, batch_size=8)


def train(model, optimizer, loader, backward, to_device):
    for batch in loader:
        moved = [to_device(tensor) for tensor in batch]
        backward(model.training_step(moved))
        optimizer.step()
        optimizer.zero_grad()


def train_plain():
    model = Net().to("cuda")
    optimizer = model.configure_optimizers()
    loader = model.train_dataloader()
    train(model, optimizer, loader, torch.Tensor.backward, lambda tensor: tensor.to("cuda"))


def trainer(tmp_path, **options):
    options = {"accelerator": "gpu", "devices": 1, "logger": False, **options}
    options |= {"enable_progress_bar": False, "enable_checkpointing": False}
    return lightning.Trainer(default_root_dir=tmp_path, enable_model_summary=False, **options)


@pytest.mark.gpu_memory(card="T4")
def test_fabric_takes_no_more_than_torch(gpu_memory):
    with gpu_memory.measure("torch") as plain:
        train_plain()
    with gpu_memory.measure("fabric", at_most=plain):
        fabric = lightning.Fabric(accelerator="cuda", devices=1)
        net = Net()
        loader = fabric.setup_dataloaders(net.train_dataloader())
        model, optimizer = fabric.setup(net, net.configure_optimizers())
        model.mark_forward_method("training_step")
        train(model, optimizer, loader, fabric.backward, fabric.to_device)


@pytest.mark.gpu_memory(card="T4")
def test_a_trainer_takes_as_much_as_torch(gpu_memory, tmp_path):
    with gpu_memory.measure("torch") as plain:
        train_plain()
    with gpu_memory.measure("trainer", at_most=1.001, of=plain):
        trainer(tmp_path, max_epochs=1).fit(Net())


@pytest.mark.gpu_memory(card="T4")
def test_one_batch_at_a_time(gpu_memory, tmp_path):
    parameters = sum(parameter.numel() for parameter in BoringModel().parameters())
    rows = parameters * 100 // 32 + 1
    one_batch = {"more_than": f"{101 * 4 * parameters}B", "less_than": f"{201 * 4 * parameters}B"}

    class LargeBatches(BoringModel):
        def train_dataloader(self):
            return torch.utils.data.DataLoader(RandomDataset(32, 5000), batch_size=rows)

        val_dataloader = train_dataloader

        def training_step(self, batch, index):
            with gpu_memory.measure("training", figure="held", **one_batch):
                return super().training_step(batch, index)

        def validation_step(self, batch, index):
            with gpu_memory.measure("validation", figure="held", **one_batch):
                return super().validation_step(batch, index)

    trainer(tmp_path, fast_dev_run=2).fit(LargeBatches())


@pytest.mark.gpu_memory(card="T4")
def test_fit_leaves_less_than_it_began_with(gpu_memory, tmp_path):
    class Model(BoringModel):
        def on_train_start(self):
            with gpu_memory.measure("start"):
                pass

    trainer(tmp_path, fast_dev_run=True).fit(Model())
    with gpu_memory.measure("end", figure="held", less_than="start"):
        gc.collect()


class Logged(BoringModel):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss["loss"])
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.layer.parameters(), lr=0.1)


@pytest.mark.gpu_memory(card="T4")
@pytest.mark.xfail(reason="torch 2.8 and newer keep a tensor after DDP", strict=True)
def test_each_fit_leaves_nothing(gpu_memory, tmp_path):
    model = Logged()
    for fit in ("first", "second"):
        with gpu_memory.measure(fit, figure="held", at_most="before"):
            trainer(tmp_path, fast_dev_run=True, strategy="ddp").fit(model)
            gc.collect()
