"""Variants of the sum of two vectors."""

from __future__ import annotations

import pytest
import torch

from optexp.errors import Unsupported
from optexp.workloads.add import Add
from optexp.workloads.launched_sum import Launched
from optexp.workloads.managed import managed, refuse_large

CPU = torch.device("cpu")


@pytest.mark.parametrize("variant", ["launched", "unified"])
def test_a_cpu_refuses_what_needs_a_card(variant: str) -> None:
    with pytest.raises(Unsupported, match=rf"workload\.variant={variant}: .*device=cuda"):
        Add(size=64, variant=variant).build(CPU, torch.float32, 0)


@pytest.mark.parametrize(("blocks", "threads"), [(0, 32), (1, 0), (1, 1025)])
def test_impossible_launches_are_refused(blocks: int, threads: int) -> None:
    with pytest.raises(ValueError, match=f"blocks={blocks} must be at least 1, and threads={threads} from 1 to 1024"):
        Add(variant="launched", blocks=blocks, threads=threads)
    with pytest.raises(ValueError, match="no backward pass"):
        Add(variant="launched", mode="forward_backward")


def test_unified_memory_takes_a_small_part_of_what_is_free() -> None:
    refuse_large(2**30, 80 * 2**30)
    with pytest.raises(Unsupported, match="8192 MiB of unified memory are more than 5%"):
        refuse_large(2**33, 80 * 2**30)
    with pytest.raises(Unsupported, match="int64"):
        managed(torch.zeros(3, dtype=torch.int64))


def test_a_reference_on_the_host_adds_as_torch_does() -> None:
    a, b = torch.randn(2, 33, dtype=torch.float64)
    assert torch.equal(Launched(4, 32)(a, b), a + b)


@pytest.mark.gpu
@pytest.mark.parametrize(("blocks", "threads"), [(1, 1), (1, 32), (3, 33), (1056, 256), (8448, 1024)])
def test_every_launch_configuration_adds_all_elements(blocks: int, threads: int) -> None:
    a, b = torch.randn(2, 4099, device="cuda")
    assert torch.equal(Launched(blocks, threads)(a, b), a + b), f"{blocks} blocks of {threads} threads leave some out"


@pytest.mark.gpu
def test_unified_inputs_are_shared_and_add_up() -> None:
    workload = Add(size=2**20, variant="unified")
    generator = torch.Generator("cuda").manual_seed(0)
    program, batch = workload.build(torch.device("cuda"), torch.float32, 0), workload.batch(generator)
    plain = Add(size=2**20).batch(torch.Generator("cuda").manual_seed(0))
    found = program.step(program, batch)["output"]
    assert torch.equal(found, plain[0] + plain[1]), "unified memory holds other values"
    with pytest.raises(Unsupported, match="unified memory"):
        managed(torch.empty(torch.cuda.mem_get_info()[0] // 16 // 4, device="cuda"))
