"""Names that kernels import; the code is `optexp.kernelkit.kernel`."""

from __future__ import annotations

from optexp.kernelkit.kernel import DTYPES as DTYPES
from optexp.kernelkit.kernel import LEARNING as LEARNING
from optexp.kernelkit.kernel import REFUSED as REFUSED
from optexp.kernelkit.kernel import SMALL as SMALL
from optexp.kernelkit.kernel import SUPPORTED as SUPPORTED
from optexp.kernelkit.kernel import Case as Case
from optexp.kernelkit.kernel import Kernel as Kernel
from optexp.kernelkit.kernel import are_small_alike as are_small_alike
from optexp.kernelkit.kernel import ceil_div as ceil_div
from optexp.kernelkit.kernel import check_row as check_row
from optexp.kernelkit.kernel import check_tensors as check_tensors
from optexp.kernelkit.kernel import compiled_functions as compiled_functions
from optexp.kernelkit.kernel import contiguous as contiguous
from optexp.kernelkit.kernel import derived as derived
from optexp.kernelkit.kernel import for_graphs as for_graphs
from optexp.kernelkit.kernel import is_differentiated as is_differentiated
from optexp.kernelkit.kernel import is_small as is_small
from optexp.kernelkit.kernel import is_small_with_row as is_small_with_row
from optexp.kernelkit.kernel import is_traced as is_traced
from optexp.kernelkit.kernel import is_transformed as is_transformed
from optexp.kernelkit.kernel import kernels as kernels
from optexp.kernelkit.kernel import laid_out_like as laid_out_like
from optexp.kernelkit.kernel import lowered as lowered
from optexp.kernelkit.kernel import multiprocessors as multiprocessors
from optexp.kernelkit.kernel import needs_gradient as needs_gradient
from optexp.kernelkit.kernel import operation as operation
from optexp.kernelkit.kernel import pays as pays
from optexp.kernelkit.kernel import power_of_two as power_of_two
from optexp.kernelkit.kernel import runs_on as runs_on
from optexp.kernelkit.kernel import symbols as symbols
