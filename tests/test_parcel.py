"""Tensors arrive as they were sent, in any nest, and a reader cannot change what others read."""

import torch

from optexp.parcel import Outbox, receive


def test_a_nest_arrives_as_it_was_sent() -> None:
    nest = [
        (torch.randn(3, 5), torch.arange(7)),
        {"mask": torch.tensor([True, False]), "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)},
        torch.randn(4, 6, dtype=torch.bfloat16).t(),
    ]
    outbox = Outbox()
    arrived = receive(outbox.send(nest))
    torch.testing.assert_close(arrived, nest, rtol=0, atol=0)
    outbox.close()


def test_a_larger_parcel_follows_a_smaller_one() -> None:
    outbox = Outbox()
    outbox.send([torch.zeros(4)])
    large = torch.randn(100_000)
    assert torch.equal(receive(outbox.send([large]))[0], large)
    outbox.close()


def test_a_reader_cannot_change_what_others_read() -> None:
    outbox = Outbox()
    parcel = outbox.send([torch.ones(8)])
    receive(parcel)[0].zero_()
    assert torch.equal(receive(parcel)[0], torch.ones(8))
    outbox.close()


def test_nothing_is_left_behind() -> None:
    from pathlib import Path

    outbox = Outbox()
    path = Path(outbox.send([torch.ones(8)]).path)
    assert path.exists()
    outbox.close()
    assert not path.exists()
