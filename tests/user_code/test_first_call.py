"""A batch that the model cannot take is named; that a library of the card has no memory is no fault of a batch."""

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import ConfigError
from optexp.user_code.first_call import naming_inputs


class Refuses(nn.Module):
    """As a function in C++ does: the line that calls it raises nothing by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def forward(self, x: Tensor) -> Tensor:
        torch._check_with(RuntimeError, False, lambda: self.text)
        return x


def called(text: str) -> None:
    model, x = Refuses(text), torch.ones(2)
    with naming_inputs(model, (x,), "get_inputs()"):
        model(x)


def test_what_torch_refuses_names_the_batch() -> None:
    with pytest.raises(ConfigError, match=r"the model cannot take its batch: .*; the batch .* is \[2\] float32"):
        called("mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.parametrize("text", ["CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"])
def test_a_card_that_is_full_is_no_fault_of_the_batch(text: str) -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        called(f"CUDA error: {text}")
