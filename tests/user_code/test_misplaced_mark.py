"""A mark at a loop that is no training loop: the sentence says what it marks, and where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import NoReference
from optexp.workloads.script import Script

HEAD = """\
import torch
import optexp
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
"""
EPOCHS = """\
for epoch in optexp.steps(range(2), model=model, optimizer=optimizer):
    total = 0.0
    for x in loader:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
"""
STEPPED = """\
def update(x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.step()
for x in optexp.steps(loader, model=model, optimizer=optimizer):
    optimizer.zero_grad()
    update(x)
"""
EVALUATES = """\
for x in optexp.steps(loader, model=model, optimizer=optimizer):
    y = model(x)
"""
HIDDEN = """\
held = {"in": [optimizer]}
del optimizer
for x in optexp.steps(loader, model=model, optimizer=held["in"][0]):
    model(x).sum().backward()
"""
ACCUMULATES = """\
for i, x in enumerate(optexp.steps(loader, model=model, optimizer=optimizer)):
    loss = model(x).sum()
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""
EVERY = EPOCHS.replace("range(2)", "range(4)").replace("optimizer=optimizer)", "optimizer=optimizer, every=2)")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            EPOCHS,
            "one turn of train.py:6 makes 4 optimizer steps: the mark is on an outer loop; put it on the loop of l",
        ),
        (STEPPED, "one turn of train.py:10 makes 2 optimizer steps: mark the loop whose turn makes one"),
        (EVALUATES, "the loop of train.py:6 makes no optimizer step: mark the training loop, or leave out optimizer="),
        (HIDDEN, "no variable that the marked body names holds the marked optimizer"),
        (ACCUMULATES, "one turn makes no optimizer step at the mark of train.py:6, where the step stands under a"),
        (EVERY, "2 turns of train.py:6 make 8 optimizer steps: every= is the number of turns that make one"),
    ],
    ids=["epochs", "several", "evaluation", "hidden", "accumulation", "every"],
)
def test_says_what_the_mark_is_at(body: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + body)
    with pytest.raises(NoReference) as caught:
        Script(mode="train", path=str(path)).build(torch.device("cpu"), torch.float32, 0).run()
    assert str(caught.value).startswith(told)
