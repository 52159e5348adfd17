"""What an observation holds, and that taking it leaves the caller's batch alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
import torch

from optexp.equivalence.effects import broken_effects
from optexp.equivalence.observation import observe, overwritten, repeats
from optexp.equivalence.tensor_math import identical
from optexp.program import Snapshot

CPU = torch.device("cpu")


def built(net, mode):
    workload = net(mode=mode)
    return workload.build(CPU, torch.float32, 0), workload.batch(torch.Generator().manual_seed(1))


def kinds(seen):
    return {name.partition("/")[0] for name in seen}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("forward", {"out", "buffer", "flag"}),
        ("forward_backward", {"out", "grad", "buffer", "flag", "changed"}),
        ("train", {"out", "grad", "buffer", "flag", "before", "after", "rule"}),
    ],
)
def test_names(net, mode, expected):
    program, batch = built(net, mode)
    seen = observe(program, batch)
    assert kinds(seen) == expected
    assert not seen["flag/noisy"]
    assert not seen["flag/random"]


def test_before_and_after_are_copies(net):
    program, batch = built(net, "train")
    seen = observe(program, batch)
    name = "param/0.weight"
    assert not torch.equal(seen[f"before/{name}"], seen[f"after/{name}"])
    assert torch.equal(seen[f"after/{name}"], program.state()[name])
    assert seen["after/optimizer/0.weight/step"] == seen["before/optimizer/0.weight/step"] + 1


def test_a_noisy_run_tells_that_it_is_one_and_holds_no_update(net):
    program, batch = built(net, "train")
    seen = observe(program, batch, noise=3)
    assert seen["flag/noisy"]
    assert "after" not in kinds(seen)


def test_a_mutated_batch_is_reported_and_the_callers_is_kept(net):
    program, batch = built(net, "forward")

    def in_place(program, batch):
        batch[0].mul_(2)
        return program_step(program, batch)

    program_step, kept = program.step, batch[0].clone()
    assert observe(program, batch)["flag/inputs_intact"]
    assert not observe(replace(program, step=in_place), batch)["flag/inputs_intact"]
    assert torch.equal(batch[0], kept)


def test_a_batch_with_nan_is_intact(net):
    program, batch = built(net, "forward")
    batch[0][0] = torch.nan
    assert observe(program, batch)["flag/inputs_intact"]


def test_aliases_of_inputs_and_of_each_other(net):
    program, batch = built(net, "forward")

    def step(program, batch):
        total = batch[0] + 1
        return {"a": batch[0][:1], "b": total, "c": total.view(-1), "d": total.clone()}

    assert observe(replace(program, step=step), batch)["flag/aliases"].tolist() == [-1, 1, 1, 3]


def test_parts_of_one_tensor_share_no_memory_unless_they_overlap(net):
    program, batch = built(net, "forward")

    def step(program, batch):
        rows = torch.arange(24.0).view(4, 6)
        pairs = torch.view_as_complex(rows.view(4, 3, 2))
        return {"a": rows[:, 0], "b": rows[:, 3], "c": rows[2:, 4:], "d": rows[1], "e": pairs[:, 2], "f": pairs[1, :1]}

    assert observe(replace(program, step=step), batch)["flag/aliases"].tolist() == [0, 1, 2, 0, 2, 0]


def test_outputs_whose_signs_or_values_are_not_in_memory_are_read_as_what_they_are(net):
    program, batch = built(net, "forward")
    turned = torch.randn(4, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))

    def step(program, batch):
        own = turned.clone()
        bits = {"a": torch._neg_view(own.real.clone()), "b": own.clone().conj(), "c": own.clone().conj().imag}
        return {**bits, "d": torch._efficientzerotensor((2, 3))}

    seen = observe(replace(program, step=step), batch)
    expected = {"a": -turned.real, "b": turned.conj().resolve_conj(), "c": -turned.imag, "d": torch.zeros(2, 3)}
    assert all(identical(seen[f"out/{name}"], tensor) for name, tensor in expected.items())
    assert seen["flag/aliases"].tolist() == [0, 1, 2, 3]
    assert seen["flag/finished"]


def test_an_output_whose_elements_share_a_place_is_told(net):
    program, batch = built(net, "forward")
    row = batch[0].view(1, -1) + 1

    def seen_of(rows):
        return observe(replace(program, step=lambda program, batch: {"rows": rows}), batch)

    seen = {"repeat": seen_of(row.repeat(4, 1)), "expand": seen_of(row.expand(4, -1))}
    assert [each["flag/aliases"].tolist() for each in seen.values()] == [[0], [-3]]
    (finding,) = broken_effects(seen["expand"], seen["repeat"], None, False, False)
    assert "several elements in one place" in finding.message
    assert not list(broken_effects(seen["repeat"], seen["expand"], None, False, False))


@pytest.mark.parametrize("buffers", [1, 30, 64])
def test_an_output_that_a_much_later_step_writes_over_is_lost(net, buffers):
    program, batch = built(net, "forward")
    ring, calls = [torch.zeros(4) for _ in range(buffers)], count()

    def step(program, batch):
        return {"output": ring[next(calls) % buffers].copy_(batch[0].flatten()[:4])}

    other = (batch[0] + 1, *batch[1:])
    assert overwritten(replace(program, step=step), batch, other) == ["output"]
    assert overwritten(program, batch, other) == []


def test_a_tensor_subclass_is_reported(net):
    class Lazy(torch.Tensor):
        pass

    def step(program, batch):
        return {"output": (batch[0] + 1).as_subclass(Lazy)}

    program, batch = built(net, "forward")
    assert observe(program, batch)["flag/plain"]
    assert not observe(replace(program, step=step), batch)["flag/plain"]


def test_repeats_tells_a_program_that_does_from_one_that_does_not(net):
    program, batch = built(net, "train")
    assert repeats(program, batch, Snapshot(program), times=2)
    generator = torch.Generator().manual_seed(0)

    def step(inner, batch):
        return {"loss": program.step(inner, batch)["loss"] + torch.rand((), generator=generator)}

    assert not repeats(replace(program, step=step), batch, Snapshot(program), times=2)
