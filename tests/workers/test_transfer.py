"""Tensors arrive as they were sent, by name or in a row, through memory that is used again."""

import gc
import pickle
import subprocess
import sys
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch

from optexp.errors import Failure, Unshared
from optexp.verification.trial import convey
from optexp.workers import cuda_ipc, transfer
from optexp.workers.client import InProcess, Pending
from optexp.workers.peer import Peer
from optexp.workers.transfer import Inbox, Outbox, SharedMemory

CPU = torch.device("cpu")


def carried(outbox, inbox, tensors, device=CPU):
    """What arrives of them, each piece filled before the one before it is taken."""
    sent = outbox.send(tensors)
    inbox.expect(sent, device)
    outbox.fill(0)
    for piece in range(sent.pieces):
        if piece + 1 < sent.pieces:
            outbox.fill(piece + 1)
        inbox.take(piece)
    return inbox.contents


def same(found, expected):
    found, expected = (list(t.values()) if isinstance(t, dict) else list(t) for t in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def outbox(tmp_path):
    return Outbox([str(tmp_path)])


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(transfer, "PIECE", 256)
    monkeypatch.setattr(SharedMemory, "size", 512)


def many():
    return {
        "x": torch.randn(3, 5),
        "index": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "transposed": torch.randn(4, 6, dtype=torch.bfloat16).t(),
        "conjugated": torch.randn(9, dtype=torch.complex64).conj(),
        "strided": torch.randn(40, 41)[:, ::2],
    }


def test_tensors_arrives_as_it_was_sent(outbox):
    sent = many()
    same(carried(outbox, Inbox(), sent), sent)


def test_tensors_of_many_pieces_arrives_as_it_was_sent(outbox, small_pieces):
    sent = many()
    assert outbox.send(sent).pieces > 10
    same(carried(outbox, Inbox(), sent), sent)


@pytest.mark.parametrize("count", [0, 255, 256, 257, 512, 513])
def test_tensors_may_end_with_a_piece_or_beside_its_end(outbox, small_pieces, count):
    sent = [torch.arange(count) % 251, torch.ones(3)]
    same(carried(outbox, Inbox(), sent), sent)


def test_all_transfers_pass_through_the_same_memory(outbox, small_pieces, tmp_path):
    inbox = Inbox()
    for size in (4, 100_000, 10):
        sent = torch.randn(size)
        assert torch.equal(carried(outbox, inbox, [sent])[0], sent)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 512


def test_what_has_arrived_is_the_receivers_own(outbox):
    inbox = Inbox()
    first = carried(outbox, inbox, [torch.ones(8)])[0]
    second = carried(outbox, inbox, [torch.zeros(8)])[0]
    assert torch.equal(first, torch.ones(8))
    second.fill_(3)
    assert torch.equal(carried(outbox, inbox, [torch.zeros(8)])[0], torch.zeros(8))


def test_a_tensor_without_memory_of_its_own_is_asked_for_its_values(outbox):
    class Lazy(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        def __init__(self, inner):
            self.inner = inner

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.detach.default:
                return args[0]
            return function(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    arrived = carried(outbox, Inbox(), [Lazy(torch.arange(5))])[0]
    assert type(arrived) is torch.Tensor
    assert arrived.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu
def test_tensors_of_a_gpu_arrive_there(outbox):
    inbox, device = Inbox(), torch.device("cuda")
    for size in (2**20, 2**26 + 3, 17):  # the second is more than shared memory holds
        sent = torch.randn(size, device=device)
        arrived = carried(outbox, inbox, {"x": sent, "y": torch.ones(3)}, device)
        assert arrived["x"].device.type == "cuda"
        assert torch.equal(arrived["x"], sent)
        assert torch.equal(arrived["y"].cpu(), torch.ones(3))
    assert torch.ones(1, device=device).item() == 1.0  # no error is left pending


def test_nothing_is_left_behind(outbox):
    path = Path(outbox.send([torch.ones(8)]).place)
    assert path.exists()
    outbox.close()
    assert not path.exists()


def test_a_sender_lets_go_of_what_has_been_filled(outbox, small_pieces):
    pieces = outbox.send([torch.ones(8), torch.ones(300)]).pieces
    for piece in range(pieces):
        outbox.fill(piece)
    assert outbox._contents == []


class Party(Peer):
    """Sends to others and receives from them."""

    def __init__(self, folder):
        super().__init__()
        self.device, self.outbox, self.done = CPU, Outbox([str(folder)]), []

    def fill(self, piece: int) -> None:
        self.done.append(piece)
        super().fill(piece)

    def take(self, piece: int) -> None:
        self.done.append(piece)
        super().take(piece)

    def rest(self) -> None:
        self.inbox.clear()

    def turn_parameters(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_transfers_are_conveyed_to_all_who_receive_them(tmp_path, small_pieces, count):
    sender, *receivers = (InProcess(Party(tmp_path), name) for name in ("one", "two", "three"))
    sent = [torch.arange(count * 32)]  # 256 bytes each
    convey(sender.call(Peer.send, sent), sender, *receivers)
    for arm in (sender, *receivers):
        assert arm.target.done == list(range(count))
    for arm in receivers:
        assert torch.equal(arm.target.inbox.contents[0], sent[0])
    assert receivers[0].target.inbox.contents[0].data_ptr() != receivers[1].target.inbox.contents[0].data_ptr()


def test_no_answer_of_the_sender_is_left_behind_where_a_receiver_fails(tmp_path, small_pieces, monkeypatch):
    """Else it would be taken for the answer to the next message."""
    sender, receiver = (InProcess(Party(tmp_path), name) for name in ("one", "two"))
    receiver.target.inbox.take = None
    sent, waited, wait = sender.call(Peer.send, [torch.arange(64)]), [], Pending.wait
    monkeypatch.setattr(Pending, "wait", lambda pending: waited.append(len(sender.target.done)) or wait(pending))
    with pytest.raises(Failure, match="two"):
        convey(sent, sender, receiver)
    assert waited[-2:] == [2, 2], "that of the failed receiver, and then that of the piece that was filled meanwhile"


@pytest.fixture
def a_device(monkeypatch):
    """What stands in for a device's memory: this process's own."""
    own = WeakValueDictionary()

    def allocate(size):
        own[b"handle"] = memory = torch.empty(size, dtype=torch.uint8)
        return memory, b"handle"

    monkeypatch.setattr(cuda_ipc, "allocate", allocate)
    monkeypatch.setattr(cuda_ipc, "attach", lambda handle, size: own[handle])
    return own


def test_on_a_device_nothing_passes_through_the_host(a_device, small_pieces, tmp_path):
    outbox = Outbox([str(tmp_path)], on_device=True)
    sent = many()
    same(carried(outbox, Inbox(), sent), sent)
    assert not any(tmp_path.iterdir())
    outbox.close()
    assert not a_device


def test_a_devices_memory_goes_with_the_arm_that_held_it(a_device, small_pieces):
    outbox = Outbox(on_device=True)
    outbox.send([torch.ones(3)])
    assert a_device
    del outbox
    assert not a_device


@pytest.mark.parametrize("refused", ["allocate", "attach"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_where_a_device_is_not_shared_transfers_pass_through_the_host(
    a_device, small_pieces, tmp_path, monkeypatch, refused, count
):
    def refuse(*arguments):
        raise Unshared("another container's")

    monkeypatch.setattr(cuda_ipc, refused, refuse)
    sender, receiver = (InProcess(Party(tmp_path), name) for name in ("one", "two"))
    sender.target.outbox = Outbox([str(tmp_path)], on_device=True)
    for round_ in range(2):
        sent = [torch.arange(count * 32) + round_, torch.ones(3)]
        convey(sender.call(Peer.send, sent), sender, receiver)
        same(receiver.target.inbox.contents, sent)
    assert len(list(tmp_path.iterdir())) == 1


ELSEWHERE = """
import pickle
import sys
import torch
from optexp.workers.transfer import Outbox
outbox = Outbox(on_device=True)
sent = [torch.arange(2**24, device="cuda") * 3, torch.ones(5, device="cuda", dtype=torch.bfloat16)]
print(pickle.dumps(outbox.send(sent)).hex(), flush=True)
for line in sys.stdin:
    outbox.fill(int(line))
    print("filled", flush=True)
"""


@pytest.mark.gpu
def test_another_process_sees_a_devices_memory():
    with subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        sent, inbox = pickle.loads(bytes.fromhex(sender.stdout.readline())), Inbox()
        inbox.expect(sent, torch.device("cuda"))
        for piece in range(sent.pieces):
            print(piece, file=sender.stdin, flush=True)
            assert sender.stdout.readline() == "filled\n"
            inbox.take(piece)
        sender.stdin.close()
    numbers, ones = inbox.contents
    assert isinstance(sent.place, bytes)
    assert sent.pieces > 2
    assert torch.equal(numbers, torch.arange(2**24, device="cuda") * 3)
    assert torch.equal(ones, torch.ones(5, device="cuda", dtype=torch.bfloat16))


@pytest.mark.gpu
def test_memory_that_nobody_shows_is_the_drivers_again():
    """Senders of `isolation=none` live as long as their arms do, and the process goes on."""

    def free():
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    inbox, sent = Inbox(), [torch.arange(5, device="cuda")]
    torch.testing.assert_close(carried(Outbox(on_device=True), inbox, sent, torch.device("cuda")), sent)
    before = free()
    for _ in range(4):
        inbox = Inbox()
        torch.testing.assert_close(carried(Outbox(on_device=True), inbox, sent, torch.device("cuda")), sent)
    assert before - free() < SharedMemory.size


@pytest.mark.gpu
def test_shared_memory_begins_with_nothing_in_it():
    """The driver hands out again what this process has freed: a judge's secrets, for one."""
    for _ in range(4):
        secret = torch.full((2**28,), 7, dtype=torch.uint8, device="cuda")
        del secret
        torch.cuda.empty_cache()
        memory, _ = cuda_ipc.allocate(SharedMemory.size)
        assert not memory.any()


def test_an_outbox_that_nobody_holds_leaves_no_file(tmp_path):
    outbox = Outbox([str(tmp_path)])
    outbox.send([torch.ones(3)])
    assert len(list(tmp_path.iterdir())) == 1
    del outbox
    gc.collect()
    assert not list(tmp_path.iterdir())
