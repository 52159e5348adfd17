"""Tensors arrive as they were sent, in any nest, through memory that is used again."""

import pytest
import torch

from optexp.parcel import Inbox, Outbox


def test_a_nest_arrives_as_it_was_sent() -> None:
    nest = [
        (torch.randn(3, 5), torch.arange(7)),
        {"mask": torch.tensor([True, False]), "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)},
        torch.randn(4, 6, dtype=torch.bfloat16).t(),
    ]
    outbox = Outbox()
    arrived = Inbox().receive(outbox.send(nest))
    torch.testing.assert_close(arrived, nest, rtol=0, atol=0)
    outbox.close()


def test_a_larger_parcel_follows_a_smaller_one() -> None:
    outbox, inbox = Outbox(), Inbox()
    assert torch.equal(inbox.receive(outbox.send([torch.zeros(4)]))[0], torch.zeros(4))
    large = torch.randn(100_000)
    assert torch.equal(inbox.receive(outbox.send([large]))[0], large)
    outbox.close()


def test_the_next_parcel_is_found_in_the_same_memory() -> None:
    outbox, inbox = Outbox(), Inbox()
    first = inbox.receive(outbox.send([torch.ones(8)]))[0]
    second = inbox.receive(outbox.send([torch.zeros(8)]))[0]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, torch.zeros(8))
    outbox.close()


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_in_files_that_grow() -> None:
    outbox, inbox = Outbox(), Inbox()
    for size in (2**20, 2**22, 2**20, 2**24):  # the second does not fit into the first one's file
        sent = torch.randn(size, device="cuda")
        arrived = inbox.receive(outbox.send([sent]))[0]
        assert torch.equal(arrived.to("cuda"), sent)
    outbox.close()
    assert torch.ones(1, device="cuda").item() == 1.0  # no error is left pending


def test_nothing_is_left_behind() -> None:
    from pathlib import Path

    outbox = Outbox()
    path = Path(outbox.send([torch.ones(8)]).path)
    assert path.exists()
    outbox.close()
    assert not path.exists()
