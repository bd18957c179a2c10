"""Slices of a micro-batch, put together again, are the micro-batch; no target is lost between them."""

from __future__ import annotations

import pytest
import torch

from engine.data.batch import Batch, slice_of
from engine.data.tokens import IGNORED

PAD = 99


def batch_of(length: int) -> Batch:
    ids_BS = torch.arange(2 * length).view(2, length)
    labels_BS = torch.where(ids_BS % 3 == 0, IGNORED, ids_BS)
    return Batch(ids_BS, labels_BS, None, None, (5, 7), int((labels_BS[:, 1:] != IGNORED).sum()))


@pytest.mark.parametrize(("length", "places"), [(8, 2), (7, 2), (9, 4), (2, 4), (1, 2)])
def test_slices_hold_every_token_and_every_target_once(length: int, places: int) -> None:
    whole = batch_of(length)
    slices = [slice_of(whole, place, places, pad_id=PAD) for place in range(places)]
    ids_BS, labels_BS = (
        torch.cat([getattr(part, name) for part in slices], 1) for name in ("input_ids_BS", "labels_BS")
    )
    assert len({part.input_ids_BS.shape for part in slices}) == 1
    assert torch.equal(ids_BS[:, :length], whole.input_ids_BS)
    assert (ids_BS[:, length:] == PAD).all() and (labels_BS[:, length - 1 :] == IGNORED).all()
    assert torch.equal(labels_BS[:, : length - 1], whole.labels_BS[:, 1:])
    assert sum(part.target_tokens for part in slices) == whole.target_tokens


def test_the_last_position_of_a_slice_predicts_the_first_token_of_the_next() -> None:
    first, second = (slice_of(batch_of(8), place, 2, pad_id=PAD) for place in range(2))
    assert first.labels_BS[0, -1] == second.input_ids_BS[0, 0] == 4


def test_positions_go_on_from_slice_to_slice_and_never_beyond_the_last_token() -> None:
    slices = [slice_of(batch_of(9), place, 4, pad_id=PAD) for place in range(4)]
    positions = [part.position_ids_BS.tolist() for part in slices if part.position_ids_BS is not None]
    assert positions == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]], [[8, 8, 8]]]
    assert [part.first_position for part in slices] == [0, 3, 6, 9]
