"""GPTModule on two data-parallel ranks equals one process on the global batches, in fp64, with masked targets."""

import lightning.pytorch as pl
import pytest
import torch

from lit_pretrain.module import GPTModule
from lit_pretrain.specs import GPTConfig

CONFIG = GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=16)
ROWS = 24


class Rows(pl.LightningDataModule):
    """Rank r of 2 reads every second microbatch; one process reads them all. Masking differs between the ranks."""

    def __init__(self, micro):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        tokens = torch.randint(0, 61, (ROWS, 17), generator=g)
        self.ids, self.targets = tokens[:, :-1], tokens[:, 1:].clone()
        self.targets[torch.rand(ROWS, 16, generator=g) < torch.arange(ROWS)[:, None] / ROWS] = -100
        self.micro = micro

    def train_dataloader(self):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        starts = range(rank * self.micro, ROWS, world * self.micro)
        rows = [slice(s, s + self.micro) for s in starts]
        batches = [{"ids": self.ids[r], "targets": self.targets[r]} for r in rows]
        return torch.utils.data.DataLoader(batches, batch_size=None)

    val_dataloader = train_dataloader


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > len(self.seen):
            self.seen.append(trainer.callback_metrics["train/loss"].item())


def train(micro, accumulate, world):
    losses = Losses()
    module = GPTModule(CONFIG, optimizer=sgd)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        precision="64-true",
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=0.05,
        callbacks=[losses],
    )
    trainer.fit(module, datamodule=Rows(micro))
    return {
        "weights": {k: v.detach().numpy() for k, v in module.model.state_dict().items()},
        "losses": losses.seen,
        "val": trainer.callback_metrics["val/loss"].item(),
    }


@pytest.mark.parametrize(("micro", "accumulate"), [(4, 1), (2, 3)])
def test_two_ranks_equal_one_process(ranks, micro, accumulate):
    results = ranks(2, train, micro, accumulate, 2)
    reference = train(2 * micro, accumulate, 1)
    assert len(reference["losses"]) == ROWS // (2 * micro * accumulate)
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-6)  # logged as float32
        assert result["val"] == pytest.approx(reference["val"], rel=1e-6)
        for name, want in reference["weights"].items():
            difference = abs(result["weights"][name] - want).max()
            assert difference <= 1e-12 * max(1.0, abs(want).max()), name
