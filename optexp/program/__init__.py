"""A program: one step of a workload, and everything that a strategy may change about it."""

from __future__ import annotations

from optexp.program.batches import Batch as Batch
from optexp.program.batches import Outputs as Outputs
from optexp.program.batches import Packed as Packed
from optexp.program.batches import Remembered as Remembered
from optexp.program.batches import Source as Source
from optexp.program.batches import map_batch as map_batch
from optexp.program.batches import tensors_of as tensors_of
from optexp.program.batches import to_device as to_device
from optexp.program.feed import Feed as Feed
from optexp.program.feed import ResidentFeed as ResidentFeed
from optexp.program.first_values import first as first
from optexp.program.first_values import pass_on as pass_on
from optexp.program.not_called import NotCalled as NotCalled
from optexp.program.outputs import UNREADABLE as UNREADABLE
from optexp.program.outputs import flatten as flatten
from optexp.program.outputs import lazy as lazy
from optexp.program.outputs import others as others
from optexp.program.outputs import unreadable as unreadable
from optexp.program.program import Alias as Alias
from optexp.program.program import Program as Program
from optexp.program.program import Step as Step
from optexp.program.program import StepState as StepState
from optexp.program.rates import rate_of as rate_of
from optexp.program.state import BEGIN_AS_ONE as BEGIN_AS_ONE
from optexp.program.state import BEGIN_AS_RATE as BEGIN_AS_RATE
from optexp.program.state import TAKE_SPARSE as TAKE_SPARSE
from optexp.program.state import Snapshot as Snapshot
from optexp.program.state import clear_gradients as clear_gradients
from optexp.program.state import first_value as first_value
from optexp.program.state import gradients as gradients
from optexp.program.state import is_training as is_training
from optexp.program.state import keeping as keeping
from optexp.program.state import mixes_precisions as mixes_precisions
from optexp.program.state import placed as placed
from optexp.program.state import preserved as preserved
from optexp.program.state import prime as prime
from optexp.program.state import set_training as set_training
from optexp.program.state import take_modes as take_modes
from optexp.program.steps import STEPS as STEPS
from optexp.program.steps import forward as forward
from optexp.program.steps import forward_backward as forward_backward
from optexp.program.steps import pullback as pullback
from optexp.program.steps import train as train
