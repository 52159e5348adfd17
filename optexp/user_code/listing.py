"""A user's own code as source for `repro.py`: their objects are called, and what they left out is written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from optexp.errors import NotCovered
from optexp.export.inlining import literal
from optexp.export.repro import Source
from optexp.user_code.adapters import LOSSES, Copies, Function, Iterated, Maker, by_label
from optexp.user_code.objects import written

if TYPE_CHECKING:
    from optexp.program import Program
    from optexp.user_code.workload import UserWorkload


@dataclass
class Spelled:
    """Expressions for what the user gave; in all of them `user` holds their objects.

    lines:  how `user` comes to be
    model:  what `Maker` was given
    made:   what a model is made with, as the arguments of a call
    make:   lines that define make(**sizes), which gives one batch in the user's form
    loader: what gives a loader when it is called
    """

    lines: str
    model: str
    made: str | None = None
    make: str | None = None
    loader: str | None = None
    loss: str | None = None
    optimizer: str | None = None
    train_step: str | None = None
    files: dict[str, bytes] = field(default_factory=dict)


def listing(own: UserWorkload, program: Program, spelled: Spelled) -> Source:
    """Source of the program of a user's own code, for `repro.py`.

    Raises:
        NotCovered: a part has no source.
    """
    if own.layout.form is not None:
        raise NotCovered("a batch has tensors inside its entries, which the file would have to put together")
    model = spelled_model(own.parts.model, spelled.model, spelled.made)
    tensors = ", ".join(f"torch.as_tensor({_entry(own, name, 'made')})" for name in own.layout.names)
    source = Source(
        lines=spelled.lines,
        model=f"Function({model})" if isinstance(program.model, Function) else model,
        batch=f"packed(make({'**next(sizes)' if own.shapes else ''}))",
        packed=f"({tensors},)",
        files=spelled.files,
    )
    if own.parts.loader is not None:
        source.loader = f"{spelled.loader}()"
        if isinstance(own.given.loader.dataset, Iterated):
            source.loader = f"DataLoader(Iterated({spelled.loader}), batch_size=None)"
    else:
        source.lines += f"\n\n\n{spelled.make}\n\n\n{PACKED.format(tensors=tensors)}"
        source.lines += f"\n\nsizes = itertools.cycle({literal(own.shapes, 'workload.shapes')})" * bool(own.shapes)
    if own.own_step:
        source.step = TRAIN_STEP.format(step=spelled.train_step, batch=_unpacked(own))
    elif program.loss is not None:
        source.loss = _loss(own, spelled)
    if program.optimizer is not None:
        source.optimizer = _optimizer(own, spelled)
    return source


PACKED = """\
def packed(made):
    return tuple(t.to(device, dtype if t.is_floating_point() else t.dtype) for t in ({tensors},))
"""

TRAIN_STEP = """\
class Called:
    \"\"\"Called, it is `forward`; for all else it is the model.\"\"\"

    def __call__(self, *args, **kwargs):
        return forward(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(model, name)


def step(batch):
    model.zero_grad(set_to_none=True)
    return {step}(Called(), {batch}, optimizer)
"""


def spelled_model(maker: Maker, given: str, made: str | None = None) -> str:
    """Source of a new model.

    Args:
        maker: Of the model.
        given: Expression for what `maker` was given.
        made: Arguments of its call as source; those of `maker` by default.
    """
    if isinstance(maker, Copies):
        return given
    if made is None:
        args = [written(value, "an argument of the model") for value in maker.args]
        args += [f"{name}={written(value, f'the argument {name}')}" for name, value in maker.kwargs.items()]
        made = ", ".join(args)
    if maker.makes:
        return f"{given}({made})"
    return f"partial({given}, {made})" if made else given


def _entry(own: UserWorkload, name: str, made: str) -> str:
    """One entry of a batch in the user's form."""
    if own.layout.single:
        return made
    return f"{made}[{name}]" if own.layout.numbered else f"{made}[{name!r}]"


def _unpacked(own: UserWorkload) -> str:
    """The user's form of `batch`."""
    layout = own.layout
    if layout.plain:
        return "list(batch)" if layout.made is list else "batch"
    given = {name: f"batch[{index}]" for index, name in enumerate(layout.names)}
    given |= {name: literal(value, f"the entry {name} of a batch") for name, value in layout.constants.items()}
    if layout.numbered:
        return f"({', '.join(given[name] for name in sorted(given, key=int))},)"
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in given.items())}}}"


def _loss(own: UserWorkload, spelled: Spelled) -> str:
    """loss_fn(output, batch), with the choices of `optexp.user_code.learning.criterion`."""
    count = own.targets
    if own.loss is not None:
        options = literal(own.loss_args, "workload.loss_args") if own.loss_args else ""
        if isinstance(LOSSES[own.loss], type):
            made = f"nn.{own.loss}({f'**{options}' if options else ''})"
        else:
            made = f"partial(F.{own.loss}, **{options})" if options else f"F.{own.loss}"
        return f"against({made}, {count})"
    if own.parts.loss is not None:
        if by_label(own.parts.loss):
            return f"against({spelled.loss}, {count})"
        return f"lambda output, batch: {spelled.loss}(output, {_unpacked(own)})"
    if count:
        name = "cross_entropy" if own.layout.integer_labels else "mse_loss"
        return f"against(F.{name}, {count})"
    return "own_loss"


def _optimizer(own: UserWorkload, spelled: Spelled) -> str:
    if own.optimizer is None and own.parts.optimizer is not None:
        return f"{spelled.optimizer}(list(model.parameters()))"
    options = {"lr": own.lr, **own.optimizer_args}
    given = ", ".join(f"{name}={literal(value, f'workload.{name}')}" for name, value in options.items())
    return f"torch.optim.{own.optimizer or 'AdamW'}([p for p in model.parameters() if p.requires_grad], {given})"
