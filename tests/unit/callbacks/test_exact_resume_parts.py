"""What exact resume is made of: random states, places in the list, counters."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_pretrain.callbacks import _random
from lit_pretrain.callbacks.order import move_to_end, move_to_front
from lit_pretrain.data import TokenDataModule
from tests.support import resumable
from tests.unit.callbacks.tiny import trainer


def test_random_states_round_trip_through_a_file(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    random.gauss(0, 1)
    np.random.standard_normal()  # leaves half a pair behind
    state = _random.capture()
    torch.save(state, tmp_path / "state")
    expected = [random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), torch.rand(3).tolist()]
    random.seed(4)
    np.random.seed(5)
    torch.manual_seed(6)
    _random.restore(torch.load(tmp_path / "state", weights_only=True))
    assert [random.gauss(0, 1), np.random.standard_normal(), np.random.rand(), torch.rand(3).tolist()] == expected


def test_new_ranks_draw_numbers_of_their_own_and_always_the_same():
    torch.manual_seed(3)
    states = [_random.capture()]
    torch.manual_seed(4)
    states.append(_random.capture())

    def draw(rank):
        _random.restore(_random.of_rank(states, rank=rank))
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    drawn = [draw(rank) for rank in range(5)]
    assert drawn == [draw(rank) for rank in range(5)]
    assert len({numbers[2] for numbers in drawn}) == 5
    torch.manual_seed(4)
    assert drawn[1][2] == float(torch.rand(()))


def test_places_in_the_list(tmp_path):
    a, b, c = pl.Callback(), pl.Callback(), pl.Callback()
    save = ModelCheckpoint(tmp_path)
    fit = trainer(tmp_path, a, b, save, c, enable_checkpointing=True)
    move_to_front(fit, c)
    assert [x for x in fit.callbacks if x in (a, b, c, save)] == [c, a, b, save]
    move_to_end(fit, a)
    assert [x for x in fit.callbacks if x in (a, b, c, save)] == [c, b, a, save]


def test_data_of_the_support_is_what_it_says(tmp_path):
    data = TokenDataModule(
        resumable.corpus(tmp_path), sequence_length=8, micro_batch_size=4, global_batch_size=resumable.ROWS
    )
    assert data.updates_per_epoch == 9
