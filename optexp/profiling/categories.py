"""The kind of work that an operator does."""

from __future__ import annotations

import re
from functools import cache

_CATEGORIES = {  # the first pattern that matches
    "compiled": r"Torch-Compiled|CompiledFunction|CompiledFxGraph|TorchDynamo|AOTDispatcher|Pregraph|triton_|cpp_fused",
    "autograd": r"autograd::|torch::autograd|\w+Backward\d*$",
    "matrix": r"aten::(_?addmm|mm|bmm|baddbmm|matmul|linear|mkldnn_linear|.*conv|dot|mv|addmv)|mkldnn::_linear",
    "attention": r"aten::.*attention",
    "normalization": r"aten::.*(_norm|batch_norm)",
    "activation": r"aten::(.*softmax|gelu|relu|silu|sigmoid|tanh|elu|leaky_relu|threshold|hardtanh|mish|softplus)",
    "optimizer": r"aten::(_fused|_foreach)",
    "embedding": r"aten::.*embedding",
    "reduction": r"aten::(sum|mean|amax|amin|max|min|std|var|prod|any|all|norm|argmax|.*_loss)",
    "memory": r"aten::(copy_|clone|contiguous|empty|cat|stack|to$|_to_copy|fill_|zero|ones|new_|resize|index|gather)",
    "communication": r"c10d::|nccl:",
    "elementwise": r"aten::",
}


@cache
def category(name: str) -> str:
    """The category of an operator ("aten::mm" is "matrix"); "other" where no pattern matches."""
    return next((kind for kind, pattern in _CATEGORIES.items() if re.match(pattern, name)), "other")
